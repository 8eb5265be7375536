"""Which tensor of one side is which of the other, by name."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

from qsdk.core.comparing.names import common_names, plain
from qsdk.core.comparing.place import Place
from qsdk.core.errors import ConfigError

#: pair of places: of side a and of side b
Pair = tuple[Place, Place]
_NEAREST = 5  # pairs of names in a message
_LOOKED_AT = 400  # names of each side, for the nearest pairs


def match(left: Sequence[Place], right: Sequence[Place], names: Mapping[str, str] | None = None) -> list[Pair]:
    """Return the pairs of places with a common name, in the order of the left side.

    Sites come first, then names of values, paths of modules, names without regard to their spelling, functional ops by
    their number, and outputs by their position. Of several places with one name (a convolution and the batch norm that
    was folded into it) the last one counts, since it holds what the layers together compute.

    Args:
        left: places of side a, in order.
        right: places of side b, in order.
        names: name on side a -> name on side b, for pairs that go before all others.

    Raises:
        ConfigError: `names` holds a name that no place has, or nothing matches at all.
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
