"""The calls of modules and ops that are running, their names in sites, and the lines of code that tell them apart."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from qsdk.core.errors import ModelError

Phase = Literal["float", "quantize", "visit", "mark"]
Visitor = Callable[[str, Tensor], Tensor]


def call_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return the arguments of a call, including tensors in `out=`: the tensors that the call may write over."""
    if not kwargs:
        return args
    out = kwargs.get("out")
    return *args, *kwargs.values(), *(out if isinstance(out, tuple | list) else ())


class NarrowParameters(Protocol):
    """The interface of what casts the parameters that a call reads."""

    def narrow(self, x: Tensor) -> Tensor:
        """Return a tensor in the type that the call computes in."""
        ...


@dataclass
class Frame:
    """One call of a wrapped module.

    Attributes:
        path: path of the module in the model, the same for every call.
        name: name of this call in sites: the path that the caller used, with `@1` from the second call on.
        leaf: whether the module is one op.
        foreign: whether this calls a foreign module: a leaf, inside of which modules are named as if its caller called.
        recording: whether gradients were recorded when the call began.
        hook: the saved-tensors hook that was active then (see `checkpointing.saved_tensors_hook`).
        training: whether the module was in train mode.
        counts: number of calls so far of each op in this frame.
        calls: number of calls so far of each module in the whole forward pass; all frames of the pass share it,
            because a module may call another one that lies deep inside a third.
        island: casts the parameters of the module while it computes in a narrow float type.
    """

    path: str
    name: str
    leaf: bool
    foreign: bool = False
    recording: bool = False
    hook: Any = None
    training: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    island: "NarrowParameters | None" = None

    def count_op(self, name: str) -> int:
        """Count a call of an op and return its number, from 0."""
        return _count(self.counts, name)

    def count_call(self, name: str) -> int:
        """Count a call of a module and return its number, from 0."""
        return _count(self.calls, name)

    def next_owner(self, name: str) -> str:
        """Count a call of an op in this frame and return the name of that call, the owner of its sites."""
        owner = f"{self.name}/{name}" if self.name else name
        return f"{owner}.{self.count_op(name)}"


def _count(counts: dict[str, int], name: str) -> int:
    number = counts.get(name, 0)
    counts[name] = number + 1
    return number


class CallNames(Protocol):
    """The interface of what names calls as a trace does."""

    def name(self, call: str, frame: Frame | None, *, op: bool) -> str:
        """Return the trace's name of a call that is numbered in the order of calls."""
        ...


class DataflowRecorder(Protocol):
    """The interface of what records the dataflow of a model while it runs."""

    def before_call(self, arguments: Any) -> None:
        """Record that a torch function is about to be called with these arguments."""

    def after_call(self, frame: Frame, name: str, arguments: Any, result: Any) -> None:
        """Record that a torch function was called in a frame and returned a result."""

    def after_write(self, site: str, x: Tensor) -> Tensor:
        """Record that an op wrote its result over its argument; return the tensor to go on with."""
        ...


def call_name(parent: Frame | None, paths: tuple[str, ...]) -> str:
    """Return the name of a call of a module: the path by which its caller reaches it.

    It is numbered from the second call on.
    """
    if parent is None:
        return paths[0]
    prefix = f"{parent.path}." if parent.path else ""
    if len(paths) == 1 and parent.name == parent.path and paths[0].startswith(prefix):
        return _with_number(parent, paths[0])  # the common case, kept short because it runs at every call
    inside = [path[len(prefix) :] for path in paths if path.startswith(prefix)]
    if inside:
        nearest = inside[0]
        for path in inside[1:]:  # written out because torch.compile does not trace min() with a key
            nearest = path if path.count(".") < nearest.count(".") else nearest
        name = f"{parent.name}.{nearest}" if parent.name else nearest
    else:
        name = f"{parent.name}/{paths[0]}"  # the module is not inside the caller
    return _with_number(parent, name)


def _with_number(parent: Frame, name: str) -> str:
    number = parent.count_call(name)
    return f"{name}@{number}" if number else name


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
