"""A weight-only model needs one session option to give, at the runtime's default level, what was simulated."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.workarounds.onnxruntime_barriers import EXACT_MATMUL, insert_barriers, needed_options
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import storage_type

node = helper.make_node
RNG = np.random.default_rng(5)
X = RNG.normal(size=(4, 64)).astype(np.float32)


def model(dtype, *, op="MatMul", block=0, axis=1, per_tensor=False, quantized=False, **options):
    """`x @ w` with a stored integer weight [64, 32], and the input quantized or not."""
    grid = dtype_named(dtype)
    shape = (32, 64) if options.get("transB") else (64, 32)
    codes = RNG.integers(int(grid.lo), int(grid.hi) + 1, shape).astype(storage_type(grid))
    scale_shape = [] if per_tensor else [shape[axis]]
    if block:
        scale_shape = [*shape]
        scale_shape[axis] = -(-shape[axis] // block)
    scale = (RNG.uniform(0.5, 1, scale_shape) / grid.hi).astype(np.float32)
    stored = [numpy_helper.from_array(codes, "wq"), numpy_helper.from_array(np.asarray(scale), "ws")]
    where = {} if per_tensor else {"axis": axis, **({"block_size": block} if block else {})}
    nodes = [node("DequantizeLinear", ["wq", "ws"], ["w"], **where)]
    if quantized:
        stored.append(numpy_helper.from_array(np.float32(1e-4), "s"))
        nodes.append(node("QuantizeLinear", ["x", "s"], ["xq"], output_dtype=TensorProto.INT16))
        nodes.append(node("DequantizeLinear", ["xq", "s"], ["xd"]))
    nodes.append(node(op, ["xd" if quantized else "x", "w"], ["y"], **options))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [4, 64]), ("y", None))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    two_bits = grid.bits == 2
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 25 if two_bits else 21)], ir_version=13 if two_bits else 10
    )


def output(built, level, entries):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(built.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


def error(built, entries):
    wanted = output(built, ort.GraphOptimizationLevel.ORT_DISABLE_ALL, {})
    got = output(built, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, entries)
    return np.abs(got - wanted).max() / np.abs(wanted).max()


FUSED = [
    {"dtype": dtype, "block": block, "axis": 0} for dtype in ("int8", "uint8", "int4", "uint4") for block in (16, 32)
]
FUSED += [{"dtype": "int4"}, {"dtype": "int8", "per_tensor": True}, {"dtype": "int2", "block": 32, "axis": 0}]
FUSED += [{"dtype": "int4", "op": "Gemm", "block": 64, "axis": 0}]
LEFT_ALONE = [
    {"dtype": "int4", "block": 8, "axis": 0},
    {"dtype": "int4", "block": 32, "axis": 1},
    {"dtype": "int16"},
    {"dtype": "float8e4m3fn"},
    {"dtype": "int4", "op": "Gemm", "transB": 1, "axis": 0},
    {"dtype": "int4", "block": 32, "axis": 0, "quantized": True},
]


@pytest.mark.parametrize("facts", FUSED, ids=str)
def test_a_weight_only_matmul_is_exact_with_the_option_and_only_with_it(facts):
    built = model(**facts)
    before = len(built.graph.node)
    assert needed_options(built) == {}
    insert_barriers(built, only_weights=True)
    needed = needed_options(built)
    assert needed == dict([EXACT_MATMUL])
    assert len(built.graph.node) == before
    assert error(built, {}) > 1e-4
    assert error(built, needed) < 1e-5


@pytest.mark.parametrize("facts", FUSED, ids=str)
def test_a_float_input_beside_quantized_activations_needs_no_option(facts):
    built = model(**facts)
    insert_barriers(built)
    assert needed_options(built) == {}
    assert error(built, {}) < 1e-5


@pytest.mark.parametrize("facts", LEFT_ALONE, ids=str)
def test_what_the_runtime_leaves_alone_needs_no_option(facts):
    built = model(**facts)
    before = len(built.graph.node)
    insert_barriers(built, only_weights=not facts.get("quantized"))
    assert needed_options(built) == {}
    assert error(built, {}) < 1e-5
    assert len(built.graph.node) == before + bool(facts.get("quantized"))
