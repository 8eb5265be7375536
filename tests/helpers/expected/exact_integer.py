"""Integer lowerings against exact arithmetic: the stated bound holds, nearly every code is the nearest one."""

import numpy as np
from integer_comparison import compare
from integer_models import LEVELS, run
from onnx import TensorProto, checker, helper

from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import FixedPoint
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.measure import require_bounds

KINDS = {True: (TensorProto.INT32, np.int32), False: (TensorProto.INT64, np.int64)}


def grid_codes(encoding):
    """The values on the grid of a quantizer `(scale, zero point)`, as float64."""
    scale, zero = encoding
    return (np.arange(256) - zero) * np.float64(np.float32(scale))


def require_exact(model, feeds, exact, *, differing=0.001, tolerance=0.002, saturated=0.9, **options):
    """Convert and compare with `exact(feeds)` in float64, before its quantization; gives the certificate's last bound.

    Every code is within half a step and the stated error of the exact value, and all but `differing` are the nearest.
    """
    result = compare(model, feeds, tolerance, **options)
    reference = run_reference(result.model, feeds)["y"].astype(np.float64)
    edge = result.certificate["outputs"]["y"]
    rows = [r for r in result.certificate["requantizations"] if (r["tensor"] + ".").startswith(edge["tensor"] + ".")]
    allowed = sum(row["error_bound"] for row in rows)  # of slopes there is one row for every part
    zero, lo, hi = edge["zero_point"], 0, 255
    if edge["dtype"] == "int8":
        lo, hi = -128, 127
    codes = np.rint(reference / edge["scale"]) + zero
    wanted = np.clip(np.asarray(exact(feeds), np.float64) / edge["scale"] + zero, lo, hi)
    assert wanted.shape == codes.shape
    assert ((wanted > lo) & (wanted < hi)).mean() >= 1 - saturated, "the test looks at saturated codes only"
    off = np.abs(codes - wanted)
    assert rows
    assert off.max() <= 0.5 + allowed + 1e-9, (off.max(), allowed)
    nearest = np.clip(np.rint(wanted), lo, hi)
    ties = np.abs(np.abs(wanted - np.floor(wanted)) - 0.5) < 1e-9
    assert ((codes != nearest) & ~ties).mean() <= differing
    return allowed, result


def surroundings(**shapes):
    """A context to write into, with the shapes of tensors."""
    context = LoweringContext(list(shapes), "half_even", shapes, {})
    context.label = "test"
    return context


def integers_of(function, *arrays, bounds=None, scales=None, narrow=False, constants=None):
    """Apply a function of fixed point to integer tensors; gives its value and its integers, at every level the same.

    The tensors are called x, z, ... and have `bounds` or those of their arrays.
    """
    names = ["x", "z", "w"][: len(arrays)]
    ctx = surroundings(**{n: a.shape for n, a in zip(names, arrays, strict=True)})
    values = []
    for i, (name, array) in enumerate(zip(names, arrays, strict=True)):
        lo, hi = bounds[i] if bounds else (int(array.min()), int(array.max()))
        constant = np.zeros(()) if constants is None else np.asarray(constants[i], np.float64)
        scale = np.asarray(1.0 if scales is None else scales[i], np.float64)
        values.append(FixedPoint(name, scale, lo, hi, constant=constant, narrow=narrow))
    found = function(ctx, *values)
    kind, dtype = KINDS[narrow]
    inputs = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in zip(names, arrays, strict=True)]
    nodes = [*ctx.nodes, helper.make_node("Identity", [found.name], ["y"])]
    feeds = {n: a.astype(dtype) for n, a in zip(names, arrays, strict=True)}
    model = _model(nodes, inputs, found, None, ctx.initializers)
    tensors = run_reference(model, feeds, every_tensor=True)
    require_bounds(ctx.proven, tensors)
    integers = tensors["y"]
    model = _model(nodes, inputs, found, integers.shape, ctx.initializers)
    checker.check_model(model, full_check=True)
    for level in LEVELS:
        np.testing.assert_array_equal(run(model, feeds, level)["y"], integers, err_msg=level)
    if integers.size:
        assert found.lo <= integers.min(), (found.lo, integers.min())
        assert integers.max() <= found.hi, (integers.max(), found.hi)
    return found, integers


def _model(nodes, inputs, found, shape, initializers):
    output = helper.make_tensor_value_info("y", KINDS[found.narrow][0], shape)
    graph = helper.make_graph(nodes, "test", inputs, [output], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def require_near(found, integers, exact):
    """Assert that a value is within its stated error of exact numbers (float64 or objects)."""
    real = integers.astype(np.float64) * found.scale + found.constant
    allowed = (found.error + found.relative * np.abs(integers.astype(np.float64))) * np.abs(found.scale)
    slack = 2.0**-50 * np.abs(real)  # of float64, in which the difference is taken
    off = np.abs(real - np.asarray(exact, np.float64))
    assert np.all(off <= allowed + slack), (off.max(), np.max(allowed))
