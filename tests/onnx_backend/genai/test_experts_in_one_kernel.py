"""Mixtures of experts as QMoE: the kernel computes what the nodes did, in graphs by hand and in folders."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch
from genai_folders import greedy, nodes, steps, text
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tiny_decoders import decoder, plain_sim, tokens

import qsdk
from onnx_backend.genai.computed import Computed
from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.experts import ExpertsWriter

EXPERTS, CHOSEN, WIDTH, INNER = 4, 2, 32, 64


def mixture(bits: int, block: int, *, shifted: bool, pairs: bool, turned: bool, fault: str = "") -> ModelProto:
    """Return a mixture of experts as exporters write it; `pairs` has the gate of GPT-OSS, with biases."""
    rng = np.random.default_rng(bits)
    kind = getattr(TensorProto, f"{'U' if shifted else ''}INT{bits}")
    least = 0 if shifted else -(1 << (bits - 1))
    tensors, made = list[TensorProto](), list[Any]()

    def keep(name: str, value: npt.NDArray[Any]) -> str:
        tensors.append(numpy_helper.from_array(value, name))
        return name

    def node(type: str, inputs: list[str], output: str, count: int = 1, **options: Any) -> str:
        outputs = [output] if count == 1 else [f"{output}{n}" for n in range(count)]
        made.append(helper.make_node(type, inputs, outputs, **options))
        return output

    def stack(name: str, inputs: int, outputs: int) -> str:
        shape = (EXPERTS, outputs, inputs) if turned else (EXPERTS, inputs, outputs)
        place = 2 if turned else 1
        grid = tuple(n // (block or inputs) if axis == place else n for axis, n in enumerate(shape))
        codes = rng.integers(least, least + (1 << bits), shape)
        tensors.append(helper.make_tensor(name, kind, shape, codes.reshape(-1)))
        names = [name, keep(f"{name}/scale", rng.uniform(0.01, 0.05, grid).astype(np.float32))]
        if shifted:
            tensors.append(helper.make_tensor(f"{name}/zero", kind, grid, rng.integers(0, 1 << bits, grid).reshape(-1)))
            names.append(f"{name}/zero")
        node("DequantizeLinear", names, f"{name}/float", axis=place, block_size=block or inputs)
        numbers = "numbers" if fault != "other experts" else "tokens"
        taken = node("Gather", [f"{name}/float", numbers], f"{name}/taken")
        return node("Transpose", [taken], f"{name}/turned", perm=[0, 2, 1]) if turned else taken

    def multiplied(rows: str, name: str, inputs: int, outputs: int) -> str:
        wide = node("Unsqueeze", [rows, "one"], f"{name}/rows")
        whole = node("MatMul", [wide, stack(name, inputs, outputs)], f"{name}/whole")
        result = node("Squeeze", [whole, "one"], f"{name}/result")
        if not pairs:
            return result
        keep(f"{name}/bias", rng.normal(size=(EXPERTS, outputs)).astype(np.float32))
        node("Gather", [f"{name}/bias", "numbers"], f"{name}/own_bias")
        return node("Add", [result, f"{name}/own_bias"], f"{name}/biased")

    for name, value in {"one": [1], "last": [-1], "chosen": [CHOSEN], "back": [-1, CHOSEN, WIDTH]}.items():
        keep(name, np.array(value, np.int64))
    keep("router", rng.normal(size=(WIDTH, EXPERTS)).astype(np.float32))
    node("MatMul", ["hidden", "router"], "scores")
    node("TopK", ["scores", "chosen"], "top", 2, axis=-1)
    node("Softmax", ["top0"], "weights", axis=-1)
    node("Reshape", ["top1", "last"], "flat")
    node("Shape", ["flat"], "count")
    node("TopK", ["flat", "count"], "order", 2, largest=0)
    node("Div", ["order1", "chosen"], "tokens")
    node("Gather", ["hidden", "tokens"], "rows")
    node("Gather", ["flat", "order1"], "numbers")
    node("Reshape", ["weights", "last"], "flat_weights")
    node("Gather", ["flat_weights", "order1"], "own_weights")
    into = multiplied("rows", "up", WIDTH, 2 * INNER)
    if pairs:
        for name, number in {"beta": 1.0, "limit": 3.0, "least": -3.0, "alpha": 1.7}.items():
            keep(name, np.float32(number).reshape(()))
        for name, start in {"gate": 0, "other": 1}.items():
            keep(f"{name}/start", np.array([start], np.int64))
        keep("end", np.array([1 << 40], np.int64))
        keep("two", np.array([2], np.int64))
        node("Slice", [into, "gate/start", "end", "last", "two"], "gate/free")
        node("Slice", [into, "other/start", "end", "last", "two"], "other/free")
        node("Clip", ["gate/free", "", "limit"], "gate")
        node("Clip", ["other/free", "least", "limit"], "other/within")
        node("Mul", ["gate", "alpha"], "gate/steep")
        node("Add", ["other/within", "beta"], "other")
    else:
        node("Split", [into], "part", 2, axis=-1, num_outputs=2)
        node("Identity", ["part0"], "gate")
        node("Identity", ["part0"], "gate/steep")
        node("Identity", ["part1"], "other")
    node("Tanh" if fault == "tanh" else "Sigmoid", ["gate/steep"], "gate/share")
    node("Mul", ["gate", "gate/share"], "open")
    result = multiplied(node("Mul", ["open", "other"], "inner"), "down", INNER, WIDTH)
    node("Unsqueeze", ["own_weights", "last"], "factors")
    node("Mul", [result, "factors"], "weighted")
    node("TopK", ["order1", "count"], "inverse", 2, largest=0)
    node("Gather", ["weighted", "order1" if fault == "order" else "inverse1"], "in_order")
    node("Reshape", ["in_order", "back"], "apart")
    node("ReduceSum", ["apart", "one"], "sum", keepdims=0)
    node("Identity", ["sum"], "result")
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("hidden", "result")]
    graph = helper.make_graph(made, "mixture", edges[:1], edges[1:], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def result_of(model: ModelProto, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what ONNX Runtime computes, without its optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"hidden": rows})[0]


def written(model: ModelProto) -> ExpertsWriter:
    """Write the mixtures of a model, in place."""
    editor = Editor(model, {})
    writer = ExpertsWriter(editor, Computed(editor, 16))
    writer.write()
    for tensor in model.graph.initializer:
        if tensor.name in editor.large:
            tensor.CopyFrom(numpy_helper.from_array(editor.large[tensor.name].value(), tensor.name))
    return writer


GRIDS = [(4, 0), (4, 16), (4, 32), (8, 0)]


@pytest.mark.parametrize("shape", [*product((False, True), repeat=3)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_kernel_computes_what_the_nodes_did(grid: tuple[int, int], shape: tuple[bool, bool, bool]):
    shifted, pairs, turned = shape
    model = mixture(*grid, shifted=shifted, pairs=pairs, turned=turned)
    rows = np.random.default_rng(0).normal(size=(9, WIDTH)).astype(np.float32)
    wanted = result_of(model, rows)
    assert not written(model).reasons
    assert [node.op_type for node in model.graph.node].count("QMoE") == 1
    assert not {"DequantizeLinear", "Sigmoid"} & {node.op_type for node in model.graph.node}
    np.testing.assert_allclose(result_of(model, rows), wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("tanh", "its activation is no gate that the kernel has"),
        ("order", "not added up by the weights of its router"),
        ("other experts", "its experts are not chosen|not the tokens of each chosen expert"),
    ],
)
def test_a_mixture_that_computes_something_else_stays_and_is_named(fault: str, why: str):
    model = mixture(4, 32, shifted=False, pairs=False, turned=False, fault=fault)
    (reason,) = written(model).reasons.values()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reason)
    assert "QMoE" not in [node.op_type for node in model.graph.node]


def test_blocks_of_8_bits_stay_since_the_kernel_rounds_their_inputs():
    model = mixture(8, 32, shifted=False, pairs=False, turned=False)
    assert written(model).reasons == {
        "up": "with blocks of 8 bits the kernel rounds its inputs; give 4 bits, or no blocks"
    }


#: kind of decoder -> its experts
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "sliding_window": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_experts_of_a_decoder_are_one_kernel_a_layer(kind: str, tmp_path: Path):
    torch.manual_seed(0)
    model = decoder(kind, head_dim=16, hidden_size=64, num_experts_per_tok=2, **KINDS[kind])
    sim = plain_sim(model, qsdk.weight_only("int4", block_size=32, kv_cache="float32"))
    report = qsdk.export(sim, tmp_path / kind, format="genai")
    assert (report.summary["attentions"], report.summary["experts"]) == (2, 2)
    assert "plain" not in report.summary
    found = nodes(tmp_path / kind)
    assert found["QMoE"] == 2
    assert not found.keys() & {"MatMul", "GatherND"}
    prompt = tokens(5, length=9)[0].tolist()
    assert steps(tmp_path / kind, sim, prompt, 16) < 1e-4
    assert text(tmp_path / kind, prompt, 48) == greedy(sim.model, prompt, 48)
