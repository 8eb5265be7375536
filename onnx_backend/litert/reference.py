"""Predict, bit for bit, what LiteRT's reference kernels compute: a program run on NumPy integers.

Each kernel follows the one in LiteRT's `kernels/internal/reference`; the scales become multipliers as its `Prepare`
computes them, in float32 or float64 as there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_backend.litert import fixed_math as fx
from onnx_backend.litert.program import Grid, Op, Program
from qsdk.core.arrays import Array
from qsdk.core.errors import ExportError

_ADD_BITS = MappingProxyType({"int8": 20, "int16": 15})


@dataclass(frozen=True)
class _Call:
    """One op with its values (None: absent), the grids of its tensors, and its options."""

    op: Op
    x: Sequence[Any]
    grids: Sequence[Grid]
    out: Grid
    shape: tuple[int, ...]

    def option(self, name: str, default: Any = 0) -> Any:
        return self.op.options.get(name, default)

    def finish(self, values: Array) -> Array:
        """Add the zero point and clamp to the grid and the fused activation."""
        low, high = self.out.bounds
        activation = self.option("fusedActivationFunction")
        if activation:
            least, most = {1: (0.0, np.inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}[activation]
            low = max(low, _code(self.out, least))
            high = high if most == np.inf else min(high, _code(self.out, most))
        return np.asarray(np.clip(values + self.out.zero, low, high))

    def scale_of(self, values: Array, real: Any) -> Array:
        """Return accumulators on the scale of the result."""
        return fx.scaled_wide(values, real) if self.out.dtype == "int16" else fx.scaled(values, real)


def _code(grid: Grid, value: float) -> int:
    return grid.zero + int(np.floor(np.abs(np.float32(value) / grid.scale[0]) + 0.5) * np.sign(value))


def run(program: Program, feeds: Sequence[Array]) -> dict[int, Array]:
    """Return the integers of every tensor, by its number, when the inputs have these codes.

    Raises:
        ExportError: an op that qsdk does not write.
    """
    values: dict[int, Any] = {n: tensor.value for n, tensor in enumerate(program.tensors) if tensor.value is not None}
    values = {n: value.astype(np.int64) for n, value in values.items()}
    values.update({n: np.asarray(feed, np.int64) for n, feed in zip(program.inputs, feeds, strict=True)})
    for op in program.ops:
        if op.type not in _KERNELS:
            raise ExportError(f"the file has the op {op.type}, which qsdk does not write: it cannot be predicted")
        (made,) = op.outputs
        tensor = program.tensors[made]
        grids = [program.tensors[n].grid if n >= 0 else None for n in op.inputs]
        given = [values.get(n) for n in op.inputs]
        call = _Call(op, given, grids, tensor.grid, tensor.shape)  # type: ignore[arg-type]
        values[made] = _KERNELS[op.type](call).reshape(tensor.shape)
    return values


def _windows(x: Array, size: Sequence[int], call: _Call, fill: int) -> Array:
    """Return the windows of an image, shape (N, H, W, kh, kw, C), padded as the format's SAME says."""
    steps = (call.option("strideH", 1), call.option("strideW", 1))
    apart = (call.option("dilationHFactor", 1), call.option("dilationWFactor", 1))
    reach = [(k - 1) * d + 1 for k, d in zip(size, apart, strict=True)]
    ends = [(0, 0)] * 4
    if call.option("padding") == 0:
        for axis in (0, 1):
            n = x.shape[1 + axis]
            total = max((-(-n // steps[axis]) - 1) * steps[axis] + reach[axis] - n, 0)
            ends[1 + axis] = (total // 2, total - total // 2)
    x = np.pad(x, ends, constant_values=fill)
    views = np.lib.stride_tricks.sliding_window_view(x, reach, (1, 2))
    views = views[:, :: steps[0], :: steps[1], :, :: apart[0], :: apart[1]]
    return np.asarray(np.moveaxis(views, 3, -1))


def _multipliers(call: _Call) -> Array:
    left, right = call.grids[0].scale.astype(np.float64), call.grids[1].scale.astype(np.float64)
    return np.asarray(left * right / call.out.scale.astype(np.float64))


def _conv(call: _Call) -> Array:
    x, weight, bias = call.x
    groups = x.shape[-1] // weight.shape[3]
    found = _windows(x - call.grids[0].zero, weight.shape[1:3], call, 0)
    parts = np.split(found, groups, -1), np.split(weight, groups, 0)
    sums = [np.tensordot(a, b, ([3, 4, 5], [1, 2, 3])) for a, b in zip(*parts, strict=True)]
    return call.finish(call.scale_of(np.concatenate(sums, -1) + bias, _multipliers(call)))


def _depthwise(call: _Call) -> Array:
    x, weight, bias = call.x
    x = np.repeat(x, call.option("depthMultiplier"), -1)
    found = _windows(x - call.grids[0].zero, weight.shape[1:3], call, 0)
    sums = np.einsum("nhwijc,ijc->nhwc", found, weight[0]) + bias
    return call.finish(call.scale_of(sums, _multipliers(call)))


def _transpose_conv(call: _Call) -> Array:
    sizes, weight, x, bias = call.x
    n, height, width, _ = x.shape
    steps, (count, kh, kw, _) = (call.option("strideH"), call.option("strideW")), weight.shape
    full = np.zeros((n, (height - 1) * steps[0] + kh, (width - 1) * steps[1] + kw, count), np.int64)
    parts = np.einsum("nhwc,oijc->nhwijo", x - call.grids[2].zero, weight)
    for i in range(kh):
        for j in range(kw):
            full[:, i : i + height * steps[0] : steps[0], j : j + width * steps[1] : steps[1]] += parts[:, :, :, i, j]
    if call.option("padding") == 0:
        begin = [max(k - s, 0) // 2 for k, s in zip((kh, kw), steps, strict=True)]
        full = full[:, begin[0] : begin[0] + sizes[1], begin[1] : begin[1] + sizes[2]]
        short = [(0, int(m) - k) for m, k in zip(sizes, full.shape, strict=True)]
        full = np.pad(full, short)
    scales = call.grids[2].scale.astype(np.float64) * call.grids[1].scale / call.out.scale
    return call.finish(call.scale_of(full + bias, scales))


def _fully_connected(call: _Call) -> Array:
    x, weight, bias = call.x
    sums = (x.reshape(-1, weight.shape[1]) - call.grids[0].zero) @ weight.T + bias
    return call.finish(fx.scaled_once(sums, _multipliers(call)))


def _batch_matmul(call: _Call) -> Array:
    left, right = (value - grid.zero for value, grid in zip(call.x, call.grids, strict=True))
    left = left.swapaxes(-1, -2) if call.option("adjX") else left
    right = right.swapaxes(-1, -2) if call.option("adjY") else right
    product = call.grids[0].scale * call.grids[1].scale  # in float32, as its `Prepare` does
    return call.finish(call.scale_of(left @ right, product.astype(np.float64) / call.out.scale.astype(np.float64)))


def _sum(sign: int) -> Callable[[_Call], Array]:
    def kernel(call: _Call) -> Array:
        """Return the codes of a call."""
        bits = _ADD_BITS[call.out.dtype]
        twice = 2.0 * max(float(call.grids[0].scale[0]), float(call.grids[1].scale[0]))
        sides = [
            fx.scaled((x - grid.zero) << bits, float(grid.scale[0]) / twice)
            for x, grid in zip(call.x, call.grids, strict=True)
        ]
        return call.finish(fx.scaled(sides[0] + sign * sides[1], twice / ((1 << bits) * float(call.out.scale[0]))))

    return kernel


def _mul(call: _Call) -> Array:
    product = (call.x[0] - call.grids[0].zero) * (call.x[1] - call.grids[1].zero)
    real = call.grids[0].scale * call.grids[1].scale / call.out.scale  # in float32, as its `Prepare` does
    return call.finish(fx.scaled(product, real))


def _requantize(call: _Call) -> Array:
    real = float(call.grids[0].scale[0]) / float(call.out.scale[0])
    return call.finish(fx.scaled(call.x[0] - call.grids[0].zero, real))


def _abs(call: _Call) -> Array:
    real = float(call.grids[0].scale[0]) / float(call.out.scale[0])
    return call.finish(fx.scaled(np.abs(call.x[0] - call.grids[0].zero), real))


def _interpolated(function: Callable[[Array, _Call], Array]) -> Callable[[_Call], Array]:
    """Return the kernel of a function of 16 bits: 513 codes, each moved so that the middles are nearer, and lines."""

    def kernel(call: _Call) -> Array:
        ends = np.array([-32768, 32767], np.float32)
        (first, last), made = call.grids[0].scale[0] * ends, call.out.scale[0] * ends
        step, finer = (last - first) / np.float32(512), np.float32(65536) / (made[1] - made[0])
        number = np.arange(513, dtype=np.float32)
        here, middle, behind = (
            function(one, call) * finer
            for one in (
                first + number[:-1] * step,
                first + number[:-1] * step + step / np.float32(2),
                first + number[1:] * step,
            )
        )
        moved = _rounded((_rounded((behind + _rounded(here)) / 2) - _rounded(middle)) / 2)
        final = function(np.array([last]), call) * finer
        table = np.clip(np.append(_rounded(here) - moved, _rounded(final)), *call.out.bounds).astype(np.int64)
        row, rest = (call.x[0] >> 7) + 256, call.x[0] & 127
        return np.asarray(table[row] + (((table[row + 1] - table[row]) * rest + 64) >> 7))

    return kernel


def _rounded(values: Array) -> Array:
    """Return floats rounded, halves away from zero."""
    return np.asarray(np.sign(values) * np.floor(np.abs(values) + np.float32(0.5)))


def _inverse_root(x: Array, call: _Call) -> Array:
    largest = np.float32(32767) * call.out.scale[0]
    return np.where(x > 0, np.float32(1) / np.sqrt(np.where(x > 0, x, np.float32(1))), largest)


def _relu(low: float, high: float) -> Callable[[_Call], Array]:
    def kernel(call: _Call) -> Array:
        real = float(call.grids[0].scale[0] / call.out.scale[0])
        found = fx.scaled(call.x[0] - call.grids[0].zero, real) + call.out.zero
        least, most = call.out.bounds
        return np.clip(
            found, max(least, _code(call.out, low)), most if high == np.inf else min(most, _code(call.out, high))
        )

    return kernel


def _leaky(call: _Call) -> Array:
    centred, ratio = call.x[0] - call.grids[0].zero, float(call.grids[0].scale[0]) / float(call.out.scale[0])
    slope = ratio * float(np.float32(call.option("alpha")))
    return call.finish(np.where(centred >= 0, fx.scaled(centred, ratio), fx.scaled(centred, slope)))


def _prelu(call: _Call) -> Array:
    centred, slope = call.x[0] - call.grids[0].zero, call.x[1] - call.grids[1].zero
    ratio = float(call.grids[0].scale[0]) / float(call.out.scale[0])
    below = fx.scaled(centred * slope, float(call.grids[0].scale[0]) * float(call.grids[1].scale[0]) / call.out.step)
    return call.finish(np.where(centred >= 0, fx.scaled(centred, ratio), below))


def _average(call: _Call) -> Array:
    size = (call.option("filterHeight"), call.option("filterWidth"))
    sums = _windows(call.x[0], size, call, 0).sum((3, 4))
    counts = _windows(np.ones_like(call.x[0]), size, call, 0).sum((3, 4))
    found = np.where(sums > 0, (sums + counts // 2) // counts, -((counts // 2 - sums) // counts))
    return np.asarray(np.clip(found, *call.out.bounds))


def _max_pool(call: _Call) -> Array:
    size = (call.option("filterHeight"), call.option("filterWidth"))
    return np.asarray(_windows(call.x[0], size, call, call.out.bounds[0]).max((3, 4)))


def _mean(call: _Call) -> Array:
    axes = tuple(int(axis) for axis in call.x[1])
    x = call.x[0]
    count = int(np.prod([x.shape[axis] for axis in axes]))
    sums = x.sum(axes, keepdims=True) - call.grids[0].zero * count
    real = float(call.grids[0].scale[0]) / float(call.out.scale[0])
    mantissa, shift = (int(one) for one in fx.multiplier(real))
    bits = 63 - (64 - count.bit_length())
    bits = min(min(bits, 32), 31 + shift)
    mantissa, shift = (mantissa << bits) // count, shift - bits
    return call.finish(fx.divided(fx.high_product(sums << max(shift, 0), mantissa), max(-shift, 0)))


def _softmax(call: _Call) -> Array:
    real = min(float(call.grids[0].scale[0]) * (1 << 26), (1 << 31) - 1.0)
    mantissa, shift = (int(one) for one in fx.multiplier(real))
    below = call.x[0] - call.x[0].max(-1, keepdims=True)
    counted = below >= -fx.radius(5, shift)
    rescaled = fx.high_product(np.where(counted, below, 0) << shift, mantissa)
    exponentials = np.where(counted, fx.exp_of_negative(rescaled, 5), 0)
    sums = fx.divided(exponentials, 12).sum(-1, keepdims=True)
    inverse, over = fx.reciprocal(sums, 12)
    found = fx.divided(fx.high_product(inverse, exponentials), over + 31 - 8) - 128
    return np.where(counted, np.clip(found, -128, 127), -128)


def _curve(function: Callable[[fx.Integers, int], fx.Integers], bits: int, zero: int) -> Callable[[_Call], Array]:
    """Return the kernel of a function on numbers of 4 integer bits, whose result has these fraction bits."""

    def kernel(call: _Call) -> Array:
        mantissa, shift = (int(one) for one in fx.multiplier(float(call.grids[0].scale[0]) * (1 << 27)))
        centred, ends = call.x[0] - call.grids[0].zero, fx.radius(4, shift)
        inside = np.abs(centred) < ends
        given = fx.high_product(np.where(inside, centred, 0) << shift, mantissa)
        found = np.clip(fx.divided(function(given, 4), 31 - bits) + zero, -128, 127)
        return np.where(inside, found, np.where(centred > 0, 127, -128))

    return kernel


def _hard_swish(call: _Call) -> Array:
    hires = np.float32(1 / 128) * call.grids[0].scale[0]
    out, out_shift = fx.multiplier(float(hires / call.out.scale[0]))
    relu, relu_shift = fx.multiplier(float(hires / np.float32(3 / 32768)))
    factors = [int(min((int(one) + (1 << 15)) >> 16, 32767)) for one in (out, relu)]
    x = (call.x[0] - call.grids[0].zero) << 7
    on_output, gate, shift = fx.high_product(x, factors[0], 15), x, int(relu_shift)
    if shift > 0:
        gate = np.clip(gate << (shift - 1), -32768, 32767)
    gate = fx.high_product(gate, factors[1], 15)
    gate = np.clip(gate << 1, -32768, 32767) if shift > 0 else fx.divided(gate, -shift)
    gate = (gate + (1 << 15)) >> 1
    product = gate * on_output
    product = np.where(product >= 0, product >> 15, -((-product) >> 15))
    return call.finish(fx.divided(product, -int(out_shift)))


def _table(function: Callable[[Array, _Call], Array]) -> Callable[[_Call], Array]:
    """Return the kernel of a function that LiteRT computes in floats for each code, once."""

    def kernel(call: _Call) -> Array:
        given = call.grids[0].scale[0] * (call.x[0] - call.grids[0].zero).astype(np.float32)
        found = function(given, call) * (np.float32(1) / call.out.scale[0])
        return call.finish(_rounded(found).astype(np.int64))

    return kernel


def _interpolation(size: int, wanted: int, call: _Call) -> tuple[Array, Array, Array]:
    """Return, for each position of an axis, the weight of 10 bits of the upper neighbour, and both neighbours."""
    scale = ((size << 10) + wanted // 2) // wanted
    if call.option("alignCorners") and wanted > 1:
        scale = (((size - 1) << 10) + (wanted - 1) // 2) // (wanted - 1)
    place = np.arange(wanted) * scale
    if call.option("halfPixelCenters"):
        place = place + scale // 2 - (1 << 9)
    towards = np.where(place >= 0, place >> 10, -((-place) >> 10))
    lower = np.maximum(towards, 0)
    up = place + (1 << 10) - 1
    upper = np.minimum(np.where(up >= 0, up >> 10, -((-up) >> 10)), size - 1)
    return place - (lower << 10), lower, upper


def _bilinear(call: _Call) -> Array:
    x, (height, width) = call.x[0], (int(one) for one in call.x[1])
    dy, y0, y1 = _interpolation(x.shape[1], height, call)
    dx, x0, x1 = _interpolation(x.shape[2], width, call)
    dy, dx, one = dy[:, None, None], dx[:, None], 1 << 10
    rows = [x[:, y0], x[:, y1]]
    total = (
        rows[0][:, :, x0] * (one - dy) * (one - dx)
        + rows[1][:, :, x0] * dy * (one - dx)
        + rows[0][:, :, x1] * (one - dy) * dx
        + rows[1][:, :, x1] * dy * dx
    )
    nudged = total + np.where(total > 0, 1 << 19, -(1 << 19))
    return np.asarray(np.where(nudged >= 0, nudged >> 20, -((-nudged) >> 20)))


def _nearest(call: _Call) -> Array:
    x = call.x[0]
    places = [np.arange(n) * size // n for n, size in zip(call.x[1].tolist(), x.shape[1:3], strict=True)]
    return np.asarray(x[:, places[0]][:, :, places[1]])


def _cut(call: _Call) -> Array:
    begin, size = call.x[1], call.x[2]
    if call.op.type == "SLICE":
        return np.asarray(call.x[0][tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))])
    return np.asarray(call.x[0][tuple(slice(b, e, s) for b, e, s in zip(begin, size, call.x[3], strict=True))])


def _pad(call: _Call) -> Array:
    fill = call.out.zero if len(call.x) < 3 else int(call.x[2].reshape(-1)[0])
    return np.pad(call.x[0], call.x[1].tolist(), constant_values=fill)


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64)))


def _gelu(x: Array, call: _Call) -> Array:
    if call.option("approximate"):
        inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)), np.float32)
    return np.asarray(0.5 * x * (1 + _erf(x * np.float32(0.7071067811865476))), np.float32)


_KERNELS: Mapping[str, Callable[[_Call], Array]] = MappingProxyType(
    {
        "ABS": _abs,
        "ADD": _sum(1),
        "AVERAGE_POOL_2D": _average,
        "BATCH_MATMUL": _batch_matmul,
        "CONCATENATION": lambda call: np.concatenate(list(call.x), call.option("axis")),
        "CONV_2D": _conv,
        "DEPTHWISE_CONV_2D": _depthwise,
        "EXP": _table(lambda x, _: np.exp(x)),
        "FULLY_CONNECTED": _fully_connected,
        "GATHER": lambda call: np.take(call.x[0], call.x[1], call.option("axis")),
        "GELU": _table(_gelu),
        "HARD_SWISH": _hard_swish,
        "LEAKY_RELU": _leaky,
        "LOGISTIC": _curve(fx.logistic, 8, -128),
        "MAXIMUM": lambda call: np.maximum(*call.x),
        "MAX_POOL_2D": _max_pool,
        "MEAN": _mean,
        "MINIMUM": lambda call: np.minimum(*call.x),
        "MUL": _mul,
        "PAD": _pad,
        "PADV2": _pad,
        "PRELU": _prelu,
        "QUANTIZE": _requantize,
        "REDUCE_MAX": lambda call: call.x[0].max(tuple(call.x[1].tolist())),
        "RELU": _relu(0.0, np.inf),
        "RELU6": _relu(0.0, 6.0),
        "RELU_N1_TO_1": _relu(-1.0, 1.0),
        "RESHAPE": lambda call: call.x[0].reshape(call.shape),
        "RESIZE_BILINEAR": _bilinear,
        "RESIZE_NEAREST_NEIGHBOR": _nearest,
        "RSQRT": _interpolated(_inverse_root),
        "SLICE": _cut,
        "SOFTMAX": _softmax,
        "STRIDED_SLICE": _cut,
        "SUB": _sum(-1),
        "TANH": _curve(fx.tanh, 7, 0),
        "TILE": lambda call: np.tile(call.x[0], call.x[1].tolist()),
        "TRANSPOSE": lambda call: call.x[0].transpose(call.x[1].tolist()),
        "TRANSPOSE_CONV": _transpose_conv,
    }
)
