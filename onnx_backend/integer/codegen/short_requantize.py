"""Write requantizations that no kernel computes in fewer passes for ONNX Runtime: as a convolution, or in 32 bits.

Codes with a multiplier and an addend per channel are a depthwise convolution of one weight, whose kernel does all of it
in one pass; a channel may be any position along the last axes. Sums of several terms are products in 32 bits that wrap
around: only the last sum has to fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.codegen.runtime import CONTRIB
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.exact_bounds import round_up
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.values import Array, Linear
from onnx_backend.workarounds.onnxruntime_table import SOFTMAX_CLOSE

_INT32 = (1 << 31) - 1
_WEIGHT = 127  # of a depthwise convolution: an addend is a whole number of 127ths of a code
_MOST_CHANNELS = 1 << 17
#: The kernel prepares each channel in every run: many of them are worth it for so many rows.
_MANY_CHANNELS, _ROWS = 1 << 11, 8
_SPATIAL = range(1, 4)  # numbers of axes over which the kernel of a convolution slides
_FLOAT32 = 2.0**-22  # more than the share that the kernel's one product rounds off


@dataclass(frozen=True)
class _Channels:
    """The numbers of a depthwise convolution, one per channel."""

    weight: Array
    scale: Array  # of the weight
    bias: Array
    error: float  # in steps


def requantize_short(b: Builder, op: Requantization) -> bool:
    """Write a requantization as one convolution or in 32 bits; False where its range leaves too few bits."""
    if op.encoding.wide or op.rounding == "gemmlowp":
        return False
    return _as_convolution(b, op) or _in_32_bits(b, op)


# --- codes, channel by channel ----------------------------------------------------------------------------------------


def _as_convolution(b: Builder, op: Requantization) -> bool:
    (term, *others), value = op.value.terms, op.value
    sizes, result = b.code_shapes.get(term.name), b.code_shapes.get(op.result)
    if others or not term.codes or np.max(term.hi) > 255 or not sizes or sizes != result:
        return False
    along = _varying(value, len(sizes))
    last = [size or 0 for size in sizes[len(sizes) - along :]]
    channels = math.prod(last)
    rows = math.prod(size or 1 for size in sizes[: len(sizes) - along])
    most = _MOST_CHANNELS if rows >= _ROWS else _MANY_CHANNELS
    if not along or not 0 < channels <= most or 0 in sizes:
        return False
    found = _of_channels(op, along, last)
    if found is None or found.error > SOFTMAX_CLOSE:
        return False
    as_it_is = along == 1 and len(sizes) - 2 in _SPATIAL
    codes = term.name if as_it_is else b.node("Reshape", [term.name, b.constant([1, -1, channels], np.int64)])
    spatial = [1] * (len(sizes) - 2 if as_it_is else 1)
    inputs = [codes, b.constant(np.float32(1.0)), b.constant(np.uint8(0))]
    inputs += [b.constant(found.weight.reshape(-1, 1, *spatial), np.int8), b.constant(found.scale, np.float32)]
    inputs += [b.constant(np.zeros(channels), np.int8), b.constant(np.float32(op.encoding.scale))]
    inputs += [b.constant(np.uint8(op.encoding.zero_point)), b.constant(found.bias, np.int32)]
    attrs = {"group": channels, "channels_last": 1, "kernel_shape": spatial}
    steps = [("QLinearConv", inputs, {"domain": CONTRIB, **attrs})]
    if not as_it_is:
        steps.append(("Reshape", [b.shape_of(term.name)], {"allowzero": 1}))
    if op.bounds != (0, 255):
        steps.append(("Clip", [b.constant(bound, np.uint8) for bound in op.bounds], {}))
    _write_chain(b, op.result, steps)
    error = Fraction(op.row["error_bound"]) + Fraction(found.error)
    op.row.update(form="QLinearConv", rounding="half_even", error_bound=round_up(error))
    return True


def _write_chain(b: Builder, result: str, steps: Sequence[tuple[str, list[str], dict[str, Any]]]) -> None:
    """Write nodes of which each reads the one before; the last makes `result`."""
    name = ""
    for i, (op_type, inputs, attrs) in enumerate(steps):
        given = [name, *inputs] if name else inputs
        if i == len(steps) - 1:
            b.write(op_type, given, result, **attrs)
        else:
            name = b.node(op_type, given, **attrs)


def _varying(value: Linear, rank: int) -> int:
    """Return the number of last axes outside of which all constants of a sum are the same."""
    arrays = [value.terms[0].scale, value.terms[0].zero, value.constant]
    return max(max((array.ndim - i for i, size in enumerate(array.shape) if size > 1), default=0) for array in arrays)


def _of_channels(op: Requantization, along: int, last: Sequence[int]) -> _Channels | None:
    """Return the numbers of each channel; None where an addend leaves the 32 bits of a bias."""
    (term,) = op.value.terms
    scale, zero, constant = (
        np.broadcast_to(a.reshape(a.shape[max(a.ndim - along, 0) :]), last).reshape(-1)
        for a in (term.scale, term.zero, op.value.constant)
    )
    step = float(op.encoding.scale)
    unit = np.abs(scale.astype(np.float64)) / _WEIGHT
    weight = (np.sign(scale) * _WEIGHT).astype(np.int64)
    none = unit == 0.0
    unit = np.where(none, step / (1 << 16), unit)
    # beyond two grids the code is the same
    far = 2.0 * 255.0 * step + 255.0 * np.abs(scale) + np.abs(zero * scale)
    bias = np.rint(np.clip(constant, -far, far) / unit) - zero * weight
    if not np.isfinite(bias).all() or np.abs(bias).max() > _INT32 - 255 * _WEIGHT:
        return None
    error = float(unit.max()) / step / 2.0 + 512.0 * _FLOAT32
    return _Channels(weight, unit, bias.astype(np.int64), error)


# --- sums, in 32 bits -------------------------------------------------------------------------------------------------


def _in_32_bits(b: Builder, op: Requantization) -> bool:
    value, step, zero = op.value, float(op.encoding.scale), op.encoding.zero_point
    ratios = [np.asarray(term.scale, np.float64) / step for term in value.terms]
    low = high = np.asarray(value.constant, np.float64) / step + zero
    for term, ratio in zip(value.terms, ratios, strict=True):
        ends = ratio * (term.lo - term.zero), ratio * (term.hi - term.zero)
        low, high = low + np.minimum(*ends), high + np.maximum(*ends)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return False
    lift = 256 * max(0, math.ceil((-float(np.min(low)) + 1.0) / 256.0))
    most = float(np.max(high)) + lift + 2.0
    shift = 32 - math.ceil(most).bit_length()
    if shift < 1:
        return False
    factors = [np.rint(np.ldexp(ratio, shift)) for ratio in ratios]
    addend = np.ldexp(np.asarray(value.constant, np.float64) / step + zero + lift + 0.5, shift)
    # of exact products, sums in the middle of two codes are no accident
    exact = all(np.array_equal(factor, np.ldexp(r, shift)) for factor, r in zip(factors, ratios, strict=True))
    error = math.ldexp(0.5, -shift)
    for term, ratio, factor in zip(value.terms, ratios, factors, strict=True):
        reach = np.maximum(np.abs(term.lo - term.zero), np.abs(term.hi - term.zero))
        error += float(np.max(np.abs(np.ldexp(factor, -shift) - ratio) * reach))
        addend = addend - factor * term.zero
    if error > SOFTMAX_CLOSE or np.max(np.abs(addend)) > 2.0**62 or (exact and op.rounding != "half_up"):
        return False
    products = [_product(b, term.name, factor) for term, factor in zip(value.terms, factors, strict=True)]
    total = products[0]
    for product in products[1:]:
        total = b.node("Add", [total, product])
    total = b.node("Add", [total, b.constant(_wrapped(addend), np.uint32)])
    total = b.node("BitShift", [total, b.constant(shift, np.uint32)], direction="RIGHT")
    if (math.floor(np.min(low) - 1.0), math.ceil(np.max(high) + 1.0)) != op.bounds:
        total = b.node("Clip", [total, *(b.constant(lift + bound, np.uint32) for bound in op.bounds)])
    # a Cast to 8 bits leaves out the lift, a multiple of 256
    b.write("Cast", [total], op.result, to=op.encoding.onnx_kind)
    known = Fraction(op.row["error_bound"])
    op.row.update(form="fixed point in 32 bits", rounding="half_up", error_bound=round_up(known + Fraction(error)))
    return True


def _product(b: Builder, name: str, factor: Array) -> str:
    wide = b.cast(name, TensorProto.UINT32)
    return wide if np.all(factor == 1.0) else b.node("Mul", [wide, b.constant(_wrapped(factor), np.uint32)])


def _wrapped(values: Array) -> Array:
    return np.asarray(np.rint(values).astype(np.int64) & 0xFFFFFFFF)
