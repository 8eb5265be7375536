"""Which tensor of one side is which of the other: by name, and by the values where names mislead."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

from qsdk.core.comparing.judge import Difference
from qsdk.core.comparing.place import Array, Pair, Place, common_names, plain
from qsdk.core.errors import ConfigError

Values = Mapping[str, Array]
_NEAREST = 5  # pairs of names in a message
_LOOKED_AT = 400  # names of each side, for the nearest pairs
_BETTER = 4.0  # times less power of the difference, before another place is taken for the one that is meant
_MUCH_BETTER = 10.0  # times less, before the number of an op is taken for wrong
_CLEAR = 1e-2  # of the signal's power: places that differ by less are what their names say


def match(left: Sequence[Place], right: Sequence[Place], names: Mapping[str, str] | None = None) -> list[Pair]:
    """Return the pairs of places with a common name, in the order of the left side; those in `names` go before all.

    Sites come first, then names of values, paths of modules, names without regard to their spelling, functional ops by
    their number, and outputs by their position. Of several places with one name (a convolution and the batch norm that
    was folded into it) the last one counts, since it holds what the layers together compute.
    """
    found: dict[str, Place] = {}
    taken: set[str] = set()
    for name, other in (names or {}).items():
        a, b = _named(left, name, "a"), _named(right, other, "b")
        found[a.name] = b
        taken.add(b.name)
    tiers: tuple[Callable[[Place], Collection[str]], ...] = (
        lambda place: {place.site} - {""},
        lambda place: place.values,
        lambda place: place.modules,
        lambda place: common_names(place.names),
        lambda place: place.ops,
        lambda place: () if place.output is None else (f"output {place.output}",),
    )
    for keys in tiers:
        _match_tier(left, right, keys, found, taken)
    if not found:
        raise ConfigError(_nothing_matched(left, right))
    return [(place, found[place.name]) for place in left if place.name in found]


def _match_tier(
    left: Sequence[Place],
    right: Sequence[Place],
    keys: Callable[[Place], Collection[str]],
    found: dict[str, Place],
    taken: set[str],
) -> None:
    """Pair the places that share a key, from the end of both sides."""
    by_key: dict[str, list[Place]] = {}
    for place in right:
        for key in keys(place):
            by_key.setdefault(key, []).append(place)
    order = {place.name: index for index, place in enumerate(right)}
    for place in reversed(left):
        if place.name in found:
            continue
        candidates = [other for key in keys(place) for other in by_key.get(key, ()) if other.name not in taken]
        if candidates:
            found[place.name] = max(candidates, key=lambda other: order[other.name])
            taken.add(found[place.name].name)


def _named(places: Sequence[Place], name: str, side: str) -> Place:
    found = [place for place in places if name in place.names]
    if not found:
        known = [known for place in places for known in place.names]
        near = get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
        raise ConfigError(f"names= has {name!r}, which side {side} does not compute; the nearest are {', '.join(near)}")
    return found[-1]


def _nothing_matched(left: Sequence[Place], right: Sequence[Place]) -> str:
    if not left or not right:
        return f"side {'a' if not left else 'b'} computes no float tensor, so there is nothing to compare"
    nearest = _nearest(left[:_LOOKED_AT], right[:_LOOKED_AT])
    shown = "; ".join(f"{a!r} and {b!r}" for a, b in nearest)
    return (
        f"no tensor of side a ({len(left)}) has the name of one of side b ({len(right)}); the nearest are {shown}; say "
        "which belong together: names={'name on side a': 'name on side b'}"
    )


def _nearest(left: Iterable[Place], right: Sequence[Place]) -> list[tuple[str, str]]:
    by_plain = {plain(name): name for place in right for name in place.names}
    scored = []
    for place in left:
        for name in place.names:
            close = get_close_matches(plain(name), by_plain, n=1, cutoff=0.0)
            if close:
                ratio = SequenceMatcher(None, plain(name), close[0]).ratio()
                scored.append((ratio, name, by_plain[close[0]]))
    scored.sort(key=lambda item: -item[0])
    return [(name, other) for _, name, other in scored[:_NEAREST]]


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
