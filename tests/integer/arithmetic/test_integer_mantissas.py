"""Reciprocals of mantissas in int32 are within their stated errors, and no step leaves int32."""

import numpy as np
import pytest
from exact_integer import integers_of, surroundings
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.integer.fixed_point.newton import RECIPROCAL, ROOT, Int32, reciprocal_of_mantissa, root_of_mantissa
from onnx_backend.integer.ir.values import FixedPoint, Refused
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.measure import require_bounds

CASES = {
    "reciprocal": (reciprocal_of_mantissa, 1 << 29, lambda m: 2.0**59 / m, RECIPROCAL),
    "root": (root_of_mantissa, 1 << 28, lambda m: 2.0**44 / np.sqrt(m), ROOT),
}


def mantissas(lo, hi):
    """The ends of the range, both sides of every line's ends, and random ones."""
    knots = np.arange(lo, hi, 1 << 19)[:, None] + np.arange(-520, 521, 8)
    drawn = np.random.default_rng(0).integers(lo, hi, 200_000)
    return np.unique(np.clip(np.r_[knots.reshape(-1), drawn, lo + np.arange(9), hi - np.arange(9)], lo, hi))


def written(function, values, bounds):
    def of(ctx, x):
        found = function(Int32(ctx, x.name, *bounds))
        return FixedPoint(found.name, np.ones(()), found.lo, found.hi, narrow=True)

    return integers_of(of, values, bounds=[bounds], narrow=True)


@pytest.mark.parametrize("name", CASES)
def test_the_relative_error_is_within_its_bound(name):
    function, lo, exact, bound = CASES[name]
    values = mantissas(lo, (1 << 30) - (name == "root"))
    _, found = written(function, values, (lo, int(values.max())))
    wanted = exact(values.astype(np.float64))
    off = np.abs(found / wanted - 1.0)
    assert bound / 4 < off.max() <= bound, np.log2(off.max())
    assert found.min() >= 1 << 29
    assert found.max() <= 1 << 30


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_within_the_bounds_that_the_portable_target_takes_for_proven(name):
    function, lo, _, _ = CASES[name]
    values = mantissas(lo, (1 << 30) - 1)
    kept = {}

    def of(ctx, x):
        found = function(Int32(ctx, x.name, lo, (1 << 30) - 1))
        kept.update(ctx=ctx)
        return FixedPoint(found.name, np.ones(()), found.lo, found.hi, narrow=True)

    integers_of(of, values, bounds=[(lo, (1 << 30) - 1)], narrow=True)
    b = kept["ctx"]
    steps = every_step(b, values)
    assert len(steps) > 20
    require_bounds(b.proven, steps)


def every_step(b, values):
    """Every tensor, with int64 where int32 could overflow unseen."""
    wide = [numpy_helper.from_array(numpy_helper.to_array(t).astype(np.int64), t.name) for t in b.initializers]
    edge = helper.make_tensor_value_info("x", TensorProto.INT64, values.shape)
    outputs = [helper.make_tensor_value_info(b.nodes[-1].output[0], TensorProto.INT64, None)]
    graph = helper.make_graph(b.nodes, "steps", [edge], outputs, wide)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return run_reference(model, {"x": values.astype(np.int64)}, every_tensor=True)


def test_a_product_that_leaves_int32_is_refused_unless_its_bounds_are_known():
    ctx = surroundings(x=(2,))
    x = Int32(ctx, "x", 0, 1 << 16)
    with pytest.raises(Refused, match="can reach 4294967296"):
        x.times(x)
    assert x.times(x, (0, 5)).hi == 5
    with pytest.raises(Refused, match="can be negative"):
        Int32(ctx, "x", -1, 4).shifted(1)
    with pytest.raises(Refused, match="its sums can reach"):
        x.summed([0], (0, 1 << 31))


def test_the_square_of_a_number_is_not_negative():
    ctx = surroundings(x=(2,))
    x = Int32(ctx, "x", -3, 2)
    assert (x.times(x).lo, x.times(x).hi) == (0, 9)
