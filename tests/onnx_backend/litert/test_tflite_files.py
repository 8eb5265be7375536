"""Files for LiteRT: codes of its reference kernels as predicted, sites within a step of the sim, layouts, refusals."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from ai_edge_litert.interpreter import Interpreter
from image_networks import NETWORKS, network
from onnx import TensorProto, helper
from torch import nn

import qsdk
from onnx_backend.litert.check import check, opened
from onnx_backend.litert.program import from_bytes
from onnx_backend.litert.writer import regrouped
from qsdk.verbs.doors.choose import door_of

QUICK = ("mobilenet_v3", "sound", "unet")
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NETWORKS]


def calibrated(model, x, config=None):
    sim = qsdk.quantize(model, x, config or qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    return sim


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sim of a small network, its data, its file and the report on it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    x = torch.randn(4, 3, 8, 8)
    sim, path = calibrated(model, x), tmp_path_factory.mktemp("litert") / "model.tflite"
    return sim, x, path, qsdk.export(sim, path, format="tflite")


@pytest.mark.parametrize("name", NAMES)
def test_every_code_of_the_reference_kernels_is_predicted_and_sites_are_within_a_step(name, tmp_path):
    model, x = network(name)
    sim, path = calibrated(model, x, qsdk.w8a8().for_dialect("litert")), tmp_path / "model.tflite"
    qsdk.export(sim, path, format="tflite", check=False)
    found = qsdk.check_parity(sim, path, [x[:4]], progress=False).summary
    assert found["differing_from_prediction"] == 0
    assert found["predicted"] > 400
    assert (found["weights_max_lsb"], found["passed"]) == (0, True)
    assert found["sqnr_db"] > 25


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "perceptron"])
def test_unsigned_codes_of_the_usual_config_are_shifted(name, tmp_path):
    model, x = network(name)
    sim, path = calibrated(model, x), tmp_path / "model.tflite"
    qsdk.export(sim, path, format="tflite", check=False)
    assert qsdk.check_parity(sim, path, [x[:2]], progress=False).summary["passed"]


@pytest.mark.parametrize(
    "config",
    [qsdk.w4a8(), qsdk.w8a16(symmetric_activations=True).override("*", activation="int16")],
    ids=["int4 weights", "int16 activations"],
)
@pytest.mark.parametrize("name", ["mobilenet_v2", pytest.param("inception", marks=pytest.mark.slow)])
def test_other_widths_are_predicted_too(config, name, tmp_path):
    model, x = network(name)
    sim, path = calibrated(model, x, config), tmp_path / "model.tflite"
    qsdk.export(sim, path, format="tflite", check=False)
    assert qsdk.check_parity(sim, path, [x[:1]], progress=False).summary["passed"]


def test_16_bits_with_zero_points_are_refused_with_the_remedy(tmp_path):
    sim = calibrated(nn.Linear(8, 4), torch.randn(4, 8), qsdk.w8a16())
    with pytest.raises(qsdk.ExportError, match=r'16 bits and a zero point; .*activation="int16"'):
        qsdk.export(sim, tmp_path / "model.tflite", format="tflite")


def test_images_keep_channels_last_without_a_transpose(small):
    _, _, path, report = small
    assert report.summary["layouts"] == {"input": "channels last", "output": "as in ONNX"}
    kinds = [op.type for op in from_bytes(path.read_bytes(), "it").ops]
    assert kinds == ["PAD", "CONV_2D", "RESHAPE", "FULLY_CONNECTED"]


def test_an_application_reads_scales_and_layout_from_the_file_alone(small):
    sim, x, path, _ = small
    interpreter = Interpreter(model_path=str(path))
    interpreter.allocate_tensors()
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert (given["dtype"], tuple(given["shape"])) == (np.int8, (1, 8, 8, 3))
    scale, zero = given["quantization"]
    codes = np.clip(np.rint(x[:1].numpy().transpose(0, 2, 3, 1) / np.float32(scale)) + zero, -128, 127)
    interpreter.set_tensor(given["index"], codes.astype(np.int8))
    interpreter.invoke()
    scale, zero = made["quantization"]
    got = (interpreter.get_tensor(made["index"]).astype(np.float32) - zero) * scale
    assert np.abs(got - sim(x[:1]).detach().numpy()).max() <= 2.01 * scale


def test_scales_of_the_file_are_those_of_the_sim(small):
    sim, _, path, _ = small
    program = from_bytes(path.read_bytes(), "it")
    for site, facts in program.facts["sites"].items():
        grid, encoding = program.tensors[facts["tensor"]].grid, sim.encodings[site]
        assert np.array_equal(grid.scale, encoding.scale), site


def test_a_changed_weight_in_the_file_is_found(small, tmp_path):
    sim, x, path, _ = small
    data, codes = bytearray(path.read_bytes()), None
    program = from_bytes(bytes(data), "it")
    codes = program.tensors[program.facts["sites"]["3:weight"]["tensor"]].value.tobytes()
    place = data.index(codes)
    data[place] ^= 64
    (tmp_path / "changed.tflite").write_bytes(data)
    report = qsdk.check_parity(sim, tmp_path / "changed.tflite", [x], progress=False)
    assert not report.summary["passed"]
    assert next(row for row in report.rows if row["site"] == "3:weight")["max_lsb"] == 64


def test_a_site_that_the_file_lacks_does_not_pass(small):
    sim, x, path, _ = small
    door, program = door_of(sim), opened(path)
    del program.facts["sites"]["1:output"]
    report = check(program, door.simulated([x[:1]]), door.stored_at_sites(), sim.encodings)
    lacking = [row["site"] for row in report.rows if row.get("note") == "no tensor of the file is on its grid"]
    assert (lacking, report.summary["passed"]) == (["1:output"], False)


def test_another_sims_file_does_not_pass(small, tmp_path):
    sim, x, _, _ = small
    other = calibrated(sim.unwrap(), x * 3)
    qsdk.export(other, tmp_path / "other.tflite", format="tflite")
    report = qsdk.check_parity(sim, tmp_path / "other.tflite", [x], progress=False)
    assert not report.summary["passed"]
    assert "scale or zero point" in next(row for row in report.rows if row["site"] == "input:input")["note"]


def test_a_softmax_of_a_finer_range_is_refused_with_the_remedy(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 40), nn.Softmax(-1)), torch.randn(16, 8) * 0.1
    narrow = qsdk.w8a8().override("*", op_type="Softmax", fixed_range=(0.0, 0.05))
    with pytest.raises(qsdk.ExportError, match=r"finer .*for_dialect\(\"litert\"\)"):
        qsdk.export(calibrated(model, x, narrow), tmp_path / "model.tflite", format="tflite")
    assert not (tmp_path / "model.tflite").exists()
    sim = calibrated(model, x, qsdk.w8a8().for_dialect("litert"))
    assert qsdk.export(sim, tmp_path / "model.tflite", format="tflite").summary["activations_max_lsb"] <= 1


def test_all_ops_without_a_kernel_are_named_at_once(tmp_path):
    class Model(nn.Module):
        def forward(self, x):
            return F.elu(x) + torch.cos(x)

    with pytest.raises(qsdk.ExportError, match=r"cannot say 2 nodes(.|\n)*Elu(.|\n)*Cos"):
        qsdk.export(calibrated(Model(), torch.randn(4, 8)), tmp_path / "model.tflite", format="tflite")


def test_options_and_runtimes_of_other_formats_are_refused(small, tmp_path):
    sim, x, path, _ = small
    with pytest.raises(qsdk.ConfigError, match="opset: for ONNX alone"):
        qsdk.export(sim, tmp_path / "model.tflite", format="tflite", opset=17)
    with pytest.raises(qsdk.ConfigError, match=r"does not read \.tflite"):
        qsdk.check_parity(sim, path, [x], runtime="openvino")


def test_an_onnx_file_is_compared_as_the_tflite_file_that_it_becomes(small, tmp_path):
    sim, x, path, _ = small
    qsdk.export(sim, tmp_path / "model.onnx", dialect="onnx")
    found = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], runtime="litert", progress=False)
    direct = qsdk.check_parity(sim, path, [x], progress=False)
    assert found.title == direct.title
    assert (found.rows, found.summary) == (direct.rows, direct.summary)
    assert found.summary["passed"]


def test_a_file_that_is_none_and_one_of_another_tool_are_refused(small, tmp_path):
    sim, x, _, _ = small
    (tmp_path / "text.tflite").write_text("this is no such file")
    with pytest.raises(qsdk.FileFormatError, match=r"is no \.tflite file"):
        qsdk.check_parity(sim, tmp_path / "text.tflite", [x])
    with pytest.raises(qsdk.FileFormatError, match="cannot read"):
        qsdk.check_parity(sim, tmp_path / "missing.tflite", [x])


def test_shapes_set_the_size_of_the_batch(small, tmp_path):
    sim, x, _, _ = small
    qsdk.export(sim, tmp_path / "two.tflite", format="tflite", shapes={"input": (2, 3, 8, 8)})
    assert qsdk.check_parity(sim, tmp_path / "two.tflite", [x], progress=False).summary["passed"]
    with pytest.raises(qsdk.DataError, match="3 samples and the file takes 2"):
        qsdk.check_parity(sim, tmp_path / "two.tflite", [x[:3]], progress=False)


def foreign(path):
    """Write a Q/DQ file as ONNX Runtime's tool does: names of its own, uint8, a MatMul, explicit zero points."""
    random = np.random.default_rng(0)
    scale, zero = np.float32(0.02), np.uint8(120)
    stored = {
        "s": scale,
        "z": zero,
        "w": random.integers(-127, 128, (8, 6)).astype(np.int8),
        "ws": random.uniform(0.01, 0.03, 6).astype(np.float32),
        "wz": np.zeros(6, np.int8),
        "t": np.float32(0.05),
        "u": np.uint8(100),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "t", "u"], ["rq"]),
        helper.make_node("DequantizeLinear", ["rq", "t", "u"], ["y"]),
    ]
    edges = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", [4, 8]), ("y", [4, 6]))]
    held = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *edges, held), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, path)
    return {"x": random.normal(size=(4, 8)).astype(np.float32)}


