"""A table of 16-bit codes as straight lines: a few hundred segments instead of 65,536 entries, at most one code off.

The codes of one high byte are a *cell*, cut into 1, 2, 4, ... or 256 equal segments, as few as keep every code within
one step of the table. A kink or a steep end costs only its own cell, and a cell of 256 segments is the table itself.
All arithmetic fits in 32 bits:

    cell, rest = code >> 8, code & 255
    segment, within = first[cell] + (rest >> bits[cell]), rest % 2 ** bits[cell]
    result = clamp(base[segment] + slope[segment] * within, 0, top << FRACTION) >> FRACTION
"""

from dataclasses import dataclass

import numpy as np

from onnx_backend.integer.ir.values import Array

#: log2 of the codes in a cell.
CELL = 8
#: Bits of `base` and `slope` below one code. A result of 16 bits and these leave one bit of 32 to spare.
FRACTION = 14
_MOST = 1  # code that a result may be off by


@dataclass(frozen=True)
class Segments:
    """The straight lines, all int64 arrays, and their deviation from the table.

    Attributes:
        bits: log2 of the codes in a segment, by cell.
        first: index of the first segment, by cell.
        base: result at the first code of a segment, in units of 2**-FRACTION, half a code included.
        slope: the increment per code.
        top: largest result.
        deviation: largest difference from the table, in codes.
        differing: number of codes whose result differs from the table.
    """

    bits: Array
    first: Array
    base: Array
    slope: Array
    top: int
    deviation: int
    differing: int

    @property
    def bytes(self) -> int:
        """Return their size in memory: bytes for `bits`, 16 bits for `first`, 32 for `base` and `slope`."""
        return 3 * self.bits.size + 8 * self.base.size


def segments(table: Array, top: int) -> Segments:
    """Return the fewest segments whose results are at most one code off a table with results in 0..top."""
    cells = table.reshape(-1, 1 << CELL)
    bits = np.full(len(cells), -1)
    found: dict[int, tuple[Array, Array]] = {}
    deviation = differing = 0
    for width in range(CELL, -1, -1):
        open_cells = np.flatnonzero(bits < 0)
        wanted = cells[open_cells].reshape(len(open_cells), 1 << (CELL - width), 1 << width)
        base, slope = _lines(wanted)
        within = np.arange(1 << width)
        # without the clamp, so that int32 holds every line
        line = (base[..., None] + slope[..., None] * within) >> FRACTION
        done = (np.abs(line - wanted) <= _MOST).all((1, 2))
        off = np.abs(_results(base[done, :, None], slope[done, :, None], within, top) - wanted[done])
        deviation = max(deviation, int(off.max(initial=0)))
        differing += int(np.count_nonzero(off))
        bits[open_cells[done]] = width
        found.update(zip(open_cells[done].tolist(), zip(base[done], slope[done], strict=True), strict=True))
    base, slope = (np.concatenate([found[cell][i] for cell in range(len(cells))]) for i in (0, 1))
    counts = 1 << (CELL - bits)
    return Segments(bits, np.cumsum(counts) - counts, base, slope, top, deviation, differing)


def evaluate(lines: Segments, codes: Array) -> Array:
    """Return the results for codes."""
    cell, rest = codes >> CELL, codes & ((1 << CELL) - 1)
    bits = lines.bits[cell]
    segment = lines.first[cell] + (rest >> bits)
    return _results(lines.base[segment], lines.slope[segment], rest & ((1 << bits) - 1), lines.top)


def _results(base: Array, slope: Array, within: Array, top: int) -> Array:
    return np.asarray((base + slope * within).clip(0, top << FRACTION) >> FRACTION)


def _lines(wanted: Array) -> tuple[Array, Array]:
    """Return base and slope of the lines through the last axis: least squares, then centred between the extremes.

    All in integers, so that every machine finds the same lines.
    """
    count = wanted.shape[-1]
    within = np.arange(count)
    centred = 2 * within - (count - 1)  # twice the distance from the middle
    spread = max(int((centred**2).sum()), 1)
    slope = (wanted * centred).sum(-1) * (2 << FRACTION) // spread
    off = (wanted << FRACTION) - slope[..., None] * within
    return (off.max(-1) + off.min(-1) + (1 << FRACTION)) >> 1, slope
