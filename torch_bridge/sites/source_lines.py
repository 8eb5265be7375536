"""Lines of the user's code, which tell the path that the example took from one that leaves a call out.

Calls of one op or module are numbered in their order, so without this check, leaving one call out would give the others
the encodings of their predecessors.
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
class RecordedCall:
    """A call of a module, or of an op, in a forward pass.

    Attributes:
        name: numbered; the owner of the call's sites.
        parent: name of the module call in which it happens.
        op: whether it is an op.
        source_line: line of the user's code.
    """

    name: str
    parent: str
    op: bool
    source_line: str


def source_line() -> str:
    """Return the innermost line of code that is neither torch's nor ours, counted from the start of its function."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname}, line {frame.f_lineno - frame.f_code.co_firstlineno + 1}"


def lines_of_ambiguous_calls(places: Mapping[str, str]) -> dict[str, str]:
    """Return the line of each call that only its line identifies.

    Those are the calls of an op or module that one call of a module makes from several lines.
    """
    groups: dict[str, dict[str, str]] = {}
    for call, where in places.items():
        groups.setdefault(re.sub(r"(@\d+|\.\d+)$", "", call), {})[call] = where
    ambiguous = [group for group in groups.values() if len(set(group.values())) > 1]
    return {call: where for group in ambiguous for call, where in group.items()}


def require_same_line(call: str, known: str, *, recomputed: bool) -> None:
    """Refuse a call that is made from another line than on the example.

    Raises:
        ModelError: the lines differ.
    """
    if (now := source_line()) != known and not recomputed:  # a backward pass has no line of the user's code
        raise ModelError(
            f"{call} was called at {known} with the example, and is called at {now} now: the model takes another path, "
            "which would take its encodings for those of another call; call qsdk.quantize with an example that takes "
            "the same path, or give the op a module of its own in each branch"
        )
