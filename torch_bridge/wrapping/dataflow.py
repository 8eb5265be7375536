"""The dataflow of one forward pass: who made which tensor, who read it, and which tensors share memory.

A simulated site may return another tensor than it gets, and a traced one always does. What is written into the result
of a view (`z[:, :4].add_(1)`) must reach the tensor that it is a view of, so views between a write and a later read are
no sites.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qsdk.core.errors import ModelError
from qsdk.core.site import owner_of, port_of, site_name, without_calls
from torch_bridge.sites.calls import Frame, source_line
from torch_bridge.sites.runtime import Runtime
from torch_bridge.wrapping.wrapped_state import state_of

_ASKS_FOR_DTYPE = frozenset({"is_complex", "is_floating_point", "is_signed"})


class WrittenStateError(ModelError):
    """A forward pass writes parameters or buffers and reads them.

    `lines` is name of each of them -> line of the user's code that writes it.
    """

    def __init__(self, lines: Mapping[str, str]) -> None:
        self.lines = dict(lines)
        name, line = next(iter(lines.items()))
        super().__init__(
            f"{name} is written by the forward pass ({line}) and read by it too, so it is a state, which an exported "
            "file does not keep; take it as an argument and return it changed (y, state = model(x, state)), or change "
            "a clone() of it"
        )


@dataclass
class _TensorName:
    """A tensor object, one of the names of its memory.

    Attributes:
        tensor: kept, so that its id is not used again.
        created_by: number of the call that made it; 0 if it existed before.
        source: id of the tensor that it is a view of, or None.
        site: the site that returned it, if it shares memory.
        written: whether it is the result of an op in place.
    """

    tensor: Tensor
    created_by: int
    source: int | None = None
    site: str = ""
    written: bool = False


class _Region(NamedTuple):
    """The elements of a memory that a tensor covers."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "_Region":
        """Return the region that a tensor covers now."""
        strided = x.layout == torch.strided
        stride, offset = (x.stride(), int(x.storage_offset())) if strided else ((), 0)
        return cls(_memory(x), x.dtype, tuple(x.shape), stride, offset)

    @property
    def last(self) -> int:
        """Return the position of its last element."""
        return self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def meets(self, other: "_Region") -> bool:
        """Return whether both regions have an element in common, or that cannot be known."""
        if self.memory != other.memory or 0 in (*self.shape, *other.shape):
            return False
        if self.dtype != other.dtype or self == other:
            return True
        has = torch.zeros(max(self.last, other.last) + 1, dtype=torch.bool)
        has.as_strided(self.shape, self.stride, self.offset).fill_(True)
        return bool(has.as_strided(other.shape, other.stride, other.offset).any())


@dataclass
class _Write:
    """A write into memory: number of the call, target tensor and elements, and the site of the op if it has one."""

    call: int
    target: int
    region: "_Region"
    site: str = ""


