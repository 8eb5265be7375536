"""Files whose Relu or Clip a tool has removed: the float reference clips as their grids do, and no code changes."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from foreign_models import by_onnxruntime, node, plain_pair
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from qdq_models import make_model, weights

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk import calibrate, check_parity, export, quantize, to_integer
from qsdk.verbs.doors.choose import door_of

X = np.random.default_rng(3).normal(size=(512, 6)).astype(np.float32)
TYPES = (QuantType.QInt8, QuantType.QUInt8, QuantType.QUInt16)


def net(ends=(0.0, 6.0)):
    """Gemm -> Relu -> Gemm -> Clip -> Gemm, whose second activation reaches both of its ends."""
    nodes = [
        node("Gemm", ["x", "w1", "b1"], ["c1"], "first"),
        node("Relu", ["c1"], ["r"], "relu"),
        node("Gemm", ["r", "w2", "b2"], ["c2"], "second"),
        node("Clip", ["c2", "low", "high"], ["k"], "clip"),
        node("Gemm", ["k", "w3", "b3"], ["y"], "third"),
    ]
    stored = weights(w1=(6, 8), b1=(8,), w2=(8, 8), b2=(8,), w3=(8, 3), b3=(3,))
    stored["w2"] *= 8
    stored |= {name: np.float32(value) for name, value in zip(("low", "high"), ends, strict=True)}
    return make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 3]}, stored)


def of_tool(tmp_path, ends=(0.0, 6.0), activation=QuantType.QInt8, **extra):
    model = by_onnxruntime(net(ends), (64, 6), tmp_path, activation_type=activation, extra_options=extra)
    removed = not {"Relu", "Clip"} & {item.op_type for item in model.graph.node}
    return model, removed


def sqnr(exact, found):
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum()))


def in_float(sim, x=X):
    ((found,),) = door_of(sim).outputs([x], in_float=True)
    return found


def rebuilt(sim):
    """The sim, which builds its Q/DQ model anew from what is left when nothing is quantized."""
    sim.restore(sim.snapshot())
    return sim


@pytest.mark.parametrize("activation", TYPES)
def test_the_reference_clips_and_the_quantized_model_stays(activation, tmp_path):
    model, removed = of_tool(tmp_path, activation=activation)
    assert removed
    sim = quantize(model, None, None)
    assert [op.type for op in sim.graph.ops] == ["Gemm", "Relu", "Gemm", "Clip", "Gemm"]
    assert {"first:output", "second:output", "third:output"} <= set(sim.encodings)
    assert "the grids of 2 sites" in sim.coverage().summary["opened"]
    exact = ort.InferenceSession(net().SerializeToString()).run(None, {"x": X})[0]
    assert sqnr(exact, in_float(sim)) > 30  # a linear network reaches -10 dB
    wild = np.concatenate([X, X * 50, -X * 50, np.full((1, 6), np.inf, np.float32)])
    wanted = simulation_session(model).run(None, {"x": wild})[0]
    np.testing.assert_array_equal(sim.run(wild)[0], wanted)
    np.testing.assert_array_equal(rebuilt(sim).run(wild)[0], wanted)
    mixed = quantize(model, None, qsdk.w8a8())
    assert [op.type for op in mixed.graph.ops] == ["Gemm", "Relu", "Gemm", "Clip", "Gemm"]
    assert {site: e.scale.tolist() for site, e in mixed.encodings_where_ready().items()} == {
        site: e.scale.tolist() for site, e in sim.encodings.items()
    }
    np.testing.assert_array_equal(mixed.run(wild)[0], wanted)
    np.testing.assert_array_equal(in_float(mixed), in_float(sim))


@pytest.mark.slow
def test_such_a_file_is_written_opened_and_converted_as_before(tmp_path):
    model, _ = of_tool(tmp_path)
    sim = quantize(model, None, None)
    export(sim, tmp_path / "first.onnx")
    again = quantize(tmp_path / "first.onnx", None, None)
    assert again.encodings == sim.encodings
    assert [op.type for op in again.graph.ops] == [op.type for op in sim.graph.ops]
    export(again, tmp_path / "second.onnx")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()
    for file in (model, tmp_path / "first.onnx"):
        assert check_parity(sim, file, [X], progress=False).summary["passed"]
    to_integer(model, tmp_path / "theirs.int.onnx", progress=False)
    to_integer(tmp_path / "first.onnx", tmp_path / "ours.int.onnx", progress=False)
    theirs, ours = (onnx.load(tmp_path / f"{name}.int.onnx") for name in ("theirs", "ours"))
    assert len(theirs.graph.node) == len(ours.graph.node)
    found = [ort.InferenceSession(m.SerializeToString()).run(None, {"x": X})[0] for m in (theirs, ours)]
    np.testing.assert_array_equal(*found)
    for file in ("first.encodings.json", "quantized.onnx"):
        applied = qsdk.apply_encodings(tmp_path / "float.onnx", tmp_path / file, tmp_path / "applied.onnx")
        assert applied.summary["unmatched"] == 0
    qsdk.save(sim, tmp_path / "sim.qsdk")
    loaded = qsdk.load(tmp_path / "sim.qsdk")
    np.testing.assert_array_equal(in_float(loaded), in_float(sim))
    assert loaded.coverage().summary["opened"] == sim.coverage().summary["opened"]


def test_what_the_file_does_not_say_is_named(tmp_path):
    odd, removed = of_tool(tmp_path, (0.0, 2.3456))
    assert removed
    sim = quantize(odd, None, None)
    assert [op.type for op in sim.graph.ops] == ["Gemm", "Relu", "Gemm", "Relu", "Gemm"]
    assert "only where it is a multiple of 0.1" in sim.coverage().summary["opened"]
    around, removed = of_tool(tmp_path, (-1.0, 1.0))
    assert removed
    sim = quantize(around, None, None)
    assert [op.type for op in sim.graph.ops] == ["Gemm", "Relu", "Gemm", "Gemm"]
    assert "a Clip may have been removed in front of second:output" in sim.coverage().summary["opened"]


def test_a_grid_that_ends_at_zero_is_clipped_there(tmp_path):
    sim = quantize(of_tool(tmp_path, (-4.0, 0.0))[0], None, None)
    clip = next(op for op in sim.graph.ops if op.type == "Clip")
    stored = {t.name: numpy_helper.to_array(t) for t in sim.traced().model.graph.initializer}
    ends = [float(stored[sim.graph.tensors[index].name]) for index in clip.inputs[1:]]
    assert ends == [-np.inf, 0.0]


def test_activations_that_the_tool_keeps_get_no_second_one(tmp_path):
    kept, removed = of_tool(tmp_path, QDQKeepRemovableActivations=True)
    assert not removed
    sim = quantize(kept, None, None)
    assert [op.type for op in sim.graph.ops] == ["Gemm", "Relu", "Gemm", "Clip", "Gemm"]
    assert "opened" not in sim.coverage().summary


def test_a_file_of_ours_stays_as_it_is(tmp_path):
    """A linear layer whose outputs were all positive has the grid of a Relu, too."""
    model = make_model([node("Gemm", ["x", "w"], ["y"], "gemm")], {"x": ["n", 6]}, {"y": ["n", 3]}, weights(w=(6, 3)))
    sim = quantize(model, None, qsdk.w8a8())
    calibrate(sim, [X], progress=False)
    sim.set_encoding("gemm:output", replace(sim.encodings["gemm:output"], zero_point=np.zeros(1, np.int32)))
    export(sim, tmp_path / "ours.onnx")
    again = quantize(tmp_path / "ours.onnx", None, None)
    assert [op.type for op in again.graph.ops] == ["Gemm"]
    assert again.encodings["gemm:output"].zero_point.tolist() == [0]
    for opset in (13, 21):
        export(again, tmp_path / "again.onnx", opset=opset)
        assert [op.type for op in quantize(tmp_path / "again.onnx", None, None).graph.ops] == ["Gemm"]


def test_a_tensor_that_something_else_reads_unclipped_keeps_its_readers():
    """Both outputs stay what they are: the pair clips at 0, the output beside it does not."""
    nodes = [
        node("Gemm", ["x", "w"], ["c"], "gemm"),
        *plain_pair("pair", "c", "d", ["s", "z"]),
        node("Neg", ["c"], ["raw"], "neg"),
        node("Neg", ["d"], ["y"], "neg2"),
    ]
    stored = {**weights(w=(6, 3)), "s": np.float32(0.01), "z": np.uint8(0)}
    model = make_model(nodes, {"x": ["n", 6]}, {"raw": ["n", 3], "y": ["n", 3]}, stored)
    sim = quantize(model, None, None)
    assert [op.type for op in sim.graph.ops].count("Relu") == 1
    (raw, y), wanted = next(iter(door_of(sim).outputs([X], in_float=True))), simulation_session(model)
    np.testing.assert_array_equal(y, np.minimum(raw, 0))
    for got, want in zip(rebuilt(sim).run(X), wanted.run(None, {"x": X}), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("verb", ["correct_bias", "seq_mse"])
def test_verbs_do_not_take_the_clipping_for_an_error(verb, tmp_path):
    sim = quantize(of_tool(tmp_path)[0], None, None)
    exact = ort.InferenceSession(net().SerializeToString()).run(None, {"x": X})[0]
    before = sqnr(exact, sim.run(X)[0])
    getattr(qsdk, verb)(sim, [X[:256], X[256:]], progress=False)
    assert sqnr(exact, sim.run(X)[0]) > before - 1


def test_sensitivity_is_that_of_one_layer_at_a_time(tmp_path):
    sim = quantize(of_tool(tmp_path)[0], None, None)
    batches = np.split(X * 0.7, 8)  # inside the ranges: an estimate from a fifth of the rows may miss what is outside
    found, truth = (qsdk.sensitivity(sim, batches, exact=exact, progress=False) for exact in (False, True))
    measured = {(row["layer"], row["kind"]): row["sqnr_db"] for row in truth.rows}
    assert min(measured.values()) > 20  # without its activation functions: 2 dB
    for row in found.rows:
        assert row["sqnr_db"] == pytest.approx(measured[row["layer"], row["kind"]], abs=5)  # to first order


class Reader(CalibrationDataReader):
    def __init__(self, images):
        self.feeds = iter([{"images": images}])

    def get_next(self):
        return next(self.feeds, None)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo network as the tool quantizes it by default."""
    torch = pytest.importorskip("torch")
    folder, images = tmp_path_factory.mktemp("demo"), qsdk.demo.data().calibration_images[:128]
    example = (torch.from_numpy(images),)
    axes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(
        qsdk.demo.network(), example, folder / "float.onnx", dynamo=True, verbose=False, dynamic_shapes=axes
    )
    quantize_static(folder / "float.onnx", folder / "theirs.onnx", Reader(images), quant_format=QuantFormat.QDQ)
    return folder / "theirs.onnx"


@pytest.mark.slow  # quick: the verbs and sensitivity above, on a small network
@pytest.mark.parametrize("verb", ["adaround", "seq_mse", "gptq", "correct_bias", "sensitivity"])
def test_the_demo_network_of_the_tool_keeps_its_accuracy(verb, demo):
    data, sim = qsdk.demo.data(), quantize(demo, None, None)
    images, labels, batch = data.test_images[:1000], data.test_labels[:1000], data.calibration_images[:64]
    report = getattr(qsdk, verb)(sim, [batch], progress=False)
    assert float((sim.run(images)[0].argmax(1) == labels).mean()) > 0.94
    if verb == "sensitivity":
        truth = {(row["layer"], row["kind"]): row for row in qsdk.sensitivity(sim, [batch], exact=True).rows}
        rows = [(row["sqnr_db"], truth[row["layer"], row["kind"]]["sqnr_db"]) for row in report.rows]
        assert min(measured for _, measured in rows) > 30
        worst = {(row["layer"], row["kind"]) for row in report.rows[:2]}
        assert worst == set(sorted(truth, key=lambda key: truth[key]["sqnr_db"])[:2])
