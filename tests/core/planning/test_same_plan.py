"""A module and the float ONNX file made of it are planned alike, simulate alike, and leave no tensor unexplained."""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from compared_plans import compare_plans
from float_files import CONFIG, float_onnx, plan_of_module
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch_models import calibrated, seeded
from zoo_models import ZOO, Recurrent, distinct

from onnx_backend.opening.read_graph import read_graph
from qsdk import ModelError, OnnxSim, QuantSim, calibrate, check_parity, export, quantize, w8a8
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerTensor
from qsdk.core.planning.graph_matching import match_graphs
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Decision, Plan
from torch_bridge.calibrate import stored_values
from torch_bridge.prepare import prepare


def marked(names: Iterable[Any], *, slow: Iterable[Any] = (), nightly: Iterable[Any] = ()) -> list[Any]:
    """The names as parameters, some of them marked."""
    marks = {**dict.fromkeys(slow, pytest.mark.slow), **dict.fromkeys(nightly, pytest.mark.nightly)}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]


EVERY = marked(ZOO, slow=["gpt", "lstm"], nightly=["encoder", "gru", "llama", "vit", "audio", "unet", "mobile"])


@functools.cache
def both(name: str) -> tuple[Graph, Plan, OnnxSim]:
    build, inputs = ZOO[name]
    model = distinct(build())
    return *plan_of_module(model, inputs(0)), quantize(float_onnx(model, inputs(0)), None, CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_same_plan_at_both_doors(name: str):
    graph, plan, sim = both(name)
    mapping = match_graphs(graph, sim.graph)
    assert compare_plans(graph, plan, sim.graph, sim.plan, mapping) == []
    assert [mapping[t] for t in graph.outputs] == list(sim.graph.outputs)
    assert len(set(mapping.values())) > 0.8 * sum(t.is_float for t in graph.tensors)
    back = match_graphs(sim.graph, graph)
    assert compare_plans(sim.graph, sim.plan, graph, plan, back) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_has_a_site_a_supergroup_or_a_stated_reason(name: str):
    graph, plan, _ = both(name)
    decided = {d.site for d in (*plan.decisions.values(), *plan.inside)}
    for tensor in graph.tensors:
        assert not tensor.is_float or (tensor.site or f"({tensor.name})") in decided, tensor
    assert all(d.reason for d in (*plan.decisions.values(), *plan.inside))
    # what is inside a function moves values only: no arithmetic hides there
    hidden = [d.op_type for d in plan.inside if d.reason.startswith("inside a module or function")]
    assert set(hidden) <= {"Transpose", "Reshape", "Slice", "Squeeze", "Unsqueeze", "Expand"}


@pytest.mark.parametrize("name", marked(["vit", "bert", "llama"], slow=["bert"], nightly=["vit", "llama"]))
def test_the_whole_journey(name: str, tmp_path: Path):
    build, inputs = ZOO[name]
    model, data = distinct(build()), [inputs(seed) for seed in range(3)]
    sim = quantize(model, data[0], CONFIG)
    assert isinstance(sim, QuantSim)
    calibrate(sim, data, progress=False)
    with torch.no_grad():
        wanted = model(*data[0]).numpy()
    found = sim(*data[0]).numpy()
    assert sqnr(wanted, found) > 20
    export(sim, tmp_path / "model.onnx")
    report = check_parity(sim, tmp_path / "model.onnx", data, progress=False)
    assert report.summary["passed"]
    assert report.summary["activations_max_lsb"] <= 1
    other = quantize(float_onnx(model, data[0]), None, CONFIG)
    calibrate(other, [tuple(x.numpy() for x in batch) for batch in data], progress=False)
    assert sqnr(found, other(*(x.numpy() for x in data[0]))[0]) > 60


def sqnr(wanted: np.ndarray, found: np.ndarray) -> float:
    noise = float(((wanted - found) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((wanted**2).sum()) / noise)


@pytest.mark.slow
@pytest.mark.parametrize("bias", marked([True, False], nightly=[False]))
@pytest.mark.parametrize("kind", marked([nn.LSTM, nn.GRU, nn.RNN], slow=[nn.RNN]))
def test_recurrent_layers_compute_what_torch_computes_and_export(kind: Any, bias: bool, tmp_path: Path):
    for options in (
        {"num_layers": 2, "batch_first": True},
        {"bidirectional": True},
        {"num_layers": 2, "bidirectional": True},
    ):
        model, x = distinct(kind(6, 7, bias=bias, **options)), seeded(4, 4, 6)
        prepared = prepare(model, x, w8a8(), in_place=False, fold_batch_norm=True)
        with prepared.runtime.in_phase("visit", lambda _, x: x), torch.no_grad():
            for args in ((x,), (x[0],), (x, model(x)[1])):
                wanted, found = model(*args), prepared.model(*args)
                for one, other in zip(flat(wanted), flat(found), strict=True):
                    assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    sim = calibrated(model, x)
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]
    ops = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert ops.count(kind.__name__) == 2


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for part in value for leaf in flat(part)]


