"""Where the time goes: every kernel of a runtime has its layer, its nodes and its precision."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from float_files import float_onnx
from onnx import TensorProto, helper
from qdq_models import make_model, weights

import qsdk
from onnx_backend.profiling.kernels import precision_of
from onnx_backend.runtimes import onnxruntime, openvino
from qsdk import CalibrationError, ConfigError, DataError, FileFormatError, ModelError, OnnxSim, QuantSim
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

FAST: dict[str, Any] = {"threads": 1, "repeats": 3, "progress": False}
RUNTIMES = ("onnxruntime", "openvino")
node = helper.make_node


@dataclass(frozen=True)
class Demo:
    """The demo network as a sim and as files."""

    sim: QuantSim
    files: dict[str, Path]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    images = torch.from_numpy(load().calibration_images[:32])
    files = {name: folder / f"{name}.onnx" for name in ("float", "qdq", "integer", "onnxruntime")}
    onnx.save(float_onnx(load_pretrained(), (images,)), files["float"])
    sim = qsdk.quantize(load_pretrained(), images)
    qsdk.calibrate(sim, [images], progress=False)
    qsdk.export(sim, files["qdq"])
    qsdk.to_integer(files["qdq"], files["integer"])
    qsdk.to_integer(files["qdq"], files["onnxruntime"], target="onnxruntime")
    return Demo(sim, files)


def profiled(model: Any, **options: Any) -> qsdk.Report:
    if options.get("runtime") == "openvino":
        pytest.importorskip("openvino", reason="openvino has no wheel for this system")
    return qsdk.analysis.profile(model, **{**FAST, **options})


def nodes_of(report: qsdk.Report) -> list[str]:
    return [name for row in report.rows for name in row["nodes"].split(", ") if name]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "runtime"),
    [(name, runtime) for name in ("float", "qdq", "integer") for runtime in RUNTIMES]
    # its contrib ops are ONNX Runtime's own
    + [("onnxruntime", "onnxruntime")],
)
def test_every_kernel_has_its_place_in_the_file(demo: Demo, name: str, runtime: str):
    report = profiled(demo.files[name], runtime=runtime)
    file = {item.name: item.op_type for item in onnx.load(demo.files[name]).graph.node}
    assert sum(row["share"] for row in report.rows) == pytest.approx(1)
    assert [row["ms"] for row in report.rows] == sorted((row["ms"] for row in report.rows), reverse=True)
    assert set(nodes_of(report)) <= set(file)
    # an op runs once, whatever it was fused with
    heavy = [label for label, op_type in file.items() if op_type in ("Conv", "ConvInteger", "QLinearConv")]
    assert all(nodes_of(report).count(label) == 1 for label in heavy)
    # a kernel without a node is a conversion that the runtime put in, and has the layer beside it
    own = [row for row in report.rows if not row["nodes"]]
    layers = {row["layer"] for row in report.rows if row["nodes"]}
    if runtime == "onnxruntime":
        assert all(row["precision"] == "conversion" and row["layer"] in layers for row in own)


@pytest.mark.slow
def test_layers_of_a_file_are_the_owners_of_its_sites(demo: Demo):
    owners = {site.rpartition(":")[0] for site in demo.sim.plan.decisions}
    for runtime in RUNTIMES:
        rows = profiled(demo.files["qdq"], runtime=runtime).rows
        assert {row["layer"] for row in rows if row["precision"] != "index"} <= owners
    stem = next(r for r in profiled(demo.files["qdq"]).rows if r["layer"] == "stem.0" and r["op_type"] == "QLinearConv")
    assert stem["nodes"] == "node_conv2d, node_relu"


def test_residual_sum_is_part_of_the_convolution_that_it_was_fused_to(demo: Demo):
    rows = profiled(demo.files["float"]).rows
    fused = [row["nodes"].split(", ") for row in rows if "node_relu_3" in row["nodes"].split(", ")]
    (nodes,) = fused
    assert [name.partition("_")[2].rstrip("_0123456789") for name in nodes] == ["Conv", "add", "relu"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_precision_of_the_demo_network(demo: Demo, runtime: str):
    shares = {name: profiled(demo.files[name], runtime=runtime).summary for name in ("float", "qdq")}
    assert shares["float"]["integer_share"] == 0
    assert shares["float"]["float_share"] > 0.9
    assert shares["qdq"]["integer_share"] > 0.4
    for summary in shares.values():
        kinds = ("integer", "float", "conversion", "index")
        assert sum(summary[f"{kind}_share"] for kind in kinds) == pytest.approx(1)


def test_integer_only_file_computes_no_float(demo: Demo):
    for name in ("integer", "onnxruntime"):
        assert profiled(demo.files[name]).summary["float_share"] == 0
    rows = profiled(demo.files["qdq"]).rows
    assert {row["precision"] for row in rows if row["op_type"] == "QLinearConv"} == {"integer"}
    assert {row["precision"] for row in rows if row["op_type"].endswith("quantizeLinear")} == {"conversion"}


@pytest.mark.parametrize(("times", "noisy"), [([1.0, 1.1] * 5, False), ([1.0, 1.0, 1.0, 2.0, 3.0] * 2, True)])
def test_times_that_differ_from_run_to_run_are_called_noisy(demo: Demo, monkeypatch, times: list[float], noisy: bool):
    waits = iter(1e-3 * np.array(times))
    monkeypatch.setattr(onnxruntime, "_seconds", lambda session, feeds: float(next(waits)))
    summary = profiled(demo.files["qdq"], repeats=10).summary
    assert summary["ms"] == pytest.approx(np.median(times))
    assert ("noisy" in summary) == noisy
    if noisy:
        assert summary["spread"] == pytest.approx(2.0)
        assert "eight of ten runs took 1 to 3 ms" in summary["noisy"]


@pytest.mark.slow
def test_sim_is_profiled_as_it_is_exported_and_compared_with_another_file(demo: Demo, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = profiled(demo.sim, data=[load().calibration_images[:2]], against=demo.files["float"])
    assert not list(tmp_path.iterdir()), "the profile and the exported file are removed"
    assert report.summary["threads"] == 1
    assert report.summary["speedup"] == report.summary["against_ms"] / report.summary["ms"] > 0
    assert report.summary["runtime"].startswith("ONNX Runtime ")
    assert {"layer", "op_type", "ms", "share", "precision", "nodes"} == set(report.rows[0])
    assert "QLinearConv" in {row["op_type"] for row in report.rows}


def branching() -> onnx.ModelProto:
    """A choice between two layers by the sign of an input."""
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in ("a", "b")]
    branches = {
        f"{key}_branch": helper.make_graph([node("MatMul", ["x", weight], [out])], key, [], [outputs[number]])
        for number, (key, weight, out) in enumerate((("then", "v", "a"), ("else", "w", "b")))
    }
    return make_model(
        [
            node("ReduceMax", ["x"], ["top"], keepdims=0),
            node("Greater", ["top", "zero"], ["choice"]),
            node("If", ["choice"], ["c"], "chooser", **branches),
            node("Relu", ["c"], ["y"], "end"),
        ],
        {"x": [1, 64]},
        {"y": [1, 64]},
        {**weights(v=(64, 64), w=(64, 64)), "zero": np.zeros((), np.float32)},
    )


def spelled_out() -> onnx.ModelProto:
    """A layer with its activation, a LayerNormalization and a Gelu, op by op."""
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "product"),
        node("Add", ["m", "b"], ["a"], "bias"),
        node("Relu", ["a"], ["r"], "relu"),
        node("ReduceMean", ["r", "last"], ["mean"], "mean"),
        node("Sub", ["r", "mean"], ["d"], "centre"),
        node("Pow", ["d", "two"], ["squares"], "squares"),
        node("ReduceMean", ["squares", "last"], ["v"], "variance"),
        node("Add", ["v", "tiny"], ["more"], "guard"),
        node("Sqrt", ["more"], ["s"], "root"),
        node("Div", ["d", "s"], ["n"], "normal"),
        node("Mul", ["n", "gain"], ["g"], "gain"),
        node("Add", ["g", "b"], ["l"], "shift"),
        node("Div", ["l", "root2"], ["e0"], "smaller"),
        node("Erf", ["e0"], ["e1"], "erf"),
        node("Add", ["e1", "one"], ["e2"], "above"),
        node("Mul", ["l", "e2"], ["e3"], "gate"),
        node("Mul", ["e3", "half"], ["y"], "halved"),
    ]
    numbers = {"two": 2.0, "tiny": 1e-5, "root2": 2**0.5, "one": 1.0, "half": 0.5}
    stored = {name: np.asarray(value, np.float32) for name, value in numbers.items()}
    stored |= {**weights(w=(8, 8), b=(8,), gain=(8,)), "last": np.array([-1])}
    return make_model(nodes, {"x": [4, 8]}, {"y": [4, 8]}, stored)


def test_kernel_that_replaces_many_nodes_names_them_all():
    rows = {row["op_type"]: (row["layer"], row["nodes"]) for row in profiled(spelled_out()).rows}
    assert rows == {
        "FusedGemm": ("product", "product, bias, relu"),
        "LayerNormalization": ("shift", "mean, centre, squares, variance, guard, root, normal, gain, shift"),
        "Gelu": ("halved", "smaller, erf, above, gate, halved"),
    }
    rows = {row["layer"]: row["nodes"] for row in profiled(spelled_out(), runtime="openvino").rows}
    assert rows["product"] == "product, bias, relu"
    assert sorted(", ".join(rows.values()).split(", ")) == sorted(item.name for item in spelled_out().graph.node)


def test_kernels_that_openvino_calls_not_run_are_listed(monkeypatch):
    # what takes less than half a microsecond has no time there, and its nodes must not go to another kernel
    monkeypatch.setattr(openvino, "_average_times", lambda runner: {})
    rows = profiled(spelled_out(), runtime="openvino").rows
    assert {row["layer"]: row["nodes"] for row in rows}["product"] == "product, bias, relu"
    assert len(rows) > 1
    assert all(row["ms"] == 0 for row in rows)


def test_body_of_a_branch_counts_once(demo: Demo):
    rows = profiled(branching()).rows
    assert sorted(row["op_type"] for row in rows) == ["Greater", "If", "ReduceMax", "Relu"]
    assert {"chooser", "end"} < {row["layer"] for row in rows}


def text_model() -> onnx.ModelProto:
    rows = ["batch", "length"]
    model = make_model(
        [node("Gather", ["table", "ids"], ["y"], "looks")], {"ids": rows}, {"y": [*rows, 4]}, weights(table=(8, 4))
    )
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    return model


def test_open_sizes_are_asked_for():
    with pytest.raises(ConfigError, match=r"'ids' is \[1, 'length'\]; give data, or its sizes: shapes={'ids': "):
        profiled(text_model())
    with pytest.raises(ConfigError, match=r"shapes names 'x'; the inputs are ids"):
        profiled(text_model(), shapes={"x": (1, 2)})
    assert profiled(text_model(), shapes={"ids": (1, 5)}).rows
    assert profiled(text_model(), data=[np.zeros((2, 5), np.int64)]).rows


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"runtime": "qnn"}, "the time of an emulation says nothing about the device"),
        ({"runtime": "tflite"}, "runtime='tflite' is unknown; choose one of onnxruntime, openvino"),
        ({"threads": 0}, "threads=0 and repeats=3 must be 1 or more"),
        ({"repeats": 0}, "threads=1 and repeats=0 must be 1 or more"),
    ],
)
def test_wrong_options(demo: Demo, options: dict[str, Any], match: str):
    for model in (demo.files["qdq"], demo.sim):
        with pytest.raises(ConfigError, match=match):
            qsdk.analysis.profile(model, **{**FAST, **options})


@pytest.mark.parametrize(
    ("op_type", "reads", "makes", "from_codes", "precision"),
    [
        ("MatMulInteger", ["uint8", "int8"], ["int32"], False, "integer"),
        ("Add", ["int32", "int32"], ["int32"], True, "integer"),
        ("Add", ["int64", "int64"], ["int64"], False, "index"),
        ("Add", ["float", "float"], ["float"], False, "float"),
        ("Transpose", ["uint8"], ["uint8"], False, "integer"),
        ("DequantizeLinear", ["uint8", "float"], ["float"], False, "conversion"),
    ],
)
def test_a_kernel_computes_with_what_it_reads(op_type: str, reads: list[str], makes: list[str], from_codes, precision):
    assert precision_of(op_type, reads, makes, from_codes=from_codes, in_integers=False) == precision


def test_wrong_input(demo: Demo, tmp_path: Path):
    with pytest.raises(FileFormatError, match="there is no file"):
        profiled(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=r"cannot load the model: .*Unknown"):
        profiled(make_model([node("Unknown", ["x"], ["y"])], {"x": [1]}, {"y": [1]}, {}))
    with pytest.raises(CalibrationError):
        profiled(qsdk.quantize(torch.nn.Linear(4, 2), torch.randn(1, 4)))
    with pytest.raises(DataError, match="the data holds no batch"):
        profiled(demo.files["qdq"], data=[])
    with pytest.raises(DataError, match="the first batch has 2 elements, the model takes 1"):
        profiled(demo.files["qdq"], data=[(1, 2)])
    for runtime in RUNTIMES:
        with pytest.raises(DataError, match=r"\(1, 1, 5, 5\)"):
            profiled(demo.files["qdq"], data=[np.zeros((1, 1, 5, 5), np.float32)], runtime=runtime)
    with pytest.raises(ConfigError, match="expected a sim"):
        profiled(torch.nn.Linear(4, 2))


def test_error_of_the_runtime_names_the_node_of_the_file():
    with pytest.raises(DataError, match=r"does not run on the given input \(ids: int64 \(1, 2\)\): .*Name:'looks'"):
        profiled(text_model(), data=[np.array([[99, 0]])])


def test_bfloat16_model_is_timed_on_random_values():
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    sim = qsdk.quantize(torch.nn.Linear(4, 2, dtype=torch.bfloat16), x)
    qsdk.calibrate(sim, [x], progress=False)
    assert {row["layer"] for row in profiled(sim).rows} >= {"input", "self"}
    assert profiled(sim, data=[x]).rows


def test_weights_of_four_bits_run_in_the_precision_of_their_kernel():
    sim = qsdk.quantize(
        make_model(
            [node("MatMul", ["x", "w"], ["y"], "head")],
            {"x": [1, 64]},
            {"y": [1, 32]},
            weights(w=(64, 32)),
        ),
        None,
        qsdk.weight_only("int4", block_size=32),
    )
    assert isinstance(sim, OnnxSim)
    qsdk.calibrate(sim, [np.zeros((1, 64), np.float32)], progress=False)
    (row,) = profiled(sim).rows
    # at its default level of accuracy the runtime rounds the input of this kernel to int8
    assert (row["layer"], row["op_type"], row["precision"]) == ("head", "MatMulNBits", "integer")
