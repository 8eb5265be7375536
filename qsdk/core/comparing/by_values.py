"""Names that mean another tensor than the other side's, found by the values."""

from collections.abc import Iterator, Mapping, Sequence

from qsdk.core.comparing.judge import Difference
from qsdk.core.comparing.matching import Pair
from qsdk.core.comparing.place import Array, Place

Values = Mapping[str, Array]
_BETTER = 4.0  # times less power of the difference, before another place is taken for the one that is meant
_MUCH_BETTER = 10.0  # times less, before the number of an op is taken for wrong
_CLEAR = 1e-2  # of the signal's power: places that differ by less are what their names say


def by_values(
    pairs: Sequence[Pair], sides: tuple[Sequence[Place], Sequence[Place]], values: tuple[Values, Values]
) -> list[Pair]:
    """Return the pairs, without those that the values show to be misnamed.

    A convolution whose batch norm was folded into it keeps its name, and gives what the batch norm gives: where a
    place without a partner, before the next one that has a partner, agrees far better, it is the partner. And
    functional ops are counted otherwise where an exporter merges some, and so are views in generated names: such a pair
    is dropped where the one behind it agrees far better.
    """
    taken = [{pair[side].name for pair in pairs} for side in (0, 1)]
    found: list[Pair] = []
    behind = float("inf")  # the noise of the pair behind
    for a, b in reversed(pairs):
        pair, noise = (a, b), _relative_noise((a, b), values)
        if noise is not None and noise > _CLEAR:
            others = [(other, b) for other in _unmatched_behind(a, sides[0], taken[0])]
            others += [(a, other) for other in _unmatched_behind(b, sides[1], taken[1])]
            measured = [(rest, other) for other in others if (rest := _relative_noise(other, values)) is not None]
            best = min(measured, key=lambda item: item[0], default=None)
            if best is not None and best[0] * _BETTER < noise:
                noise, pair = best
        if _is_guessed(pair) and (noise is None or (noise > _CLEAR and behind * _MUCH_BETTER < noise)):
            continue
        behind = behind if noise is None else noise
        found.append(pair)
    return found[::-1]


def _is_guessed(pair: Pair) -> bool:
    """Return True if only a number brought the places together: a functional op's, or that in a view's name."""
    a, b = pair
    if (a.view or b.view) and bool(a.site) != bool(b.site):
        return True
    return bool(set(a.ops) & set(b.ops)) and not (a.site and a.site == b.site) and not set(a.names) & set(b.names)


def _unmatched_behind(place: Place, places: Sequence[Place], taken: set[str]) -> Iterator[Place]:
    start = next(index for index, other in enumerate(places) if other.name == place.name)
    for other in places[start + 1 :]:
        if other.name in taken:
            return
        yield other


def _relative_noise(pair: Pair, values: tuple[Values, Values]) -> float | None:
    """Return the power of the difference relative to that of side a, None where the values do not compare."""
    a, b = values[0][pair[0].name], values[1][pair[1].name]
    if a.shape != b.shape or pair[0].codes or pair[1].codes:
        return None
    found = Difference()
    found.add(a, b)
    return found.noise / found.signal if found.signal and not found.invented else None
