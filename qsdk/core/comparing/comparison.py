"""Compare two sides batch by batch, and name the first place in the network where they differ."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qsdk.core.comparing.folder import DumpedFolder
from qsdk.core.comparing.judge import PairOfPlaces, find_layout
from qsdk.core.comparing.matching import by_values, match
from qsdk.core.comparing.place import Array, Pair, Place, Side, rounding_noise
from qsdk.core.errors import ConfigError
from qsdk.core.report import Report

Values = Mapping[str, Array]


class Comparison:
    """Two sides, the pairs of their places, and what differs so far.

    Either side may be a folder of dumped tensors. Where a side can be taught, every batch runs twice: once by itself,
    and once with the values of the other side in front of each place, so that each difference is that of its own ops.
    """

    def __init__(self, left: Side | DumpedFolder, right: Side | DumpedFolder, names: Mapping[str, str] | None) -> None:
        self._sides, self._names = (left, right), names
        self._matched: list[Pair] = []
        self._pairs: list[PairOfPlaces] = []
        self._taught = _side_to_teach(left, right)

    def add(self, batch: Any, where: str) -> None:
        """Run both sides on a batch (None where both are folders) and add what differs."""
        ran = [None if isinstance(side, DumpedFolder) else side.values(batch, where) for side in self._sides]
        first = not self._matched
        if first:
            self._matched = self._match()
        values = self._with_dumped(ran)
        if first:
            if None not in ran and not self._names:
                self._matched = by_values(self._matched, self._places, values)
            self._pairs = [self._described(pair, values, None) for pair in self._matched]
            usual = next((pair.layout.moved for pair in self._pairs if pair.layout and pair.layout.moved), None)
            if usual is not None:  # decides where the values do not, because they differ otherwise too
                self._pairs = [self._described(pair, values, usual) for pair in self._matched]
            _fill_segments(self._pairs, self._places, values)
        own = self._own(batch, where, values)
        for pair, alone in zip(self._pairs, own, strict=True):
            if pair.layout is not None:
                pair.add(*pair.in_same_axes(*_floats(pair.pair, values)), alone)

    def report(self, tolerance: float | None) -> Report:
        """Return the rows in network order, and the first place that is off."""
        kept = [pair for pair in self._pairs if not (pair.pair[0].given and pair.pair[1].given)]
        known = [pair.grids_differ for pair in kept if pair.grids_differ is not None]
        same_grids = sum(known) < len(known) / 2  # else the sides were calibrated apart
        reasons = [pair.reason(tolerance, same_grids=same_grids) for pair in kept]
        first = next((index for index, reason in enumerate(reasons) if reason), None)
        matched = [{pair[side].name for pair in self._matched} for side in (0, 1)]
        left, right = (
            [place.name for place in places if place.name not in names and not place.given]
            for places, names in zip(self._places, matched, strict=True)
        )
        summary: dict[str, Any] = {
            "first_off": None if first is None else kept[first].pair[0].name,
            "why": None if first is None else reasons[first],
            "matched": len(kept),
            "unmatched_a": left,
            "unmatched_b": right,
            "sqnr_db": self._outputs(),
        }
        return Report(
            "Comparison of a with b", [pair.row(why) for pair, why in zip(kept, reasons, strict=True)], summary
        )

    @property
    def _places(self) -> tuple[Sequence[Place], Sequence[Place]]:
        return self._sides[0].places, self._sides[1].places

    def _outputs(self) -> float | None:
        """Return the ratio at the worst float output of the model, None where none is matched."""
        pairs = [pair for pair in self._pairs if pair.layout is not None and not pair.counts]
        ends = [pair.whole for pair in pairs if any(place.output is not None for place in pair.pair)]
        return min((end.decibels() for end in ends), default=None)

    def _match(self) -> list[Pair]:
        """Return the pairs by name, in network order, that can be compared."""
        left, right = self._places
        found = match(left, right, self._names)
        if isinstance(self._sides[0], DumpedFolder):  # which knows no order
            order = {place.name: index for index, place in enumerate(right)}
            found = sorted(found, key=lambda pair: order[pair[1].name])
        found = [pair for pair in found if _comparable(*pair)]
        if not found:
            raise ConfigError(
                "the tensors with common names are codes of grids that neither side knows; compare with the Q/DQ file "
                "or its sim"
            )
        return found

    def _with_dumped(self, ran: Sequence[Values | None]) -> tuple[Values, Values]:
        """Return the values of both sides, those of folders as they belong to the batch."""
        (left, right), (a, b) = self._sides, ran
        if isinstance(left, DumpedFolder):
            if b is None:
                a = {pair[0].name: left.whole(pair[0].name) for pair in self._matched}
            else:
                a = {one.name: left.take(one.name, b[other.name], other.encoding) for one, other in self._matched}
        assert a is not None
        if isinstance(right, DumpedFolder):
            b = {other.name: right.take(other.name, a[one.name], one.encoding) for one, other in self._matched}
        assert b is not None
        return a, b

    def _described(self, pair: Pair, values: tuple[Values, Values], usual: tuple[int, int] | None) -> PairOfPlaces:
        found = _floats(pair, values)
        reference = 1 if self._is_raw(0, pair) else 0
        flat = self._is_raw(1 - reference, pair)
        sides = ("b", "a") if reference else ("a", "b")
        layout = find_layout(found[reference], found[1 - reference], sides, flat=flat, usual=usual)
        raw = [side[place.name] for side, place in zip(values, pair, strict=True)]
        counts = all(value.dtype.kind in "iub" and not place.codes for value, place in zip(raw, pair, strict=True))
        return PairOfPlaces(pair, reference, layout, (found[0].shape, found[1].shape), counts=counts)

    def _is_raw(self, side: int, pair: Pair) -> bool:
        model = self._sides[side]
        return isinstance(model, DumpedFolder) and model.is_raw(pair[side].name)

    def _own(self, batch: Any, where: str, values: tuple[Values, Values]) -> list[tuple[Array, Array] | None]:
        """Return for each pair both sides' values where each op has the same in front; None if no side is taught."""
        if self._taught is None:
            return [None] * len(self._pairs)
        side, model = self._taught
        given = {
            pair.pair[side].name: pair.in_axes_of(
                side, _floats(pair.pair, values)[1 - side], values[side][pair.pair[side].name].shape
            )
            for pair in self._pairs
            if pair.layout is not None
        }
        got = model.taught(batch, where, given)
        both = (got, values[1]) if side == 0 else (values[0], got)
        return [None if p.layout is None else p.in_same_axes(*_floats(p.pair, both)) for p in self._pairs]


