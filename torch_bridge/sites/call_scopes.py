"""The calls of wrapped modules that are running (frames), and the names of calls and ops in sites."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


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