class Aliases:
    """The record of reads and writes in one forward pass whose sites change nothing.

    `views` are the sites of views that must stay views, `read_again` those of ops in place whose tensor is read again
    by another name than their result.
    """

    def __init__(self, model: nn.Module) -> None:
        self.views: set[str] = set()
        self.read_again: set[str] = set()
        self.write_lines: list[str] = []
        self.inputs = False
        self._call = 0
        self._names: dict[int, _TensorName] = {}
        self._writes: dict[int, list[_Write]] = {}
        self._given: set[int] = set()  # memory of inputs
        self._versions: list[tuple[Tensor, int]] = []
        stored = (*model.named_parameters(), *model.named_buffers())
        self._state = {_memory(tensor): name for name, tensor in stored}
        self._state_read: set[int] = set()
        self._state_written: dict[int, str] = {}
        self._made_anew: set[int] = set()

    def before_call(self, arguments: Any) -> None:
        """Record the arguments of a function that is about to be called."""
        self._versions = [(x, _version(x)) for x in all_tensors(arguments)]

    def after_call(self, name: str, arguments: tuple[tuple[Any, ...], Mapping[str, Any] | None], result: Any) -> None:
        """Record what a function has read, written and returned."""
        self._call += 1
        args, kwargs = arguments
        given = [x for x, _ in self._versions]
        changed = [x for x, before in self._versions if _version(x) != before]
        # setitem does not read what it writes over
        read = given[1:] if name == "__setitem__" else given
        for x in read:
            self._record_read(x)
        results = all_tensors(result)
        self._note_state(name, read, changed, results)
        if changed:
            out = all_tensors((kwargs or {}).get("out"))
            self._record_write(next((x for x in (*out, *given) if any(x is y for y in changed)), changed[0]))
            if name == "__setitem__":
                self._merge_assignment(args)
        for x in results:
            if id(x) not in self._names:
                source = next((y for y in given if _memory(y) == _memory(x)), None)
                self._names[id(x)] = _TensorName(x, self._call, None if source is None else id(source))

    def site(self, site: str, x: Tensor, *, given: bool) -> None:
        """Record that a site returned a tensor; `given` says that it is an input."""
        if given:
            self._given.add(_memory(x))
        self._name(x).site = site

    def after_write(self, site: str, x: Tensor, result: Tensor) -> None:
        """Record that the op at a site has written over x, and that its result is another name of x."""
        self._name(x)
        self._names[id(result)] = _TensorName(result, self._call + 1, id(x), site, written=True)
        for write in self._writes.get(_memory(x), ())[-1:]:
            if write.target == id(x) and not write.site:
                write.site = site

    def finish(self, result: Any) -> None:
        """Record what the model returns."""
        self._call += 1
        for x in all_tensors(result):
            self._record_read(x)
            self._state_read.add(_memory(x))
        lines = {
            self._state[memory]: line for memory, line in self._state_written.items() if memory in self._state_read
        }
        if lines:
            raise WrittenStateError(lines)

    def made_anew(self) -> frozenset[str]:
        """Return the sites of buffers that are written over as a whole before they are read."""
        parts = (self._state[memory].rpartition(".") for memory in self._made_anew)
        return frozenset(site_name(path, name) for path, _, name in parts)

    def _name(self, x: Tensor) -> _TensorName:
        return self._names.setdefault(id(x), _TensorName(x, 0))

    def _record_read(self, x: Tensor) -> None:
        """Compare a read with the writes since this name of the memory was created."""
        name = self._name(x)
        for write in self._writes.get(_memory(x), ()):
            if write.call < name.created_by or not write.region.meets(_Region.of(x)):
                continue
            if write.site:
                self.read_again.add(write.site)
            above, below = self._sources(id(x)), self._sources(write.target)
            for between in {*above} ^ {*below}:
                if self._names[between].written:
                    self.read_again.add(self._names[between].site)
                elif self._names[between].source is not None:
                    self.views.add(self._names[between].site)
        self.views.discard("")

    def _sources(self, key: int | None) -> Iterable[int]:
        """Return a name, and the names that it is a view of."""
        result = []
        while key is not None:
            result.append(key)
            key = self._names[key].source
        return result

    def _record_write(self, x: Tensor) -> None:
        self._name(x)
        self.write_lines.append(source_line())
        self._writes.setdefault(_memory(x), []).append(_Write(self._call, id(x), _Region.of(x)))
        self.inputs |= _memory(x) in self._given

    def _merge_assignment(self, args: tuple[Any, ...]) -> None:
        """Drop the first of two writes: Python runs `z[a] += b` as an op in place and an assignment of its result."""
        target, index, value = args[:3]
        if not isinstance(value, Tensor) or _memory(value) != _memory(target):
            return
        region = _Region.of(target[index])
        if region == _Region.of(value):
            writes = self._writes[region.memory]
            writes[:-1] = [write for write in writes[:-1] if write.region != region]

    def _note_state(self, name: str, read: list[Tensor], changed: list[Tensor], results: list[Tensor]) -> None:
        """Record which parameters and buffers a call reads or writes.

        It does not read what it only writes over, nor what it returns a view of. What is copied over as a whole before
        it is read is no state: each pass makes it anew, as the frequencies of a rotary embedding by LongRoPE.
        """
        for x in changed:
            if name == "copy_" and _memory(x) not in self._state_read and x.nbytes == x.untyped_storage().nbytes():
                self._made_anew.add(_memory(x))
            if _memory(x) in self._state.keys() - self._made_anew:
                self._state_written.setdefault(_memory(x), source_line())
        shared = {_memory(x) for x in (*changed, *results)}
        if name not in _ASKS_FOR_DTYPE:
            self._state_read.update({_memory(x) for x in read} & self._state.keys() - shared)


def all_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in any nesting of tuples, lists and mappings."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(x: Tensor) -> int:
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # of a sparse tensor, which has no views
        return id(x)


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


_BATCH_NORM = inspect.signature(F.batch_norm)


