"""What OpenVINO computes wrong on codes is known by its form, refused in other files, and right in its dialect."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

import qsdk
from onnx_backend.parity.teacher import RunOn
from onnx_backend.readers import Readers, pair_before
from onnx_backend.runtimes.openvino import OpenVinoRunner
from onnx_backend.runtimes.validate import validate
from onnx_backend.workarounds.openvino import (
    is_behind_constants,
    is_wrong_on_codes,
    keep_constants_apart,
    keep_off_codes,
)

pytest.importorskip("openvino", reason="OpenVINO has no wheel for this system")
SCALES = {"own": (0.034, 88), "r": (0.2, 33)}
SHIFT = 1.5
#: op, size of the input, attributes, the second operand -> whether OpenVINO goes wrong
CASES = {
    "a sum": ("ReduceSum", (2, 3, 8, 16), {}, [3], True),
    "a sum of tokens": ("ReduceSum", (4, 6, 16), {}, [1], True),
    "a mean of tokens": ("ReduceMean", (4, 6, 16), {"keepdims": 0}, [1], True),
    "a mean of an image": ("ReduceMean", (2, 3, 8, 16), {}, [2, 3], False),
    "a pool that counts its padding": (
        "AveragePool",
        (2, 3, 8, 8),
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
        None,
        True,
    ),
    "a pool without padding": (
        "AveragePool",
        (2, 3, 8, 8),
        {"kernel_shape": [3, 3], "pads": [0, 0, 0, 0], "count_include_pad": 1},
        None,
        False,
    ),
}


def quantized(name: str, *, behind_op: bool, quantized_result: bool) -> ModelProto:
    """One op behind a quantized input, or a quantized Add, as most ops stand in a network."""
    op, shape, attributes, operand, _ = CASES[name]
    stored = [numpy_helper.from_array(np.float32(SHIFT), "shift")]
    stored += [numpy_helper.from_array(np.int64(operand), "operand")] if operand else []
    nodes = []

    for key, (scale, zero) in SCALES.items():
        stored.append(numpy_helper.from_array(np.float32(scale), f"{key}_scale"))
        stored.append(numpy_helper.from_array(np.uint8(zero), f"{key}_zero"))

    def pair(tensor: str) -> str:
        key = "r" if tensor == "r" else "own"  # some exporters share the constants of pairs
        facts = [f"{key}_scale", f"{key}_zero"]
        nodes.append(helper.make_node("QuantizeLinear", [tensor, *facts], [f"{tensor}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{tensor}_q", *facts], [f"{tensor}_d"]))
        return f"{tensor}_d"

    source = pair("x")
    if behind_op:
        nodes.append(helper.make_node("Add", [source, "shift"], ["p"]))
        source = pair("p")
    inputs = [source, *(["operand"] if operand else [])]
    nodes.append(helper.make_node(op, inputs, ["r"], "it", **attributes))
    result = pair("r") if quantized_result else "r"
    ranks = {"x": len(shape), result: len(shape) - (attributes.get("keepdims") == 0)}
    edges = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * rank) for n, rank in ranks.items()]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def is_right(model: ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    """Whether OpenVINO gives what the simulation does, at these sizes and at open ones, but for a step at a tie."""
    (wanted,) = RunOn().open(model).run(feeds)
    try:
        found = [OpenVinoRunner(model, fixed_sizes=fixed).run(feeds)[0] for fixed in (True, False)]
    except qsdk.QsdkError:
        return False
    return all(np.abs(got - wanted).max() <= 1.01 * SCALES["r"][0] for got in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_goes_wrong_on_codes_is_known_refused_and_right_when_it_is_kept_off_them(name):
    shape, is_wrong = CASES[name][1], CASES[name][-1]
    feeds = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    forms = list(itertools.product((False, True), repeat=2))
    models = [quantized(name, behind_op=behind, quantized_result=result) for behind, result in forms]
    assert all(is_right(model, feeds) for model in models) != is_wrong
    for model in models:
        known = Readers(model.graph)
        (node,) = [node for node in model.graph.node if node.name == "it"]
        assert pair_before(node, known).output[0] in ("x_d", "p_d")
        assert is_wrong_on_codes(node, known) == is_wrong
        refused = [row["node"] for row in validate(model, dialect="openvino").rows if row["severity"] == "error"]
        assert refused == (["it"] if is_wrong else [])
        keep_off_codes(model)
        assert is_right(model, feeds)
        assert validate(model, dialect="openvino").summary["errors"] == 0


def padded(shape: tuple[int, ...], pads: list[int], *, sharing: bool) -> ModelProto:
    """A Pad between two pairs of one grid, which share its constants or have their own."""
    grid = {"scale": np.float32(0.034), "zero": np.uint8(88)}
    stored = {"pads": np.int64(pads), **grid, **({} if sharing else {f"last_{k}": v for k, v in grid.items()})}
    last = [name if sharing else f"last_{name}" for name in grid]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *grid], ["q"]),
        helper.make_node("DequantizeLinear", ["q", *grid], ["d"]),
        helper.make_node("Pad", ["d", "pads"], ["p"], "it"),
        helper.make_node("QuantizeLinear", ["p", *last], ["r"]),
        helper.make_node("DequantizeLinear", ["r", *last], ["y"]),
    ]
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(shape)) for name in "xy"]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


PADS = [
    ((6, 16), [1, 0, 0, 0], True),
    ((2, 6, 16), [0, 0, 0, 0, 1, 0], True),
    ((2, 3, 8, 8), [0, 0, 0, 1, 0, 0, 0, 1], True),
    ((2, 3, 8, 8), [0, 0, 1, 0, 0, 0, 0, 1], False),
    ((2, 3, 8, 8), [0, 0, 1, 1, 0, 0, 1, 1], False),
]


@pytest.mark.spread(3)
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize(("shape", "pads", "is_wrong"), PADS)
def test_a_pad_of_one_axis_is_wrong_where_pairs_share_their_constants(shape, pads, is_wrong, sharing):
    model, x = padded(shape, pads, sharing=sharing), np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert is_right(model, {"x": x}) != (is_wrong and sharing)
    refused = [row["node"] for row in validate(model, dialect="openvino").rows if row["severity"] == "error"]
    assert refused == (["it"] if is_wrong and sharing else [])
    keep_off_codes(model)
    assert is_right(model, {"x": x})
    assert validate(model, dialect="openvino").summary["errors"] == 0


def clipped(low: float) -> ModelProto:
    """A convolution that changes nothing, its pair, and a Clip from 8 bits to a finer grid."""
    stored = {"s": np.float32(0.03), "z": np.uint8(117), "low": np.float32(low), "high": np.float32(1.5)}
    stored |= {"w_q": np.full((1, 1, 1, 1), 64, np.int8), "w_s": np.float32(1 / 64), "w_z": np.int8(0)}
    stored |= {"d_s": stored["s"], "d_z": stored["z"], "y_s": np.float32((1.5 - low) / 255), "y_z": np.uint8(64)}
    nodes = [helper.make_node("DequantizeLinear", ["w_q", "w_s", "w_z"], ["w"])]
    for source, op, grid in (("x", [], "s z"), ("c", ["Conv", "x_d", "w"], "d_s d_z"), ("y", [], "y_s y_z")):
        if op:
            nodes.append(helper.make_node(op[0], op[1:], ["c"]))
        elif source == "y":
            nodes.append(helper.make_node("Clip", ["c_d", "low", "high"], ["y"], "it"))
        nodes.append(helper.make_node("QuantizeLinear", [source, *grid.split()], [f"{source}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{source}_q", *grid.split()], [f"{source}_d"]))
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in ("x", "y_d")]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(("low", "is_wrong"), [(-0.5, True), (-0.51, False)])
def test_a_clip_behind_a_layer_is_wrong_where_no_code_is_its_bound(low, is_wrong):
    model, x = clipped(low), np.linspace(-3, 3, 256, dtype=np.float32).reshape(1, 1, 16, 16)
    (wanted,) = RunOn().open(model).run({"x": x})
    step = (1.5 - low) / 255
    assert (np.abs(OpenVinoRunner(model).run({"x": x})[0] - wanted).max() > 1.5 * step) == is_wrong
    refused = [row["node"] for row in validate(model, dialect="openvino").rows if row["severity"] == "error"]
    assert refused == ["it"] * is_wrong
    keep_off_codes(model)
    assert np.abs(OpenVinoRunner(model).run({"x": x})[0] - wanted).max() <= 1.01 * step


class Pooled(nn.Module):
    """Tokens averaged over a mask, as sentence encoders do, and over a window."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.window = nn.Linear(16, 16), nn.AvgPool1d(3, 1, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.relu(self.layer(x))
        kept = mask.unsqueeze(-1).to(tokens.dtype)
        return (tokens * kept).sum(1) / kept.sum(1), self.window(tokens), tokens.mean(1)


