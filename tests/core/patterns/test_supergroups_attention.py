"""Parts of attention as supergroups: softmax under a mask and rotary position embedding."""

import numpy as np
import pytest
import torch
from float_files import float_onnx
from norm_models import quantized_tensors
from onnx import TensorProto, helper
from qdq_models import make_model, run
from rope_models import SHAPE, node, rope
from torch import Tensor, nn
from torch_models import seeded

from onnx_backend.opening.read_graph import read_graph
from qsdk import calibrate, quantize, w8a8
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.supergroup import MatchResult, Supergroup
from qsdk.core.planning.make_plan import make_plan

LOWEST = float(np.finfo(np.float32).min)


def found(model) -> MatchResult:
    return match_supergroups(read_graph(model))


def groups(model) -> list[Supergroup]:
    return list({group.ops: group for _, group in sorted(found(model).groups.items())}.values())


def misses(model) -> list[str]:
    return [str(miss) for miss in found(model).near_misses]


# a softmax by hand


class ByHand(nn.Module):
    """Attention weights, op by op."""

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.exp(x - x.max(-1, keepdim=True).values)
        return 3 * (powers / (powers.sum(-1, keepdim=True) + 1e-8))


@pytest.mark.parametrize("door", ["torch", "onnx"])
def test_a_softmax_by_hand_is_one_op_from_0_to_1(door):
    x = 50 * seeded(4, 6)
    model = ByHand() if door == "torch" else float_onnx(ByHand(), (x,))
    sim = quantize(model, x if door == "torch" else None, w8a8())
    calibrate(sim, [x if door == "torch" else x.numpy()], progress=False)
    inside = {row["op_type"] for row in sim.coverage().rows if row["reason"] == "inside Softmax"}
    assert inside >= {"Sub", "Exp", "ReduceSum"}
    (share,) = (e for site, e in sim.encodings.items() if "div" in site.lower())
    assert float(share.scale[0]) == pytest.approx(1 / 255, rel=1e-6)


# masked softmax


def hidden(b, *, fill="ReduceMin", masked_first=False):
    """Softmax(Where(mask, x, fill)), with a fill of ReduceMin(x) + b, ReduceMin(x) - b or b alone."""
    nodes, stored = [], {"b": np.float32(b), "zero": np.float32(0)}
    if fill == "ReduceMin":
        nodes = [node("ReduceMin", ["x"], ["least"], "least"), node("Add", ["least", "b"], ["fill"], "fill")]
    elif fill == "minus":
        nodes = [node("ReduceMin", ["x"], ["least"], "least"), node("Sub", ["least", "b"], ["fill"], "fill")]
    name = "b" if fill == "constant" else "fill"
    nodes.append(node("Greater", ["m", "zero"], ["mask"], "compare"))
    operands = ["mask", name, "x"] if masked_first else ["mask", "x", name]
    nodes += [node("Where", operands, ["w"], "where"), node("Softmax", ["w"], ["y"], "softmax", axis=-1)]
    return make_model(nodes, {"x": SHAPE, "m": SHAPE}, {"y": SHAPE}, stored)


@pytest.mark.parametrize("masked_first", [False, True])
@pytest.mark.parametrize(("fill", "sign"), [("ReduceMin", 1), ("minus", -1), ("constant", 1)])
@pytest.mark.parametrize("b", [-20.0, -1e9])
def test_masked_softmax_is_one_op_if_masked_scores_are_far_below(b, fill, sign, masked_first):
    model = hidden(sign * b, fill=fill, masked_first=masked_first)
    assert [group.name for group in groups(model)] == ["MaskedSoftmax"]
    assert quantized_tensors(model) == {"x", "m", "y"}
    assert misses(model) == []


@pytest.mark.parametrize(("fill", "said"), [("ReduceMin", "-19"), ("constant", "-19")])
def test_masked_softmax_is_not_one_op_if_masked_scores_are_near(fill, said):
    model = hidden(-19.0, fill=fill)
    assert groups(model) == []
    assert misses(model) == [f"MaskedSoftmax-like, not fused: {said} stands where a fill of -20 or less was expected"]
    assert "w" in quantized_tensors(model)