def test_a_foreign_file_keeps_its_scales(tmp_path):
    feeds = foreign(tmp_path / "foreign.onnx")
    sim = qsdk.quantize(tmp_path / "foreign.onnx", None)
    qsdk.export(sim, tmp_path / "model.tflite", format="tflite")
    report = qsdk.check_parity(sim, tmp_path / "model.tflite", [feeds], progress=False)
    assert report.summary["passed"]
    program = from_bytes((tmp_path / "model.tflite").read_bytes(), "it")
    grid = program.tensors[program.outputs[0]].grid
    assert (grid.step, grid.zero) == (float(np.float32(0.05)), 100 - 128)


def test_an_input_with_two_grids_stays_one_input(tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z)
        <float s = {0.02}, float t = {0.05}, uint8 o = {128}> {
            a = QuantizeLinear(x, s, o) y = DequantizeLinear(a, s, o)
            b = QuantizeLinear(x, t, o) z = DequantizeLinear(b, t, o)
        }""")
    sim, path = qsdk.quantize(model, None), tmp_path / "model.tflite"
    qsdk.export(sim, path, format="tflite", check=False)
    program = from_bytes(path.read_bytes(), "it")
    assert (len(program.inputs), [op.type for op in program.ops]) == (1, ["QUANTIZE"])
    feeds = {"x": np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)}
    assert qsdk.check_parity(sim, path, [feeds], progress=False).summary["activations_max_lsb"] <= 1


@pytest.mark.parametrize(
    ("shape", "perm", "wanted", "expected"),
    [
        ((2, 3, 4, 5), (0, 2, 3, 1), (2, 3, 20), (0, 2, 1)),  # images to tokens
        ((2, 3, 1, 1), (0, 2, 3, 1), (2, 3), (0, 1)),
        ((2, 3, 4, 5), (0, 2, 3, 1), (2, 60), None),  # channels lie last
        ((2, 6, 4), (0, 2, 1), (2, 2, 3, 4), (0, 3, 1, 2)),
        ((2, 3, 4), (0, 1, 2), (6, 4), (0, 1)),
        ((2, 3, 4), (1, 0, 2), (6, 4), None),
    ],
)
def test_a_reshape_follows_the_layout_where_it_can(shape, perm, wanted, expected):
    found = regrouped(shape, perm, wanted)
    assert found == expected
    if found is not None:
        x = np.arange(np.prod(shape)).reshape(shape)
        held = x.transpose(perm).reshape([wanted[axis] for axis in found])
        assert np.array_equal(held.transpose(np.argsort(found)), x.reshape(wanted))