class Dataflow:
    """The record of who made which tensor, who read it, and how often each module ran, by first paths."""

    def __init__(self, model: nn.Module) -> None:
        modules = model.named_modules(remove_duplicate=False)
        self.first_path = {path: state_of(module).path for path, module in modules}
        self.tensors: list[Tensor] = []  # keeps ids unique while recording
        self.sites: dict[str, None] = {}  # in the order in which they are reached
        self.maker: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.read_by_maker: dict[int, Tensor] = {}  # id of a function's result -> first tensor that the function reads
        self.calls: Counter[str] = Counter()
        self.result_of: dict[str, Tensor] = {}
        self.versions: dict[int, tuple[str, int]] = {}  # id of a site's tensor -> site, and the tensor's version then
        self.norm_calls: dict[str, list[dict[str, Any]]] = {}  # path of a module -> arguments of its F.batch_norm
        self.overwritten: set[str] = set()
        self.aliased: set[str] = set()  # sites of views whose memory is written over later by another name
        self.aliases = Aliases(model)
        self.writes: list[str] = []  # descriptions of the writes, for errors

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Record which owner made a tensor."""
        self.tensors.append(x)
        self.sites[site] = None
        self.versions[id(x)] = site, x._version
        self.aliases.site(site, x, given=port_of(site) == "input")
        if port_of(site) == "output":
            owner = without_calls(owner_of(site))
            # a module that its caller holds outside its own modules is `caller/path`
            owner = self.first_path.get(owner) or self.first_path.get(owner.partition("/")[2]) or owner
            self.maker[id(x)] = owner
            self.calls[owner] += 1
            self.result_of[owner] = x
        return x

    def after_write(self, site: str, x: Tensor) -> Tensor:
        """Record an in-place op; return its result as another object, so that reads of the old one are seen."""
        again = x.view_as(x)
        self.tensors.append(x)
        self.aliases.after_write(site, x, again)
        return again

    def before_call(self, arguments: Any) -> None:
        """Record the tensors that a function is about to get."""
        self.aliases.before_call(arguments)

    def after_call(self, frame: Frame, name: str, arguments: Any, result: Any) -> None:
        """Record who read which tensors to compute another."""
        self.aliases.after_call(name, arguments, result)
        self._note_in_place(*arguments)
        self._note_batch_norm(frame, name, *arguments)
        if not all_tensors(result):
            return  # a shape or a number
        given = all_tensors(arguments)
        for part in all_tensors(result):
            self.tensors.append(part)
            self.read_by_maker[id(part)] = given[0] if given else part
        for tensor in given:
            self.tensors.append(tensor)
            self.readers.setdefault(id(tensor), []).append(frame.path)

    def _note_batch_norm(
        self, frame: Frame, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        """Record a call of `F.batch_norm`; `torch.batch_norm` has an argument more."""
        if name == "batch_norm" and len(args) + len(kwargs or {}) < 9:
            bound = _BATCH_NORM.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.norm_calls.setdefault(frame.path, []).append(bound.arguments)

    def _note_in_place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Record an op that writes over its argument in training; a Dropout does not do so in eval mode."""
        if (kwargs or {}).get("inplace") and args and id(args[0]) in self.versions:
            self.overwritten.add(self.versions[id(args[0])][0])

    def finish(self, result: Any) -> None:
        """Record what the model returns, and what was written over."""
        self.aliases.finish(result)
        for leaf in all_tensors(result):
            self.readers.setdefault(id(leaf), []).append("")
            if id(leaf) in self.versions:
                self.overwritten.add(self.versions[id(leaf)][0])  # its owner may write over it
        versions = {id(x): x._version for x in self.tensors}
        changed = {site for key, (site, version) in self.versions.items() if versions[key] != version}
        self.overwritten |= changed
        self.aliased = {
            self.versions[id(x)][0] for x in self.tensors if id(x) in self.versions and x._is_view()
        } & changed
        self.writes = self.aliases.write_lines or [f"what {site} gives" for site in sorted(changed)]


def record_dataflow(model: nn.Module, runtime: Runtime, run: Callable[[], Any]) -> Dataflow:
    """Run the model once and return its dataflow."""
    dataflow = Dataflow(model)
    runtime.recorder = dataflow
    try:
        with runtime.in_phase("visit", dataflow.visit), torch.no_grad():
            result = run()
    finally:
        runtime.recorder = None
    dataflow.finish(result)
    return dataflow
