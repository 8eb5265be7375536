"""The groups of tensors that one rotation turns, on graphs of a few ops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from qdq_models import make_model
from torch import Tensor, nn

import qsdk
from qsdk.core.channel_maps.rotation_groups import RotationGroup, find_rotation_groups
from qsdk.core.graph.graph import Graph


def group_of(nodes, inputs, outputs, stored, gains) -> tuple[RotationGroup, list[str]]:
    """The one group of a graph, and the names of the tensors that need copies; `gains` by the name of a norm's gain."""
    graph = qsdk.quantize(make_model(nodes, inputs, outputs, stored, opset=23), None, qsdk.w8a8()).graph
    (group,) = find_rotation_groups(graph, lambda norm: gains[graph.tensors[norm.gain].name])
    return group, [graph.tensors[root].name for root in group.ties]


@pytest.mark.parametrize(("gain", "tied"), [(np.arange(1.0, 9.0), ["table"]), (np.full(8, 3.0), [])])
def test_a_table_that_is_read_with_a_gain_and_without_one_needs_copies(gain, tied):
    nodes = [
        helper.make_node("Cast", ["x"], ["tokens"], "cast", to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "tokens"], ["embedded"], "embedding"),
        helper.make_node("MatMul", ["z", "w"], ["written"], "writer"),
        helper.make_node("Add", ["embedded", "written"], ["h"], "add"),
        helper.make_node("LayerNormalization", ["h", "gain"], ["normed"], "norm", axis=-1),
        helper.make_node("Transpose", ["table"], ["turned"], "transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["normed", "turned"], ["y"], "head"),
        helper.make_node("MatMul", ["normed", "v"], ["read"], "reader"),
    ]
    rng = np.random.default_rng(0)
    stored = {
        name: rng.normal(size=size).astype("f") for name, size in (("table", (10, 8)), ("w", (5, 8)), ("v", (8, 3)))
    }
    stored["gain"] = np.ones(8, np.float32)
    group, ties = group_of(
        nodes, {"x": [1, 4], "z": [1, 4, 5]}, {"y": [1, 4, 10], "read": [1, 4, 3]}, stored, {"gain": gain}
    )
    assert (ties, group.blocked) == (tied, "")
    assert {one.role for one in group.rotated} == {"writer", "reader"}


@pytest.mark.parametrize("last", ["LayerNormalization", "RMSNormalization"])
def test_one_norm_that_subtracts_the_mean_is_enough_to_keep_it(last):
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("RMSNormalization", ["h", "one"], ["a"], "norm1", axis=-1),
        helper.make_node("MatMul", ["a", "w2"], ["b"], "second"),
        helper.make_node("Add", ["h", "b"], ["sum"], "add"),
        helper.make_node(last, ["sum", "two"], ["c"], "norm2", axis=-1),
        helper.make_node("MatMul", ["c", "w3"], ["y"], "third"),
    ]
    stored = {name: np.random.default_rng(0).normal(size=(8, 8)).astype("f") for name in ("w1", "w2", "w3")}
    stored |= {name: np.ones(8, np.float32) for name in ("one", "two")}
    group, _ = group_of(nodes, {"x": [1, 4, 8]}, {"y": [1, 4, 8]}, stored, dict.fromkeys(("one", "two"), np.ones(8)))
    assert group.blocked == ""
    assert group.keeps_mean is (last == "LayerNormalization")


class FeedForward(nn.Module):
    """A residual stream with one feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.up, self.down, self.head = (nn.Linear(*size) for size in ((8, 8), (8, 12), (12, 8), (8, 4)))
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        h = h + self.down(torch.relu(self.up(self.first(h))))
        return self.head(self.second(h))


@pytest.mark.parametrize(
    ("dtype", "reason"), [("uint8", ""), ("uint16", "its input is uint16, which outliers cost little")]
)
def test_an_input_of_16_bits_is_not_rotated_at_run_time(dtype, reason):
    torch.manual_seed(0)
    config = qsdk.w8a8().override("*", op_type="Relu", activation=dtype)
    sim = qsdk.quantize(FeedForward().eval(), torch.randn(3, 8), config)
    row = qsdk.rotate(sim, online=True, progress=False).rows[-1]
    assert (row["stream"], row["kind"], row["reason"]) == ("down", "input of a layer, at run time", reason)


def test_an_op_of_another_domain_turns_nothing_whatever_its_name():
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("RMSNormalization", ["h", "one"], ["a"], "norm1", axis=-1),
        helper.make_node("MatMul", ["a", "w2"], ["b"], "second"),
        helper.make_node("Mul", ["b", "two"], ["m"], "foreign"),
        helper.make_node("Add", ["h", "m"], ["sum"], "add"),
        helper.make_node("RMSNormalization", ["sum", "one"], ["c"], "norm2", axis=-1),
        helper.make_node("MatMul", ["c", "w3"], ["y"], "third"),
    ]
    stored = {name: np.random.default_rng(0).normal(size=(8, 8)).astype("f") for name in ("w1", "w2", "w3")}
    stored |= {"one": np.ones(8, np.float32), "two": np.float32(2)}
    model = make_model(nodes, {"x": [1, 4, 8]}, {"y": [1, 4, 8]}, stored, opset=23)
    graph = qsdk.quantize(model, None, qsdk.w8a8()).graph
    for domain, blocked in (("", ""), ("of.others", "it is not linear in its channels")):
        ops = [replace(op, domain=domain) if op.type == "Mul" else op for op in graph.ops]
        (group,) = find_rotation_groups(Graph(graph.tensors, ops, graph.inputs, graph.outputs), lambda _: np.ones(8))
        assert blocked in group.blocked
        assert bool(group.blocked) is bool(blocked)
