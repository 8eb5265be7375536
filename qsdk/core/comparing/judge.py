"""One pair of places: how their values lie beside each other, how they differ, and if quantization explains that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qsdk.core.comparing.place import Array, Pair
from qsdk.core.comparing.tally import decibels_of
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding

#: of the largest value: what float32 kernels of different runtimes leave between the same ops
FLOAT_TOLERANCE = 1e-4
#: times the expected power of rounding, beyond which something else differs
EXCESS = 30.0
#: of the signal's power: a range that clips more than this is no usual choice
CLIPPING = 1e-2
#: of the signal's power: what quantized tensors between two matched ones may clip, which cannot be told from rounding
_CLIPPED_BETWEEN = 1e-3
_UNITS = 8.0  # in the last place of a float type, that kernels which round at other places may be apart
_EXACT = 1e-5  # of the largest value: a difference in steps that is no more than this is float32's own
_ON_GRID = 1e-2  # of a step
_MUCH_BETTER = 100.0  # times less difference, before a layout other than the plain one is believed
_NAMES = {3: "NLC", 4: "NHWC", 5: "NDHWC"}


@dataclass(frozen=True)
class Layout:
    """How the values of one side are brought to the axes of the other, the reference.

    Attributes:
        name: for the report; "" where both are alike.
        moved: (from, to): the axis of the reference that lies elsewhere on the other side; None if none does.
    """

    name: str = ""
    moved: tuple[int, int] | None = None

    def aligned(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Return values of the other side with the axes of the reference, whose shape is given."""
        if self.moved is None:
            return values.reshape(shape)
        source, target = self.moved
        there = np.moveaxis(np.empty(shape, np.bool_), source, target).shape
        return np.moveaxis(values.reshape(there), target, source)

    def restored(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Return values of the reference with the axes of the other side, whose shape is given."""
        moved = values if self.moved is None else np.moveaxis(values, *self.moved)
        return np.ascontiguousarray(moved).reshape(shape)


def find_layout(
    reference: Array,
    other: Array,
    sides: tuple[str, str],
    *,
    flat: bool = False,
    usual: tuple[int, int] | None = None,
) -> Layout | None:
    """Return how values lie beside those of the reference, or None where their shapes have nothing in common.

    Known are channels last against channels first, axes of one element that are missing or added, and `flat` files
    without a shape. Where several fit, the usual one of these sides is taken unless another leaves a hundredth of its
    difference.
    """
    if reference.size != other.size:
        return None
    fitting = list(_fitting(reference.shape, other.shape, sides, flat=flat))
    fitting.sort(key=lambda layout: layout.moved != usual)
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    differences = [_difference(reference, layout.aligned(other, reference.shape)) for layout in fitting]
    best = int(np.argmin(differences))
    return fitting[best] if differences[best] * _MUCH_BETTER < differences[0] else fitting[0]


def _fitting(shape: tuple[int, ...], other: tuple[int, ...], sides: tuple[str, str], *, flat: bool) -> Iterator[Layout]:
    """Yield the layouts whose shapes fit, the plain one first."""
    wanted = _without_ones(other)
    ones = f"axes of one: {_text(shape)} on side {sides[0]}, {_text(other)} on side {sides[1]}"
    if flat or _without_ones(shape) == wanted:
        yield Layout("" if flat or shape == other else ones)
    if len(shape) not in _NAMES:
        return
    last = len(shape) - 1
    for source, target, side in ((1, last, sides[1]), (last, 1, sides[0])):
        moved = list(shape)
        moved.insert(target, moved.pop(source))
        if flat or _without_ones(tuple(moved)) == wanted:
            name = f"{_NAMES[len(shape)]} on side {side}"
            yield Layout(name if flat or tuple(moved) == other else f"{name}, {ones}", (source, target))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _difference(left: Array, right: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.sum((left.astype(np.float64) - right.astype(np.float64)) ** 2))
    return found if np.isfinite(found) else np.inf


@dataclass
class Difference:
    """The power of a signal and of the difference from it, and the largest single difference."""

    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0
    steps: float = 0.0
    clipped: float = 0.0  # the part of the noise where the side that is float lies outside the other one's range
    invented: bool = False  # NaN or infinite on one side alone

    def add(self, left: Array, right: Array, grids: Sequence[Encoding | None] = (None, None)) -> None:
        """Add values of both sides, in the same axes, with their grids."""
        exact, other = left.astype(np.float64), right.astype(np.float64)
        finite = np.isfinite(exact) & np.isfinite(other)
        self.invented |= bool(np.any(~finite & (np.isfinite(exact) | np.isfinite(other))))
        off = np.where(finite, exact - np.where(finite, other, 0), 0.0)
        self.signal += float(np.sum(np.where(finite, exact, 0.0) ** 2))
        self.noise += float(np.sum(off**2))
        self.largest = max(self.largest, float(np.abs(off).max(initial=0.0)))
        known = finer(grids)
        if known is None or not known.dtype.is_integer:
            return
        facts = (exact.shape, known.axis, known.block_size)
        self.steps = max(self.steps, float(np.abs(off / affine.align(known.scale, *facts)).max(initial=0.0)))
        if None in grids:
            unbound = exact if grids[0] is None else other
            low, high = affine.align(known.low, *facts), affine.align(known.high, *facts)
            self.clipped += float(np.sum(off[(unbound < low) | (unbound > high)] ** 2))

    def decibels(self) -> float:
        """Return the ratio of both powers in dB; infinite where nothing differs."""
        return float("-inf") if self.invented and self.noise == 0 else decibels_of(self.signal, self.noise)


@dataclass
class PairOfPlaces:
    """Two places that hold the same tensor, what differs between them, and what may.

    Attributes:
        pair: on side a and on side b.
        reference: the side whose axes both are compared in: 0 for a, 1 for b.
        layout: of the other side; None where the shapes do not fit.
        shapes: of both, for the report.
        whole: the difference when both sides run by themselves.
        own: the difference that the ops since the places in front cause; as `whole`, if no side can be taught.
        peak: the largest value on side a.
        segment: the expected noise of the rounding since the places in front, on side a and on side b.
        between: quantized places without a partner since the ones in front; 1 if there are only earlier ones, whose
            rounding may come by way of a shortcut.
        on_grid: whether the values of the side without an encoding lie on the other one's grid.
        counts: True for integers that are no codes, such as ids: their power says nothing.
    """

    pair: Pair
    reference: int
    layout: Layout | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    whole: Difference = field(default_factory=Difference)
    own: Difference = field(default_factory=Difference)
    peak: float = 0.0
    segment: tuple[float, float] = (0.0, 0.0)
    between: int = 0
    on_grid: bool = True
    counts: bool = False

    @property
    def encoding(self) -> Encoding | None:
        """Return the grid in whose steps the difference is counted: the finer one of both sides'."""
        return finer([place.encoding for place in self.pair])

    def in_same_axes(self, left: Array, right: Array) -> tuple[Array, Array]:
        """Return values of side a and of side b in the axes of the reference."""
        assert self.layout is not None
        if self.reference == 0:
            return left, self.layout.aligned(right, left.shape)
        return self.layout.aligned(left, right.shape), right

    def in_axes_of(self, side: int, values: Array, shape: tuple[int, ...]) -> Array:
        """Return values of the side opposite in the axes of one side, whose shape is given."""
        assert self.layout is not None
        return self.layout.aligned(values, shape) if side == self.reference else self.layout.restored(values, shape)

    def add(self, left: Array, right: Array, own: tuple[Array, Array] | None) -> None:
        """Add the values of a batch, and `own`: both sides' where each is computed from the same values in front."""
        self.peak = max(self.peak, float(np.abs(left[np.isfinite(left)]).max(initial=0.0)))
        grids = [place.encoding for place in self.pair]
        self.whole.add(left, right, grids)
        self.own.add(*(own or (left, right)), grids)
        known = self.encoding
        if known is not None and known.dtype.is_integer and self.on_grid:
            other = right if self.pair[0].encoding is not None else left
            step = affine.align(known.scale, other.shape, known.axis, known.block_size)
            codes = other.astype(np.float64) / step
            self.on_grid = bool(np.abs(codes - np.rint(codes)).max(initial=0.0) < _ON_GRID)

    @property
    def grids_differ(self) -> bool | None:
        """Return whether the grids of both sides differ, None where not both are quantized."""
        left, right = (place.encoding for place in self.pair)
        return None if left is None or right is None else left != right

    def reason(self, tolerance: float | None, *, same_grids: bool = False) -> str:
        """Return why the places are off, in words; "" where they agree as far as is to be expected.

        `tolerance` is the largest difference that counts as none, relative to the largest value, in place of the
        criteria of the module. With `same_grids` a grid of its own is off as such: the sides have nearly all grids in
        common.
        """
        if self.layout is None:
            return f"the shapes differ: {self.shapes[0]} against {self.shapes[1]}"
        if self.own.invented:
            return "one side is NaN or infinite where the other is not"
        relative = self.own.largest / self.peak if self.peak else float("inf") if self.own.largest else 0.0
        if tolerance is not None:
            return f"{relative:.3g} of the largest value" if relative > tolerance else ""
        grids, units = [place.encoding for place in self.pair], _UNITS * max(place.epsilon for place in self.pair)
        integers = self.encoding is not None and self.encoding.dtype.is_integer
        if same_grids and self.grids_differ:
            return f"its grid differs: {_grid(grids[0])} against {_grid(grids[1])}"
        if integers and (None not in grids or self.on_grid):
            limit = 1 + self.between
            slack = _ON_GRID + units * self.own.steps / max(relative, _EXACT)  # units in the last place, in steps
            off = self.own.steps > limit + slack and relative > _EXACT
            return f"{self.own.steps:.3g} steps of the grid, where {limit} is to be expected" if off else ""
        if (self.segment[0] > 0) == (self.segment[1] > 0):
            return f"{relative:.3g} of the largest value" if relative > max(FLOAT_TOLERANCE, units) else ""
        return self._beyond_rounding()

    def _beyond_rounding(self) -> str:
        """Return what rounding and a usual range do not explain, where one side is quantized and the other float."""
        if not self.own.signal:
            return "side b is not 0 where side a is" if self.own.noise else ""
        expected = max(self.segment)
        limit = max(EXCESS * expected, _CLIPPED_BETWEEN if self.between else 0.0)
        rest, clipped = (self.own.noise - self.own.clipped) / self.own.signal, self.own.clipped / self.own.signal
        if rest > limit:
            explained = f"the rounding of its grid and weights explains {decibels_of(1.0, expected):.3g} dB"
            return f"{decibels_of(1.0, rest):.3g} dB, where {explained}"
        return f"its range clips: {decibels_of(1.0, clipped):.3g} dB" if clipped > CLIPPING else ""

    def row(self, reason: str) -> dict[str, Any]:
        """Return the row of the report; the reason is that of `reason`."""
        left, right = self.pair
        known = self.layout is not None
        shapes = " against ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        integers = self.encoding is not None and self.encoding.dtype.is_integer
        return {
            "site": left.name,
            "other": right.name,
            "layout": self.layout.name if self.layout is not None else f"shapes differ: {shapes}",
            "max_difference": self.whole.largest if known else None,
            "sqnr_db": self.whole.decibels() if known else None,
            "max_lsb": self.whole.steps if known and integers else None,
            "own_sqnr_db": self.own.decibels() if known else None,
            "off": bool(reason),
        }


def finer(grids: Sequence[Encoding | None]) -> Encoding | None:
    """Return the grid with the smaller steps, None where there is none."""
    return min((grid for grid in grids if grid is not None), key=lambda grid: float(grid.scale.mean()), default=None)


def _grid(encoding: Encoding | None) -> str:
    assert encoding is not None
    scale, zero_point = encoding.scale.reshape(-1), encoding.zero_point.reshape(-1)
    more = "" if scale.size == 1 else f" (the first of {scale.size})"
    return f"{encoding.dtype} of scale {scale[0]:.6g} and zero point {zero_point[0]}{more}"