@pytest.mark.slow
def test_pooled_tokens_are_the_simulated_ones_and_the_file_opens_with_its_encodings(tmp_path):
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6, 16), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]] * 2)
    sim = qsdk.quantize(Pooled(), (x, mask), qsdk.w8a8().override("*", weight="int7"))
    qsdk.calibrate(sim, [(x, mask)], progress=False)
    path = tmp_path / "m.onnx"
    qsdk.export(sim, path, dialect="openvino")
    for runtime in (None, "openvino"):
        report = qsdk.check_parity(sim, path, [(x, mask)], runtime=runtime, progress=False)
        assert report.summary["passed"], str(report)
        assert report.summary["activations_max_lsb"] <= 1
    again = qsdk.quantize(path, None, None)
    assert again.encodings == sim.encodings
    qsdk.export(again, tmp_path / "again.onnx", dialect="openvino")
    kinds = [[node.op_type for node in onnx.load(tmp_path / name).graph.node] for name in ("m.onnx", "again.onnx")]
    assert kinds[0].count("Max") == kinds[1].count("Max") > 0
    qsdk.export(sim, path)
    assert qsdk.validate(path, dialect="openvino").summary["errors"] > 0


class Recurrent(nn.Module):
    """One recurrent layer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_behind_8_bits_is_refused_and_right_behind_16(tmp_path, kind):
    torch.manual_seed(0)
    x, path = torch.randn(2, 6, 8), tmp_path / "m.onnx"
    wide = qsdk.w8a8().override("x", activation="uint16").override("layer", activation="uint16")
    for config in (qsdk.w8a8(), wide):
        sim = qsdk.quantize(Recurrent(kind).eval(), x, config.for_dialect("openvino"))
        qsdk.calibrate(sim, [x], progress=False)
        if sim.encodings["x:input"].dtype.name == "uint8":
            with pytest.raises(qsdk.ExportError, match=f'{kind.__name__} behind 8 bits.*activation="uint16"'):
                qsdk.export(sim, path, dialect="openvino")
            continue
        qsdk.export(sim, path, dialect="openvino")
        assert qsdk.check_parity(sim, path, [x], runtime="openvino", progress=False).summary["passed"]


OF_CHANNELS = np.float32([1.0, -0.4, 0.3, -0.8]).reshape(4, 1, 1)
#: nodes from x to the tensors that a pair stands behind -> whether OpenVINO takes the first constant for all channels
CONSTANTS = {
    "a factor": ([("Mul", "x", "k", "r")], True),
    "a divisor, clipped": ([("Div", "x", "k", "t"), ("Clip", "t", "low", "high", "r")], True),
    "a factor, turned": ([("Mul", "x", "k", "t"), ("Transpose", "t", "r")], True),
    "a summand beside another reader of a layer": ([("Conv", "x_d", "w", "c"), ("Add", "c", "k", "r")], True),
    "a bias": ([("Conv", "x_d", "w", "b", "r")], True),
    "one number": ([("Mul", "x", "high", "r")], False),
    "a factor with a Relu behind it": ([("Mul", "x", "k", "t"), ("Relu", "t", "r")], False),
}


def behind_constants(name: str) -> ModelProto:
    """Constants of channels in front of a pair, in a file with open axes; of a layer, something else reads a size."""
    calls, _ = CONSTANTS[name]
    stored = {"k": OF_CHANNELS, "b": OF_CHANNELS.reshape(-1), "low": np.float32(-2), "high": np.float32(1.7)}
    stored |= {"w_q": np.full((4, 4, 1, 1), 20, np.int8), "w_s": np.float32(0.01), "zero": np.float32(0)}
    stored |= {"one": np.float32(1), "last": np.int64(3), "s": np.float32(0.034), "z": np.uint8(88)}
    nodes = [helper.make_node("DequantizeLinear", ["w_q", "w_s"], ["w"])]

    def pair(tensor: str) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [tensor, "s", "z"], [f"{tensor}_q"], f"{tensor}_it"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{tensor}_q", "s", "z"], [f"{tensor}_d"]))
        return f"{tensor}_d"

    pair("x")
    nodes += [helper.make_node(op, list(operands), [result]) for op, *operands, result in calls]
    outputs = [pair("r")]
    if calls[0][0] == "Conv":  # anchors of a grid; where it stands does not matter, the runtime looks for the size
        read = "c" if len(calls) > 1 else "r_d"
        nodes.append(helper.make_node("Shape", [read], ["sizes"]))
        nodes.append(helper.make_node("Gather", ["sizes", "last"], ["width"]))
        nodes.append(helper.make_node("Cast", ["width"], ["stop"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Range", ["zero", "stop", "one"], ["grid"]))
        outputs.append("grid")
    edges = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, "h", "w"])]
    ranks = {"r_d": 4, "grid": 1}
    edges += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * ranks[name]) for name in outputs]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("name", CONSTANTS)
def test_with_open_axes_constants_in_front_of_a_pair_are_mistaken_warned_of_and_right_when_kept_apart(name):
    model, is_wrong = behind_constants(name), CONSTANTS[name][1]
    x = {"x": np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32)}
    wanted = RunOn().open(model).run(x)[0]

    def off(fixed_sizes: bool) -> float:
        return float(np.abs(OpenVinoRunner(model, fixed_sizes=fixed_sizes).run(x)[0] - wanted).max() / 0.034)

    assert off(True) < 1.1
    assert (off(False) > 5) == is_wrong
    known = Readers(model.graph)
    (quantize,) = [node for node in model.graph.node if node.name == "r_it"]
    assert is_behind_constants(quantize, known) == is_wrong
    warned = [row for row in validate(model, dialect="openvino").rows if "open axes" in row["problem"]]
    assert [row["node"] for row in warned] == ["r_it"] * is_wrong
    keep_constants_apart(model)
    assert off(False) < 1.1
    assert not any("open axes" in row["problem"] for row in validate(model, dialect="openvino").rows)


def detector() -> ModelProto:
    """Two heads on one map of features, and the anchors of their grid, with open axes."""
    rng, node = np.random.default_rng(0), helper.make_node
    stored = {
        "w0": rng.normal(size=(8, 4, 3, 3)) / 4,
        "wa": rng.normal(size=(8, 8, 1, 1)) / 4,
        "ba": rng.normal(size=8),
    }
    stored |= {"wb": rng.normal(size=(2, 8, 1, 1)) / 4, "bb": rng.normal(size=2) - 4, "zero": 0, "one": 1}
    tensors = [numpy_helper.from_array(np.float32(value), name) for name, value in stored.items()]
    integers = {"flat": [0, 0, -1], "last": 3}
    tensors += [numpy_helper.from_array(np.int64(value), name) for name, value in integers.items()]
    nodes = [
        node("Conv", ["x", "w0"], ["c"], "stem", pads=[1] * 4),
        node("Relu", ["c"], ["r"], "relu"),
        node("Conv", ["r", "wa", "ba"], ["a"], "box"),
        node("Conv", ["r", "wb", "bb"], ["b"], "score"),
        node("Concat", ["a", "b"], ["k"], "both", axis=1),
        node("Reshape", ["k", "flat"], ["y"], "flatten"),
        node("Shape", ["k"], ["sizes"]),
        node("Gather", ["sizes", "last"], ["width"]),
        node("Cast", ["width"], ["stop"], to=TensorProto.FLOAT),
        node("Range", ["zero", "stop", "one"], ["grid"], "range"),
    ]
    edges = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, "h", "w"])]
    sizes = {"y": ["n", 10, "m"], "grid": ["w"]}
    edges += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [True, False])
def test_a_detector_is_compiled_with_the_axes_that_its_file_has_and_right(tmp_path, is_open):
    x, path = {"x": np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float32)}, tmp_path / "m.onnx"
    sim = qsdk.quantize(detector(), None, qsdk.w8a8().for_dialect("openvino").override("*", weight="int7"))
    qsdk.calibrate(sim, [x], progress=False)
    shapes = None if is_open else {"x": (1, 4, 8, 8)}
    qsdk.export(sim, path, dialect="openvino", shapes=shapes)
    runner = OpenVinoRunner(onnx.load(path))
    found = runner.run(x)[0]
    assert runner.compiled.inputs[0].get_partial_shape().is_dynamic is is_open
    assert np.abs(found - sim.run(x)[0]).max() <= 1.01 * sim.encodings["flatten:output"].scale
    assert ("LeakyRelu" in {node.op_type for node in onnx.load(path).graph.node}) is is_open
    for runtime in (None, "openvino"):
        assert qsdk.check_parity(sim, path, [x], runtime=runtime, progress=False).summary["passed"]
    assert qsdk.quantize(path, None, None).encodings == sim.encodings
    # in another dialect each part is right where the file is cut at its sites; the whole is not, with open axes
    qsdk.export(sim, path, dialect="onnx", shapes=shapes)
    report = qsdk.check_parity(sim, path, [x], runtime="openvino", progress=False)
    assert report.summary["passed"] is not is_open
    assert any("further off than that explains" in row.get("note", "") for row in report.rows) is is_open


@pytest.mark.parametrize(
    ("axes", "is_wrong"), [([1], True), ([2], True), ([1, 2], True), ([3], False), ([2, 3], False)]
)
def test_means_over_the_first_three_axes_are_kept_off_codes(axes, is_wrong):
    mean = helper.make_node("ReduceMean", ["d", "axes"], ["y"])
    graph = helper.make_graph([mean], "mean", [], [], [numpy_helper.from_array(np.array(axes), "axes")])
    assert is_wrong_on_codes(mean, Readers(graph)) == is_wrong
