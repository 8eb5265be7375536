"""BatchNorm at the ONNX door: folded by the rules of the PyTorch door, with the same values and the same plan."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from qdq_models import make_model, weights
from torch import nn

import qsdk
from onnx_backend.opening.from_float import open_float
from qsdk import w8a8

node = helper.make_node
RNG = np.random.default_rng(0)


def statistics(channels, name="", seed=0):
    rng = np.random.default_rng(seed)
    values = {"s": rng.normal(size=channels), "b": rng.normal(size=channels), "m": rng.normal(size=channels)}
    values["v"] = rng.uniform(0.5, 2, size=channels)
    return {name + key: value.astype(np.float32) for key, value in values.items()}


def norm(source, output, name="bn", prefix=""):
    return node("BatchNormalization", [source, *(prefix + key for key in "sbmv")], [output], name, epsilon=1e-3)


def run(model, x):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})


def before(op, weight, attributes, bias, channels, shape):
    inputs = ["x", "w", *(["c"] if bias else [])]
    nodes = [node(op, inputs, ["t"], "layer", **attributes), norm("t", "y")]
    stored = {**weights(w=weight), **(weights(1, c=(channels,)) if bias else {}), **statistics(channels)}
    return make_model(nodes, {"x": shape}, {"y": None}, stored), RNG.normal(size=shape).astype(np.float32)


def after(op, weight, attributes, bias, channels, shape, outputs):
    inputs = ["t", "w", *(["c"] if bias else [])]
    nodes = [norm("x", "t"), node(op, inputs, ["y"], "layer", **attributes)]
    stored = {**weights(w=weight), **(weights(1, c=(outputs,)) if bias else {}), **statistics(channels)}
    return make_model(nodes, {"x": shape}, {"y": None}, stored), RNG.normal(size=shape).astype(np.float32)


FOLDED = {
    "conv": before("Conv", (6, 4, 3, 3), {"pads": [1] * 4}, False, 6, (2, 4, 5, 5)),
    "conv with bias": before("Conv", (6, 4, 3, 3), {}, True, 6, (2, 4, 5, 5)),
    "grouped conv": before("Conv", (6, 2, 3, 3), {"group": 2}, True, 6, (2, 4, 5, 5)),
    "depthwise conv": before("Conv", (4, 1, 3), {"group": 4}, False, 4, (2, 4, 7)),
    "transposed conv": before("ConvTranspose", (4, 6, 3, 3), {"strides": [2, 2]}, True, 6, (2, 4, 5, 5)),
    "grouped transposed conv": before("ConvTranspose", (4, 3, 3, 3), {"group": 2}, True, 6, (2, 4, 5, 5)),
    "gemm": before("Gemm", (4, 6), {}, True, 6, (3, 4)),
    "gemm transposed": before("Gemm", (6, 4), {"transB": 1}, True, 6, (3, 4)),
    "gemm scaled": before("Gemm", (6, 4), {"transB": 1, "alpha": 0.5}, True, 6, (3, 4)),
    "matmul": before("MatMul", (4, 6), {}, False, 6, (3, 4)),
    "before a conv": after("Conv", (6, 4, 3, 3), {}, True, 4, (2, 4, 5, 5), 6),
    "before a grouped conv": after("Conv", (6, 2, 3, 3), {"group": 2}, False, 4, (2, 4, 5, 5), 6),
    "before a gemm": after("Gemm", (6, 4), {"transB": 1}, True, 4, (3, 4), 6),
    "before a scaled gemm": after("Gemm", (4, 6), {"alpha": 2.0}, True, 4, (3, 4), 6),
}
KEPT = {
    "before a padded conv": (
        after("Conv", (6, 4, 3, 3), {"pads": [1] * 4}, True, 4, (2, 4, 5, 5), 6),
        "pads with zeros",
    ),
    "before a conv that pads itself": (
        after("Conv", (6, 4, 3, 3), {"auto_pad": "SAME_UPPER"}, True, 4, (2, 4, 5, 5), 6),
        "pads with zeros",
    ),
    "before a transposed conv": (
        after("ConvTranspose", (4, 6, 3, 3), {}, False, 4, (2, 4, 5, 5), 6),
        "adds its taps unevenly",
    ),
    "before a matmul": (after("MatMul", (4, 6), {}, False, 4, (3, 4), 6), "has no bias"),
    "matmul of three dimensions": (before("MatMul", (4, 6), {}, False, 5, (3, 5, 4)), "its channels are not those"),
}


@pytest.mark.parametrize("case", FOLDED)
def test_a_folded_batch_norm_keeps_the_values(case):
    model, x = FOLDED[case]
    opened = open_float(model, w8a8())
    assert opened.notes.folded == ("bn",)
    assert "BatchNormalization" not in {n.op_type for n in opened.model.graph.node}
    np.testing.assert_allclose(run(opened.model, x)[0], run(model, x)[0], rtol=1e-4, atol=1e-4)
    assert [v.name for v in opened.model.graph.output] == ["y"]
    assert "layer:output" in opened.plan.decisions


@pytest.mark.parametrize("case", KEPT)
def test_what_cannot_be_folded_says_why(case):
    (model, x), reason = KEPT[case]
    opened = open_float(model, w8a8())
    assert reason in opened.notes.unfolded["bn"]
    np.testing.assert_array_equal(run(opened.model, x)[0], run(model, x)[0])


def conv_norm(**more):
    nodes = [node("Conv", ["x", "w"], ["t"], "conv"), norm("t", "u"), node("Relu", ["u"], ["y"], "relu")]
    stored = {**weights(w=(6, 4, 1, 1)), **statistics(6)}
    outputs = {"y": None, **more.get("outputs", {})}
    return make_model([*nodes, *more.get("nodes", [])], {"x": (2, 4, 5, 5)}, outputs, stored)


def test_a_batch_norm_that_a_rule_names_stays():
    opened = open_float(conv_norm(), w8a8().skip("bn*", dtype="float16"))
    assert dict(opened.notes.unfolded) == {"bn": "a rule names it"}
    assert opened.plan.decisions["relu:output"].spec.dtype.name == "float16"


def test_a_rule_may_name_a_folded_one_by_a_star():
    assert open_float(conv_norm(), w8a8().override("*", weight="int4")).notes.folded == ("bn",)


def test_folding_can_be_refused():
    opened = open_float(conv_norm(), w8a8(), fold_batch_norm=False)
    assert opened.notes.folded == ()
    assert "bn:output" in opened.plan.decisions or any("BatchNorm" in d.op_type for d in opened.plan.inside)


def test_a_result_that_is_read_elsewhere_or_leaves_the_model_is_not_folded():
    left = open_float(conv_norm(outputs={"t": None}), w8a8())
    read = open_float(conv_norm(nodes=[node("Neg", ["t"], ["z"])], outputs={"z": None}), w8a8())
    for opened in (left, read):
        assert opened.notes.unfolded["bn"] == "the result of conv is also read elsewhere"


def test_a_shared_weight_is_not_folded():
    model = conv_norm(nodes=[node("Conv", ["x", "w"], ["z"], "other")], outputs={"z": None})
    assert open_float(model, w8a8()).notes.unfolded["bn"] == "conv shares its weight with other"


def test_training_mode_and_computed_statistics_are_not_folded():
    model = conv_norm()
    model.graph.node[1].attribute.append(helper.make_attribute("training_mode", 1))
    model.graph.node[1].output.extend(["rm", "rv"])
    assert open_float(model, w8a8()).notes.unfolded["bn"] == "it is in training mode"
    computed = conv_norm()
    computed.graph.node[1].input[3] = "mean"
    computed.graph.node.insert(0, node("ReduceMean", ["x", "axes"], ["m4"], keepdims=0))
    computed.graph.node.insert(1, node("Pad", ["m4", "two"], ["mean"]))
    for name, array in (("axes", [0, 2, 3]), ("two", [1, 1])):
        from_array = helper.make_tensor(name, 7, [len(array)], array)
        computed.graph.initializer.append(from_array)
    assert open_float(computed, w8a8()).notes.unfolded["bn"] == "its statistics are computed"


def test_the_report_says_what_was_folded():
    summary = qsdk.quantize(conv_norm(), None, w8a8()).coverage().summary
    assert summary["folded"] == 1
    kept = qsdk.quantize(conv_norm(outputs={"t": None}), None, w8a8()).coverage().summary
    assert kept["bn (BatchNorm) not folded"] == "the result of conv is also read elsewhere"


def test_an_unnamed_layer_keeps_its_owner():
    model = conv_norm()
    model.graph.node[0].name = ""
    assert "t:weight" in open_float(model, w8a8()).plan.decisions


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.pre = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.bn2 = nn.BatchNorm2d(4)
        self.kept = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.bn3 = nn.BatchNorm1d(5)

    def forward(self, x):
        x = self.bn1(self.first(x)).relu()
        x = self.second(self.pre(x))
        x = self.bn2(self.up(x)).relu()
        x = self.kept(x).relu()
        return self.bn3(self.head(x.mean((2, 3))))


@pytest.mark.slow
def test_both_doors_fold_the_same_batch_norms_to_the_same_weights(tmp_path):
    torch.manual_seed(0)
    model = Blocks()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 8, 8))
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, optimize=False, opset_version=18, verbose=False)
    theirs, ours = qsdk.quantize(model, x, w8a8()), qsdk.quantize(tmp_path / "m.onnx", x.numpy(), w8a8())
    assert theirs.coverage().summary["folded"] == ours.coverage().summary["folded"] == 4
    for sim, data in ((theirs, x), (ours, x.numpy())):
        qsdk.calibrate(sim, [data], progress=False)
    kinds = [
        sorted((d.op_type, d.kind, str(d.spec), d.state) for d in sim.plan.decisions.values()) for sim in (theirs, ours)
    ]
    assert kinds[0] == kinds[1]
    left = {e.scale.tobytes() for site, e in theirs.encodings.items() if theirs.plan.decisions[site].kind == "weight"}
    right = {e.scale.tobytes() for site, e in ours.encodings.items() if ours.plan.decisions[site].kind == "weight"}
    assert len(left & right) >= len(left) - 1


# constants that an Add behind a layer adds


def added(op, weight, attributes, shape, constant, *, bias=None, extra=(), tail="y", first=False):
    """A layer, an Add of a stored constant behind it, and further nodes."""
    inputs = ["x", "w", *(["c"] if bias else [])]
    terms = ["k", "t"] if first else ["t", "k"]
    nodes = [node(op, inputs, ["t"], "layer", **attributes), node("Add", terms, ["a"], "add"), *extra]
    stored = {**weights(w=weight), **weights(1, k=constant), **(weights(2, c=bias) if bias else {})}
    rng = np.random.default_rng(0)
    return make_model(nodes, {"x": shape}, {tail: None}, stored), rng.normal(size=shape).astype(np.float32)


CONV, IMAGE, RELU = (6, 4, 3, 3), (2, 4, 5, 5), node("Relu", ["a"], ["y"], "relu")
ADDED = {
    "conv": added("Conv", CONV, {}, IMAGE, (1, 6, 1, 1), extra=[RELU]),
    "conv with a bias": added("Conv", CONV, {}, IMAGE, (6, 1, 1), bias=(6,), extra=[RELU], first=True),
    "an output of the model": added("Conv", CONV, {"pads": [1] * 4}, IMAGE, (1, 6, 1, 1), tail="a"),
    "transposed conv": added("ConvTranspose", (4, 6, 3, 3), {}, IMAGE, (1, 6, 1, 1), extra=[RELU]),
    "one channel": added("Conv", (1, 4, 3), {}, (2, 4, 7), (1, 1, 1), extra=[RELU]),
    "gemm": added("Gemm", (6, 4), {"transB": 1, "alpha": 0.5}, (3, 4), (1, 6), extra=[RELU]),
    "gemm with a bias": added("Gemm", (4, 6), {}, (3, 4), (6,), bias=(6,), extra=[RELU]),
}
APART = {
    "one number": added("Conv", CONV, {}, IMAGE, (1,), extra=[RELU]),
    "a value for each position": added("Conv", CONV, {}, IMAGE, (1, 1, 3, 3), extra=[RELU]),
    "more axes": added("Conv", CONV, {}, IMAGE, (1, 1, 6, 1, 1), extra=[RELU]),
    "read elsewhere": added("Conv", CONV, {}, IMAGE, (1, 6, 1, 1), extra=[node("Add", ["a", "t"], ["y"], "sum")]),
    "the layer's result leaves the model": added("Conv", CONV, {}, IMAGE, (1, 6, 1, 1), tail="t"),
    "a scaled bias": added("Gemm", (4, 6), {"beta": 0.5}, (3, 4), (6,), bias=(6,), extra=[RELU]),
}


def bias_decisions(opened):
    return {site: str(d.spec.dtype) for site, d in opened.plan.decisions.items() if d.kind == "bias" and d.spec}


@pytest.mark.parametrize("name", ADDED)
def test_a_constant_added_behind_a_layer_is_its_bias(name):
    model, x = ADDED[name]
    opened = open_float(model, w8a8())
    assert [n.op_type for n in opened.model.graph.node].count("Add") == 0
    assert bias_decisions(opened) == {"layer:bias": "int32"}
    assert opened.notes.summary()["opened"].endswith("constants that 1 Adds add to layers are their biases: add")
    np.testing.assert_allclose(run(opened.model, x)[0], run(model, x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", APART)
def test_an_add_of_anything_else_stays(name):
    model, _ = APART[name]
    opened = open_float(model, w8a8())
    assert "layer" in {n.name for n in opened.model.graph.node}
    assert "opened" not in opened.notes.summary()


def test_an_add_that_a_rule_names_stays():
    model, _ = ADDED["conv"]
    for config in (w8a8().override("add", activation="uint16"), w8a8().override(op_type="Add", activation="uint16")):
        assert [n.op_type for n in open_float(model, config).model.graph.node] == ["Conv", "Add", "Relu"]
    assert [n.op_type for n in open_float(model, w8a8(), fold_batch_norm=False).model.graph.node].count("Add") == 1


def test_the_bias_of_a_matmul_may_have_axes_of_length_one():
    model, x = added("MatMul", (4, 6), {}, (2, 3, 4), (1, 1, 6), extra=[RELU])
    opened = open_float(model, w8a8())
    assert bias_decisions(opened) == {"add:bias": "int32"}
    np.testing.assert_array_equal(run(opened.model, x)[0], run(model, x)[0])
    model, _ = added("MatMul", (4, 6), {}, (2, 3, 4), (1, 3, 6), extra=[RELU])
    assert bias_decisions(open_float(model, w8a8())) == {}


def test_encodings_of_a_sim_with_folded_constants_go_onto_the_float_file(tmp_path):
    model, x = ADDED["conv"]
    sim = qsdk.quantize(model, None, w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    qsdk.apply_encodings(model, tmp_path / "q.encodings.json", tmp_path / "again.onnx")
    np.testing.assert_array_equal(*(run(onnx.load(tmp_path / name), x)[0] for name in ("q.onnx", "again.onnx")))
    both = qsdk.quantize(model, None, w8a8(), fold_batch_norm=False)
    qsdk.calibrate(both, [x], progress=False)
    qsdk.save_encodings(both, tmp_path / "apart.encodings.json")
    qsdk.apply_encodings(model, tmp_path / "apart.encodings.json", tmp_path / "apart.onnx")
    assert "Add" in {n.op_type for n in onnx.load(tmp_path / "apart.onnx").graph.node}