@pytest.mark.slow
def test_the_weights_of_a_recurrent_layer_are_stored_as_its_op_reads_them():
    model, x = distinct(Recurrent(nn.LSTM, bidirectional=True)), seeded(3, 6, 5)
    sim = calibrated(model, x)
    decision = sim.plan.decisions["layer:weight_ih_l0"]
    assert decision.spec is not None
    assert (decision.spec.dtype.name, decision.spec.granularity, decision.shape) == ("int8", PerTensor(), (2, 28, 6))
    stored = stored_values(sim)["layer:weight_ih_l0"]
    raw = model.layer.weight_ih_l0_reverse.detach().numpy()
    assert np.abs(stored[1, 7:14] - raw[21:28]).max() < 0.01  # the output gate: last in torch, second in ONNX
    assert sim.plan.decisions["layer:output_l0"].quantized
    with torch.no_grad():
        sim.model.layer.weight_hh_l0.add_(1)
    assert not np.allclose(stored_values(sim)["layer:weight_hh_l0"], 0)


class Packs(nn.Module):
    """Packs its input, as training code does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 2, 1]))
        return self.layer(packed)[1]


def test_recurrent_layers_refuse_what_onnx_does_not_have():
    x = seeded(3, 4, 6)
    with pytest.raises(ModelError, match=r"LSTM\) has proj_size.*put a Linear behind it"):
        quantize(nn.LSTM(6, 7, proj_size=3), x, w8a8())
    with pytest.raises(ModelError, match=r"layer \(GRU\) got a PackedSequence.*padded tensor"):
        quantize(Packs(), x, w8a8())


class Stepped(nn.Module):
    """A cell run for two steps from a state that it is given: [N, 6] twice and states [N, 7] to [N, 7]."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(6, 7)

    def forward(self, x: Tensor, y: Tensor, hidden: Tensor, cell: Tensor | None = None) -> Tensor:
        given: Any = hidden if cell is None else (hidden, cell)
        after = self.cell(y, self.cell(x, given))
        return after[0] if isinstance(after, tuple) else after


@pytest.mark.slow
@pytest.mark.parametrize("kind", marked([nn.LSTMCell, nn.GRUCell, nn.RNNCell], nightly=[nn.LSTMCell, nn.RNNCell]))
def test_recurrent_cells_are_their_ops_and_planned_alike(kind: Any, tmp_path: Path):
    model = distinct(Stepped(kind))
    states = [seeded(3, 7, seed=i) for i in range(2 if kind is nn.LSTMCell else 1)]
    example = (seeded(3, 6), seeded(3, 6, seed=5), *states)
    prepared = prepare(model, example, w8a8(), in_place=False, fold_batch_norm=True)
    with prepared.runtime.in_phase("visit", lambda _, x: x), torch.no_grad():
        assert torch.allclose(prepared.model(*example), model(*example), atol=1e-6)
        # alone: without a state, and without a batch
        for x in (example[0], example[0][0]):
            assert all(
                torch.allclose(a, b, atol=1e-6)
                for a, b in zip(flat(prepared.model.cell(x)), flat(model.cell(x)), strict=True)
            )
    graph, plan = plan_of_module(model, example)
    other = quantize(float_onnx(model, example, dynamic=False), None, CONFIG)
    mapping = match_graphs(graph, other.graph)
    assert compare_plans(graph, plan, other.graph, other.plan, mapping) == []
    sim = calibrated(model, example)
    assert sim.plan.decisions["cell:weight_ih"].quantized
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [example], progress=False).summary["passed"]


# --- the matching itself -------------------------------------------------------------------------------------------


def graph_of(nodes: list[Any], inputs: dict[str, list[Any]], outputs: list[str], **stored: np.ndarray) -> Graph:
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    kept = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", given, made, kept), opset_imports=[helper.make_opsetid("", 21)]
    )
    return read_graph(model)


