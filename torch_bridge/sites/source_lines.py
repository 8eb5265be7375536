"""Places in the user's code: telling a path that leaves a call out from the one that the example took.

Calls of one op or module are numbered in their order, so that leaving one out would give the others the encodings of
their predecessors.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from qsdk.core.errors import ModelError

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Call:
    """A call of a module, or of an op, in a forward pass.

    Attributes:
        name: with its number; the owner of its sites.
        parent: name of the call of a module that it stands in.
        op: whether it is an op.
        place: line of the user's code.
    """

    name: str
    parent: str
    op: bool
    place: str


def place() -> str:
    """Name the innermost line of code that is neither torch's nor ours, counted from the start of its function."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname}, line {frame.f_lineno - frame.f_code.co_firstlineno + 1}"


def ambiguous(places: Mapping[str, str]) -> dict[str, str]:
    """The calls that only their place tells apart: of an op or module that one call of a module calls at several."""
    groups: dict[str, dict[str, str]] = {}
    for call, where in places.items():
        groups.setdefault(re.sub(r"(@\d+|\.\d+)$", "", call), {})[call] = where
    found = [group for group in groups.values() if len(set(group.values())) > 1]
    return {call: where for group in found for call, where in group.items()}


def require_place(call: str, known: str, *, recomputed: bool) -> None:
    """Refuse a call that is made at another place than with the example.

    Raises:
        ModelError: names the call and both places.
    """
    if (now := place()) != known and not recomputed:  # a backward pass knows no place
        raise ModelError(
            f"{call} was called at {known} with the example, and is called at {now} now: the model takes another path, "
            "which would take its encodings for those of another call; call qsdk.quantize with an example that takes "
            "the same path, or give the op a module of its own in each branch"
        )
