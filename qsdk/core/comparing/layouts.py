"""Layouts: how the tensor of one side lies in memory where the other side has it in another order of axes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qsdk.core.comparing.place import Array

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

    Known are channels last against channels first, axes of one element that are missing or added, and files without a
    shape. Where several fit, the usual one is taken unless another leaves a hundredth of its difference.

    Args:
        reference: values of one side.
        other: of the other side.
        sides: the names of both, for the report.
        flat: True where the other values have no shape of their own.
        usual: the `moved` of other tensors of these sides.
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
