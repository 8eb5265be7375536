"""Frames: one call of a wrapped module each, and how calls and their ops are called in sites."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass
class Frame:
    """One call of a wrapped module.

    Attributes:
        path: of the module in the model, the same for every call.
        name: how this call is called in sites: the path it was reached by, with call marks.
        leaf: whether the module is one op.
        guest: whether this is the call of a guest (`as_guest`): a leaf whose modules are called by its caller.
        recording: whether gradients were recorded when it was called.
        hook: what then decided how tensors are saved (`checkpointing.saving_hook`).
        training: whether the module was in train mode.
        counts: how often each op was called in it.
        calls: how often each module was called, in the whole forward pass: a caller may call what is deep inside
            another module, by the name that the call in there has.
    """

    path: str
    name: str
    leaf: bool
    guest: bool = False
    recording: bool = False
    hook: Any = None
    training: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def next(self, name: str) -> int:
        """Count a call of an op and give its number, from 0."""
        return _count(self.counts, name)

    def next_call(self, name: str) -> int:
        """Count a call of a module and give its number, from 0."""
        return _count(self.calls, name)

    def next_op(self, name: str) -> str:
        """Count a call of an op in this frame and give it as owner of a site."""
        owner = f"{self.name}/{name}" if self.name else name
        return f"{owner}.{self.next(name)}"


def _count(counts: dict[str, int], name: str) -> int:
    number = counts.get(name, 0)
    counts[name] = number + 1
    return number


class Naming(Protocol):
    """Names calls as a trace does."""

    def name(self, call: str, frame: Frame | None, *, op: bool) -> str:
        """The name of a call that is numbered in the order of calls."""
        ...


class Watcher(Protocol):
    """Learns the wiring of a model while it runs."""

    def begins(self, arguments: Any) -> None:
        """A torch function is about to be called with these."""

    def read(self, frame: Frame, name: str, arguments: Any, result: Any) -> None:
        """It was called in this frame, and gave this."""

    def wrote_over(self, site: str, x: Tensor) -> Tensor:
        """An op wrote its result over its argument; gives the tensor to go on with."""
        ...


def name_of_call(parent: Frame | None, paths: tuple[str, ...]) -> str:
    """Name a call of a module by the path that its caller knows it under, numbered from the second call on."""
    if parent is None:
        return paths[0]
    prefix = f"{parent.path}." if parent.path else ""
    if len(paths) == 1 and parent.name == parent.path and paths[0].startswith(prefix):
        return _numbered(parent, paths[0])  # the common case, kept short because it runs at every call
    inside = [path[len(prefix) :] for path in paths if path.startswith(prefix)]
    if inside:
        nearest = inside[0]
        for path in inside[1:]:  # written out because torch.compile does not trace min() with a key
            nearest = path if path.count(".") < nearest.count(".") else nearest
        name = f"{parent.name}.{nearest}" if parent.name else nearest
    else:
        name = f"{parent.name}/{paths[0]}"  # the caller holds it outside its own modules
    return _numbered(parent, name)


def _numbered(parent: Frame, name: str) -> str:
    number = parent.next_call(name)
    return f"{name}@{number}" if number else name
