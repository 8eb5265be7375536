"""LayerNormalization and RMSNormalization in 16 bits, by making the length of a row 1 again and again.

The result is `d / |d| * sqrt(n) * gain + bias`, where d has the n differences to the mean, and the root of
`n * epsilon` as one value more. A BATCH_MATMUL of a row with itself adds the squares exactly and rounds once, RSQRT
has the inverse of the root, and the product has the length 1. Where the sum is below `_KNEE` of 32767 steps, RSQRT
gives its largest number: such a row grows by the most that a round can give, and the next round goes on. So each round
makes the range of lengths smaller, its own errors do not matter, and the last one meets sums that have many steps.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.litert.program import Grid
from onnx_backend.litert.writer import NONE, Codes, Pending, Refused, Shape, Stored, Value, Writer

_TOP = (1 << 15) - 1
_KNEE = 128  # LiteRT's RSQRT of 16 bits is a table with a line every 128 steps
_LEAST_LAST = 512  # steps of a sum in the last round: there the lines are within 0.5 % of the root
_ROOM = 1.1  # what a sum of squares can be over 1: the lines are up to 4.5 % above the root
_PER_STEP = 128  # steps of 16 bits in one of 8 bits
_WIDEST = 256  # steps of 8 bits between two values, and what a mean is off


def _fine(largest: float) -> Grid:
    """Return the grid of 16 bits whose last code is this number."""
    return Grid.of("int16", largest / _TOP, 0)


def layer_norm(w: Writer, node: NodeProto, attrs: Mapping[str, Any]) -> Value:
    """Write LayerNormalization, or RMSNormalization, over the last axes."""
    value = w.codes(node.input[0])
    rank = len(value.shape)
    axis = int(attrs.get("axis", -1)) % rank
    if w.grid(value).dtype != "int8":
        raise Refused(f"{node.op_type} of 16 bits, in which LiteRT rounds too coarsely", "give what it reads 8 bits")
    if sum(bool(name) for name in node.output) > 1:
        raise Refused("its mean or deviation is an output", "leave them out")
    value = w.at(value, [*(one for one in value.perm if one < axis), *range(axis, rank)])
    sizes, n = w.program.tensors[value.tensor].shape, int(np.prod(value.shape[axis:]))
    rows = (int(np.prod(value.shape[:axis])), 1, n)
    gain, bias = (w.stored(name) if name else None for name in (*node.input[1:3], "")[:2])
    centred, epsilon = node.op_type == "LayerNormalization", float(attrs.get("epsilon", 1e-5))

    def written(out: Grid, name: str, _: int) -> Codes:
        if out.dtype != "int8":
            raise Refused(f"it reads int8 and makes {out.dtype}", "give both the same number of bits")
        given = w.reshape(value.tensor, rows, f"{name}/rows")
        made = _scaled(w, _unit(w, given, rows, centred, epsilon, name), gain, bias, rows, out, name)
        made = w.emit("QUANTIZE", [made], rows, out, name if rows == sizes else f"{name}/codes")
        return Codes(w.reshape(made, sizes, name), value.shape, value.perm)

    return Pending(value.shape, written)


def _unit(w: Writer, x: int, rows: Shape, centred: bool, epsilon: float, name: str) -> int:
    """Write the rows, less their means, with the length 1."""
    known = w.program.tensors[x].grid
    assert known is not None
    step, n, one = known.step, rows[-1], (rows[0], 1, 1)
    fine, root = Grid.of("int16", step / _PER_STEP, 0), math.sqrt(n * epsilon)
    row = w.emit("QUANTIZE", [x], rows, fine, f"{name}/16_bits")
    spread = _fine(max(_WIDEST * step, root))
    if centred:
        mean = w.emit("MEAN", [row, w.ints([2], f"{name}/axis")], one, fine, f"{name}/mean", keepDims=True)
        row = w.emit("SUB", [row, mean], rows, spread, f"{name}/centred", fusedActivationFunction=NONE)
    grid, longer = (spread if centred else fine), rows
    with_epsilon = root >= grid.step / 2
    if with_epsilon:
        row = w.emit("QUANTIZE", [row], rows, spread, f"{name}/wide") if not grid.same(spread) else row
        added = w.store(np.full(one, spread.code(root)), spread, f"{name}/epsilon")
        longer, options = (rows[0], 1, n + 1), {"axis": 2, "fusedActivationFunction": NONE}
        row = w.emit("CONCATENATION", [row, added], longer, spread, f"{name}/with_epsilon", **options)
    # a row with one value a step away from all others has the least sum that is not 0
    least = max(float((1 - 1 / n) * step**2), n * epsilon if with_epsilon else 0.0)
    largest, at = n * (_WIDEST * step / (2 if centred else 1)) ** 2 + n * epsilon, 0
    done = False
    while not done:
        done, own = least / largest * _TOP >= _LEAST_LAST, f"{name}/round{at}"
        sums = _fine(largest)
        most = 1 / math.sqrt(_KNEE * sums.step)
        squares = w.emit("BATCH_MATMUL", [row, row], one, sums, f"{own}/squares", adjX=False, adjY=True)
        inverse = w.emit("RSQRT", [squares], one, _fine(most), f"{own}/inverse_root")
        unit = _fine(1.0 if done else math.sqrt(_ROOM))
        row = w.emit("MUL", [row, inverse], longer, unit, f"{own}/unit", fusedActivationFunction=NONE)
        least, largest, at = min(float(least * most**2), 1 / _ROOM), _ROOM, at + 1
    if longer == rows:
        return row
    ends = w.ints([0, 0, 0], f"{name}/begin"), w.ints(rows, f"{name}/size")
    return w.emit("SLICE", [row, *ends], rows, _fine(1.0), f"{name}/unit")


def _scaled(w: Writer, unit: int, gain: Stored | None, bias: Stored | None, rows: Shape, out: Grid, name: str) -> int:
    """Write rows of length 1 times the root of n, the gain and the bias, on a finer grid of the result."""
    n, fine = rows[-1], Grid.of("int16", out.step / _PER_STEP, 0)
    added = 0.0 if bias is None else float(np.abs(bias.floats()).max())
    product = _fine(_WIDEST * out.step + added) if added else fine
    factors = math.sqrt(n) * (1.0 if gain is None else gain.floats().reshape(-1))
    held = _parameter(w, np.asarray(factors), f"{name}/gain")
    made = w.emit("MUL", [unit, held], rows, product, f"{name}/scaled", fusedActivationFunction=NONE)
    if bias is not None and added:
        moved = _parameter(w, bias.floats().reshape(-1), f"{name}/bias")
        made = w.emit("ADD", [made, moved], rows, fine, f"{name}/moved", fusedActivationFunction=NONE)
    return made


def _parameter(w: Writer, values: Any, name: str) -> int:
    """Store numbers with 16 bits."""
    least = float(np.finfo(np.float32).tiny) * _TOP
    grid = _fine(max(float(np.abs(values).max()), least))
    return w.store(np.rint(values / grid.step).reshape(1, 1, -1), grid, name)
