"""Sites: the one name of a place, used in torch, ONNX, JSON and reports.

`owner:port`, for example `layer1.0.conv1:weight`, `layer1.0/add.0:output`, `x:input`. The owner is a module's
path, or `path/op.k` for the k-th call of a functional op in that module, or a model input's name; `@k` behind a
module's name marks its k-th further call by its parent (`block@1.relu`, `block@1/add.0`).
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def site_name(owner: str, port: str) -> str:
    """Join an owner and a port; the model itself is the owner `self`."""
    return f"{owner or 'self'}:{port}"


def owner_of(site: str) -> str:
    """Return the part of a site's name before its port."""
    return site.rpartition(":")[0]


def port_of(site: str) -> str:
    """Return the part of a site's name behind its owner: `weight`, `bias`, `output`, `input`, ..."""
    return site.rpartition(":")[2]


def without_calls(owner: str) -> str:
    """Return an owner without its call marks: the path of the module itself.

    Examples:
        >>> without_calls("block@1.relu@2"), without_calls("block@1/add.0")
        ('block.relu', 'block/add.0')
    """
    return re.sub(r"@\d+(?=[./]|$)", "", owner)


def matches(pattern: str, owner: str) -> bool:
    """Return whether a shell glob matches the whole owner path or any of its dotted suffixes.

    The name of a functional op also matches patterns for the module that calls it.

    Examples:
        >>> matches("bn*", "layer1.0.bn1"), matches("add.*", "layer1.0/add.0"), matches("layer1.0", "layer1.0/add.0")
        (True, True, True)
    """
    # a glob reads the brackets of a name as a character class, so the literal name is compared too
    return any(name == pattern or fnmatchcase(name, pattern) for name in names_of(owner))


def names_of(owner: str) -> tuple[str, ...]:
    """Return the names by which patterns match an owner: path and dotted suffixes, with and without call marks."""
    return tuple(dict.fromkeys((*_suffixes(without_calls(owner)), *_suffixes(owner))))


def _suffixes(owner: str) -> Iterable[str]:
    module, slash, op = owner.partition("/")
    parts = module.split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:]) + slash + op
        if op:
            yield ".".join(parts[start:])
    if op:
        yield op


def nearest_owners(pattern: str, owners: Iterable[str], count: int = 3) -> list[str]:
    """Return the owners whose names are most like a pattern that matched none."""
    known = list(dict.fromkeys(owners))
    by_suffix: dict[str, list[str]] = {}
    for owner in known:
        for suffix in _suffixes(owner):
            by_suffix.setdefault(suffix, []).append(owner)
    result = get_close_matches(pattern.strip("*?"), by_suffix, n=count, cutoff=0.5)
    return list(dict.fromkeys(owner for name in result for owner in by_suffix[name]))[:count]


def nearest_in_words(pattern: str, owners: Iterable[str], intro: str = "the nearest are") -> str:
    """Return a phrase that names the owners most like a pattern, or some of all owners where none is like it."""
    known = list(dict.fromkeys(owners))
    near = nearest_owners(pattern, known)
    if near:
        return f"{intro}: {', '.join(near)}"
    return f"none is like it; there are {len(known)}, such as {', '.join(known[:3])}"