def test_a_fill_of_minus_infinity_is_a_mask():
    assert [group.name for group in groups(hidden(-np.inf, fill="constant"))] == ["MaskedSoftmax"]


def added(make_mask, stored, *, readers=1, mask_first=False, ends=()):
    nodes = list(make_mask)
    outputs = {}
    for i in range(readers):
        operands = ["mask", "x"] if mask_first else ["x", "mask"]
        nodes += [node("Add", operands, [f"s{i}"], f"add{i}"), node("Softmax", [f"s{i}"], [f"y{i}"], f"softmax{i}")]
        outputs[f"y{i}"] = SHAPE
    outputs |= dict.fromkeys(ends, SHAPE)
    inputs = {"x": SHAPE} | ({"m": SHAPE} if make_mask else {})
    return make_model(nodes, inputs, outputs, stored)


ZERO = {"zero": np.float32(0), "one": np.float32(1)}
MASKS = {
    "(1 - m) * lowest": (
        [node("Sub", ["one", "m"], ["o"], "sub"), node("Mul", ["o", "lowest"], ["mask"], "mul")],
        {"lowest": np.float32(LOWEST)},
    ),
    "a Where": (
        [node("Greater", ["m", "zero"], ["b"], "gt"), node("Where", ["b", "zero", "low"], ["mask"], "where")],
        {"low": np.float32(-np.inf)},
    ),
    "a Where behind moves": (
        [
            node("Greater", ["m", "zero"], ["b"], "gt"),
            node("Where", ["b", "low", "zero"], ["w"], "where"),
            node("Slice", ["w", "starts", "ends", "axes"], ["cut"], "slice"),
            node("Expand", ["cut", "shape"], ["mask"], "expand"),
        ],
        {
            "low": np.float32(-1e4),
            "starts": np.array([0]),
            "ends": np.array([1]),
            "axes": np.array([1]),
            "shape": np.array(SHAPE),
        },
    ),
    "a sum of two masks": (
        [
            node("Greater", ["m", "zero"], ["b"], "gt"),
            node("Where", ["b", "low", "zero"], ["w"], "where"),
            node("Mul", ["m", "low"], ["p"], "mul"),
            node("Add", ["w", "p"], ["mask"], "sum"),
        ],
        {"low": np.float32(-1e4)},
    ),
}