def attention_like(order: tuple[int, ...], names: str) -> Graph:
    """softmax(xQ (xK)') xV with the projections in some order: equal ops that only their use tells apart."""
    projections = [helper.make_node("MatMul", ["x", f"w{i}"], [f"{names}{i}"]) for i in order]
    rest = [
        helper.make_node("Transpose", [f"{names}1"], ["kt"], perm=[1, 0]),
        helper.make_node("MatMul", [f"{names}0", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"]),
        helper.make_node("MatMul", ["p", f"{names}2"], ["y"]),
    ]
    weights = {f"w{i}": np.full((4, 4), i, np.float32) for i in range(3)}
    return graph_of([*projections, *rest], {"x": [3, 4]}, ["y"], **weights)


def test_numbers_that_other_numbers_are_computed_from_are_not_matched_by_their_results():
    def shifted(kind: str) -> Graph:
        nodes = [helper.make_node(kind, ["c"], ["number"]), helper.make_node("Add", ["x", "number"], ["y"])]
        return graph_of(nodes, {"x": [3, 4]}, ["y"], c=np.float32(4.0))

    left, right = shifted("Neg"), shifted("Sqrt")
    mapping = match_graphs(left, right)
    assert {left.tensors[tensor].name for tensor in mapping} == {"x", "y", "number"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_equal_siblings_are_told_apart_by_their_use(order: tuple[int, ...]):
    left, right = attention_like((0, 1, 2), "a"), attention_like(order, "b")
    mapping = match_graphs(left, right)
    named = {left.tensors[a].name: right.tensors[b].name for a, b in mapping.items()}
    assert named["w0"] == "w0"
    assert named["w2"] == "w2"
    assert (named["a0"], named["a1"], named["a2"]) == ("b0", "b1", "b2")


def test_what_one_side_lacks_is_unmatched_and_so_is_what_follows():
    relu = helper.make_node("Relu", ["a"], ["b"])
    first = helper.make_node("Exp", ["x"], ["a"])
    left = graph_of([first, relu, helper.make_node("Tanh", ["b"], ["y"])], {"x": [2]}, ["y"])
    right = graph_of([first, helper.make_node("Tanh", ["a"], ["y"])], {"x": [2]}, ["y"])
    mapping = match_graphs(left, right)
    assert {left.tensors[a].name for a in mapping} == {"x", "a"}
    plans = make_plan(left, w8a8()), make_plan(right, w8a8())
    found = compare_plans(left, plans[0], right, plans[1], mapping)
    assert any("absent on the other" in one for one in found)


def test_slices_are_matched_by_what_they_take():
    bounds = {"zero": np.array([0]), "two": np.array([2]), "four": np.array([4]), "axis": np.array([0])}
    halves = [("zero", "two", "a"), ("two", "four", "b")]

    def cut(order: list[tuple[str, str, str]]) -> Graph:
        nodes = [helper.make_node("Slice", ["x", start, end, "axis"], [name]) for start, end, name in order]
        nodes.append(helper.make_node("Sub", ["a", "b"], ["y"]))
        return graph_of(nodes, {"x": [4]}, ["y"], **bounds)

    left, right = cut(halves), cut(halves[::-1])
    named = {left.tensors[a].name: right.tensors[b].name for a, b in match_graphs(left, right).items()}
    assert (named["a"], named["b"]) == ("a", "b")


@pytest.mark.parametrize("field", ["spec", "kind", "tie", "state", "reason"])
def test_comparison_finds_a_difference_of_every_kind(field: str):
    graph, plan, sim = both("outputs")
    mapping = match_graphs(graph, sim.graph)
    site = next(s for s, d in plan.decisions.items() if d.quantized and d.kind == "activation" and not d.tied_to)
    changed: dict[str, Decision] = {
        "spec": replace(plan.decisions[site], spec=replace(plan.decisions[site].spec, symmetric=True)),
        "kind": replace(plan.decisions[site], kind="output"),
        "tie": replace(plan.decisions[site], tied_to="x:input"),
        "state": replace(plan.decisions[site], spec=None),
    }
    if field == "reason":
        site, decision = next((s, d) for s, d in plan.decisions.items() if d.reason == "inside Conv+Relu")
        changed["reason"] = replace(decision, reason="because")
    spoiled = Plan({**plan.decisions, site: changed[field]}, plan.inside)
    found = compare_plans(graph, spoiled, sim.graph, sim.plan, mapping)
    expected = {
        "tie": "state|shares the encoding",
        "spec": "spec",
        "kind": "kind",
        "state": "state",
        "reason": "because",
    }
    assert any(re.search(expected[field], one) for one in found)