def _side_to_teach(left: Side | DumpedFolder, right: Side | DumpedFolder) -> tuple[int, Side] | None:
    """Return the side that is to run on the other's values: b if it can, else a, else None."""
    for side, model in ((1, right), (0, left)):
        if not isinstance(model, DumpedFolder) and model.teachable:
            return side, model
    return None


def _comparable(a: Place, b: Place) -> bool:
    """Return whether codes on one side have a grid on the other; those of two integer models compare as they are."""
    return a.codes == b.codes or a.encoding is not None or b.encoding is not None


def _floats(pair: Pair, values: tuple[Values, Values]) -> tuple[Array, Array]:
    """Return the values at a pair in float32: codes by the grid of the other side."""
    (left, right), (a, b) = pair, (values[0][pair[0].name], values[1][pair[1].name])
    if left.codes and right.encoding is not None:
        a = right.encoding.dequantize(a)
    if right.codes and left.encoding is not None:
        b = left.encoding.dequantize(b)
    return a.astype(np.float32), b.astype(np.float32)


def _fill_segments(
    pairs: Sequence[PairOfPlaces], sides: tuple[Sequence[Place], Sequence[Place]], values: tuple[Values, Values]
) -> None:
    """Fill in the rounding that is to be expected at each pair."""
    left, right = (
        _segments(places, {pair.pair[side].name for pair in pairs}, values[side]) for side, places in enumerate(sides)
    )
    for pair in pairs:
        (noise, between), (other, others) = left[pair.pair[0].name], right[pair.pair[1].name]
        pair.segment, pair.between = (noise, other), max(between, others)


def _segments(places: Sequence[Place], matched: Collection[str], values: Values) -> dict[str, tuple[float, int]]:
    """Return for each matched place the rounding since the matched one before, and the unmatched quantized places.

    What unmatched places before that round may arrive by way of a shortcut: the largest of that counts too.
    """
    found: dict[str, tuple[float, int]] = {}
    noise, between, carried = 0.0, 0, 0.0
    for place in places:
        own = 0.0
        if place.encoding is not None and place.name in values:
            own = rounding_noise(place.encoding, values[place.name])
        noise += place.weight_noise + own
        if place.name in matched:
            found[place.name] = noise + carried, between or int(carried > 0)
            noise, between = 0.0, 0
        elif place.encoding is not None:
            between, carried = between + 1, max(carried, own)
    return found