@pytest.mark.parametrize("mask_first", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_scores_plus_a_mask_are_never_quantized_and_neither_is_the_mask(name, mask_first):
    nodes, stored = MASKS[name]
    used = {i for n in nodes for i in n.input}
    model = added(nodes, {**stored, **{k: v for k, v in ZERO.items() if k in used}}, readers=2, mask_first=mask_first)
    assert [group.name for group in groups(model)] == ["MaskedSoftmax"] * 2
    graph = read_graph(model)
    floats = {"mask", "w", "p", "cut", "s0", "s1"}
    assert not quantized_tensors(model) & floats
    assert quantized_tensors(model) >= {"x", "y0", "y1"}
    decision = make_plan(graph, w8a8()).decisions[graph.tensors[[t.name for t in graph.tensors].index("mask")].site]
    assert decision.reason == "a mask of MaskedSoftmax: it only hides scores, and no grid serves it"


def test_a_mask_that_something_else_reads_keeps_its_quantizer():
    nodes, stored = MASKS["(1 - m) * lowest"]
    nodes = [*nodes, node("Relu", ["mask"], ["z"], "relu")]
    model = added(nodes, {**stored, "one": ZERO["one"]}, ends=["z"])
    assert "mask" in quantized_tensors(model)
    assert [group.name for group in groups(model)] == ["MaskedSoftmax"]


def test_a_stored_mask_stays_float():
    mask = np.triu(np.full((4, 8), -np.inf, np.float32), 1)
    model = added([], {"mask": mask})
    assert [group.name for group in groups(model)] == ["MaskedSoftmax"]
    assert quantized_tensors(model) == {"x", "y0"}


def test_a_bias_of_the_scores_is_no_mask():
    model = added([], {"mask": np.ones((4, 8), np.float32)})
    assert groups(model) == []
    assert misses(model) == []
    assert quantized_tensors(model) == {"x", "mask", "s0", "y0"}


def test_an_unmasked_sum_that_leaves_the_model_is_reported():
    nodes, stored = MASKS["(1 - m) * lowest"]
    model = added(nodes, {**stored, "one": ZERO["one"]}, ends=["s0"])
    assert misses(model) == ["MaskedSoftmax-like, not fused: 's0' inside it leaves the model"]


# RoPE: x is [2, 3, 4, 8]; cos and sin enter


def rotated(x, cos, sin, kind, form):
    a, b = (x[..., ::2], x[..., 1::2]) if kind == "pairs" else (x[..., :4], x[..., 4:])
    if form == "rotate half":
        parts = [part[..., ::2] if kind == "pairs" else part[..., :4] for part in (cos, sin)]
        others = [part[..., 1::2] if kind == "pairs" else part[..., 4:] for part in (cos, sin)]
    else:
        parts = others = [cos, sin]
    left, right = a * parts[0] - b * parts[1], b * others[0] + a * others[1]
    if kind == "pairs":
        return np.stack([left, right], -1).reshape(x.shape)
    return np.concatenate([left, right], -1)


@pytest.mark.parametrize("form", ["rotate half", "by parts"])
@pytest.mark.parametrize("kind", ["Slice", "Slice from the end", "Split", "pairs"])
def test_rope_is_one_op_in_each_spelling(kind, form):
    model = rope(kind, form)
    (group,) = groups(model)
    assert (group.name, len(group.ops)) == ("RoPE", len(model.graph.node))
    assert quantized_tensors(model) == {"x", "cos", "sin", "y"}
    rng = np.random.default_rng(0)
    width = 8 if form == "rotate half" else 4
    x = rng.normal(size=SHAPE).astype(np.float32)
    cos, sin = (rng.normal(size=(4, width)).astype(np.float32) for _ in range(2))
    (y,) = run(model, {"x": x, "cos": cos, "sin": sin})
    np.testing.assert_allclose(y, rotated(x, cos, sin, kind, form), atol=1e-5)


def test_rope_with_stored_tables_and_a_product_with_minus_1():
    model = rope(negate="Mul")
    del model.graph.input[1:]
    for name in ("cos", "sin"):
        model.graph.initializer.append(helper.make_tensor(name, 1, [4, 8], np.ones(32, np.float32)))
    (group,) = groups(model)
    assert group.name == "RoPE"
    assert quantized_tensors(model) == {"x", "cos", "sin", "y"}


def wrong(change):
    model = rope()
    change({one.name: one for one in model.graph.node}, model)
    return misses(model), groups(model)


def _set(model, name, value):
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(helper.make_tensor(name, TensorProto.INT64, [1], [value]))


def test_lookalikes_of_rope_are_not_fused():
    cases = {
        "its Slices do not cut in halves": lambda nodes, model: _set(model, "half", 3),
        "its first Slice does not start at 0": lambda nodes, model: _set(model, "zero", 1),
        "its second Slice stops before the end": lambda nodes, model: _set(model, "end", 7),
    }
    for reason, change in cases.items():
        said, matched = wrong(change)
        assert said == [f"RoPE-like, not fused: {reason}"]
        assert matched == []


def test_parts_that_are_cut_in_different_ways_are_no_rope():
    def change(nodes, model):
        nodes["n1"].input[:] = ["x", "one", "end", "axes", "two"]
        for name, value in (("one", 1), ("two", 2)):
            model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))

    said, matched = wrong(change)
    assert said == ["RoPE-like, not fused: its two parts are cut in different ways"]
    assert matched == []


def test_parts_put_together_along_another_axis_are_no_rope():
    def change(nodes, model):
        nodes["n3"].attribute[0].i = -2

    said, matched = wrong(change)
    assert said == ["RoPE-like, not fused: its parts are cut along one axis and put together along another"]
    assert matched == []


def test_the_other_half_negated_is_no_rope():
    def change(nodes, model):
        nodes["n3"].input[:] = ["a", "nb"]

    said, matched = wrong(change)
    assert matched == []
    assert len(said) <= 1
