"""The bounds that norms of codes and Softmax state as proven, on which the portable target relies, at extremes."""

import math

import numpy as np
import pytest
from exact_integer import surroundings
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.integer.fixed_point.newton import table_of_exponentials
from onnx_backend.integer.ir.values import ActivationEncoding, Lookup, dequantize_codes
from onnx_backend.integer.lowering.nonlinear.norms import are_codes, normalized_codes
from onnx_backend.integer.lowering.nonlinear.softmax import SHARE, shares
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.measure import require_bounds


def every_tensor(ctx, feeds):
    """Every tensor, with int64 where int32 could overflow unseen."""
    b = ctx
    wide = []
    for tensor in b.initializers:
        array = numpy_helper.to_array(tensor)
        wide.append(numpy_helper.from_array(array.astype(np.int64) if array.dtype == np.int32 else array, tensor.name))
    nodes = []
    for node in b.nodes:
        copied = type(node)()
        copied.CopyFrom(node)
        if node.op_type == "Cast" and node.attribute[0].i == TensorProto.INT32:
            copied.attribute[0].i = TensorProto.INT64
        nodes.append(copied)
    kinds = {name: helper.np_dtype_to_tensor_dtype(values.dtype) for name, values in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, kinds[name], values.shape) for name, values in feeds.items()]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.INT64, None)]
    graph = helper.make_graph(nodes, "steps", inputs, outputs, wide)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return run_reference(model, feeds, every_tensor=True)


def require_proven(ctx, tensors):
    assert sum(name in tensors for name in ctx.proven) > 20
    require_bounds(ctx.proven, tensors)


def rows(length):
    """Equal codes, one and two outliers, halves, alternating ends, neighbours, and random codes."""
    rng = np.random.default_rng(length)
    found = [np.full(length, code) for code in (0, 1, 127, 255)]
    for background, other in ((0, 255), (255, 0), (0, 1), (254, 255), (128, 127)):
        for count in {1, 2, length // 3, length // 2, length - 1} - {0}:
            row = np.full(length, background)
            row[:count] = other
            found.append(row)
    found += [rng.integers(0, 256, length) for _ in range(5)] + [np.arange(length) % 256]
    return np.stack(found).astype(np.uint8)


@pytest.mark.parametrize("length", [2, 3, 48, 384, 1024, 8192])
@pytest.mark.parametrize(("scale", "epsilon"), [(0.05, 1e-12), (0.01, 1e-5), (3.0, 1e-5), (0.02, 0.0), (0.004, 0.1)])
def test_the_bounds_of_a_norm_hold_and_its_error_is_as_stated(length, scale, epsilon):
    codes = rows(length)
    ctx = surroundings(x=codes.shape)
    value = dequantize_codes("x", ActivationEncoding(scale, 119, TensorProto.UINT8))
    found = normalized_codes(ctx, value, [1], length, epsilon)
    tensors = every_tensor(ctx, {"x": codes})
    require_proven(ctx, tensors)
    integers = tensors[found.name].astype(np.float64)
    x = codes.astype(np.float64)
    centred = x - x.mean(1, keepdims=True)
    size = np.sqrt((centred**2).mean(1, keepdims=True) + epsilon / scale**2)
    exact = centred / np.where(size > 0, size, 1.0) / float(found.scale)
    off = np.abs(integers - exact)
    assert np.all(off <= found.error + found.relative * np.abs(exact) + 2.0**-48 * np.abs(exact).max())
    assert np.all(np.abs(integers) <= found.hi)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 513, 4096])
@pytest.mark.parametrize("step", [0.001, 0.09, 2.0])
def test_the_bounds_of_shares_hold_and_their_error_is_as_stated(length, step):
    last = min(255, math.ceil(22.0 / step)) + 1
    table = table_of_exponentials(step, last + 1, 30)
    table[-1] = 0
    rng = np.random.default_rng(length)
    places = np.stack([np.full(length, 0), np.full(length, last), np.full(length, last - 1), np.arange(length) % last])
    places = np.r_[places, rng.integers(0, last + 1, (20, length))].astype(np.int32)
    places[:, 0] = 0  # every row has a largest element
    ctx = surroundings(x=places.shape)
    name = shares(ctx, "x", table, 1, length, "")
    tensors = every_tensor(ctx, {"x": places.astype(np.int64)})
    require_proven(ctx, tensors)
    e = table[places].astype(np.float64)
    off = tensors[name] - e / e.sum(1, keepdims=True) * 2.0**30
    assert np.abs(off).max() <= SHARE
    assert np.abs(off).max() > SHARE / 8 or length < 64
    assert -0.1 < off.mean() < 0.6 or length < 64  # what is left out of a product is made up for, or all are too small
    assert np.all(tensors[name][:, 0] > 0)


def test_rows_that_have_no_such_form_take_the_general_one():
    value = dequantize_codes("x", ActivationEncoding(0.1, 0, TensorProto.UINT8))
    assert are_codes(value, 2)
    assert not are_codes(value, 1)
    assert not are_codes(value, (1 << 13) + 1)
    assert not are_codes(Lookup("x", np.zeros(256, np.float32), None), 8)
    assert not are_codes(dequantize_codes("x", ActivationEncoding(0.1, 0, TensorProto.UINT16)), 8)
