"""The runtime of a sim: where the forward pass is, what its sites are called and what happens at them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.errors import ModelError
from qsdk.core.site import site_name
from torch_bridge.attention import stand_in
from torch_bridge.functional import makes_value, op_name
from torch_bridge.quantizer import Quantizer
from torch_bridge.stored import third_of

Phase = Literal["float", "quantize", "visit", "mark"]
Visitor = Callable[[str, Tensor], Tensor]


@dataclass
class Frame:
    """One call of a wrapped module.

    Attributes:
        path: of the module in the model, the same for every call.
        name: how this call is called in sites: the path it was reached by, with call marks.
        leaf: whether the module is one op.
        counts: how often each op and child was called in it.
    """

    path: str
    name: str
    leaf: bool
    counts: dict[str, int] = field(default_factory=dict)

    def next(self, name: str) -> int:
        """Count a call and give its number, from 0."""
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return number

    def next_op(self, name: str) -> str:
        """Count a call of an op in this frame and give it as owner of a site."""
        owner = f"{self.name}/{name}" if self.name else name
        return f"{owner}.{self.next(name)}"


class Watcher(Protocol):
    """Learns the wiring of a model while it runs."""

    def read(self, frame: Frame, arguments: Any, result: Any) -> None:
        """A torch function was called in this frame."""

    def wrote_over(self, site: str, x: Tensor) -> Tensor:
        """An op wrote its result over its argument; gives the tensor to go on with."""
        ...


class Runtime:
    """Shared by all wrapped modules of a sim.

    Attributes:
        phase: `float` does nothing, `quantize` simulates, `visit` hands every site's tensor to `visitor`, `mark`
            writes the site's name into a graph that is being traced.
        quantizers: by site; None where the plan keeps float32.
        visitor: what `visit` calls with (site, tensor); it gives the tensor to go on with.
        watcher: told of every torch function and in-place result while the model's wiring is learned.
        write_back: sites of in-place ops whose tensor is read again by its old name.
        marked: the sites written into the graph by the last `mark` phase.
        reused: paths of the modules that one forward pass calls more than once.
        attention: paths of the nn.MultiheadAttention modules, whose packed projection is read part by part.
        recurrent: told of each recurrent layer before it runs: module, number of the layer, its input and states.
    """

    def __init__(self) -> None:
        self.phase: Phase = "float"
        self.quantizers: dict[str, Quantizer | None] = {}
        self.visitor: Visitor | None = None
        self.watcher: Watcher | None = None
        self.write_back: frozenset[str] = frozenset()
        self.marked: list[str] = []
        self.reused: frozenset[str] = frozenset()
        self.attention: frozenset[str] = frozenset()
        self.recurrent: Callable[[nn.RNNBase, int, Tensor, list[Tensor]], None] | None = None
        self.frame: Frame | None = None

    @contextmanager
    def in_phase(self, phase: Phase, visitor: Visitor | None = None) -> Iterator[None]:
        """Set the phase for a while."""
        before = self.phase, self.visitor
        self.phase, self.visitor = phase, visitor
        try:
            yield
        finally:
            self.phase, self.visitor = before

    def call(
        self,
        paths: tuple[str, ...],
        leaf: bool,
        has_output: bool,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a wrapped module's forward in a frame of its own; a leaf's result passes through its site.

        Args:
            paths: all paths of the module in the model, the first one being its own.
            leaf: whether the module is one op.
            has_output: whether a leaf makes a new tensor.
            forward: the module's own forward.
            args: what it is called with.
            kwargs: and by keyword.
        """
        parent = self.frame
        if self.phase == "float" or (parent is not None and parent.leaf):
            return forward(*args, **kwargs)
        if parent is None and paths[0] in self.reused:
            _refuse_recomputation(paths[0])
        frame = Frame(paths[0], _name_of_call(parent, paths), leaf)
        self.frame = frame
        try:
            if parent is None:
                with SiteMode(self):
                    result = forward(*args, **kwargs)
            elif leaf and self.phase == "visit" and self.watcher is None:
                # nothing inside one op is a site, and calibration feels each detour through the mode
                with torch._C.DisableTorchFunction():
                    result = forward(*args, **kwargs)
            else:
                result = forward(*args, **kwargs)
            if leaf and has_output:
                result = self.emit_result(frame.name, result, args)
        finally:
            self.frame = parent
        return result

    def emit_result(self, owner: str, result: Any, args: tuple[Any, ...] = ()) -> Any:
        """Pass every floating-point tensor of a result through its site: `output`, `output1`, ...

        A result that is one of `args` was written in place.
        """
        if isinstance(result, Tensor):
            site = site_name(owner, "output")
            return self._emit_in_place(site, result) if any(result is a for a in args) else self.emit(site, result)
        if isinstance(result, tuple | list):
            parts = [
                self.emit(site_name(owner, f"output{i or ''}"), part) if isinstance(part, Tensor) else part
                for i, part in enumerate(result)
            ]
            named = hasattr(result, "_fields")
            return type(result)(*parts) if named else type(result)(parts)
        return result

    def emit(self, site: str, x: Tensor) -> Tensor:
        """Do at a site what the phase asks for.

        Raises:
            ModelError: the plan does not know the site.
        """
        if not x.is_floating_point() or self.phase == "float":
            return x
        frame, self.frame = self.frame, None
        try:
            if self.phase == "mark":
                self.marked.append(site)
                return mark(x, site)
            if self.phase == "visit":
                assert self.visitor is not None
                # the visitor's own arithmetic need not pass through the mode call by call
                with torch._C.DisableTorchFunction():
                    return self.visitor(site, x)
            return self.quantized(site, x)
        finally:
            self.frame = frame

    def read_packed(self, name: str, packed: Tensor, part: str) -> Tensor:
        """Pass the packed projection of the calling attention module, or a part of it, through its site.

        Any other caller has read its parameters through its own sites already.
        """
        frame, self.frame = self.frame, None  # taking a part is no op of the model
        read = third_of(packed, part) if part else packed
        self.frame = frame
        assert frame is not None
        if frame.path not in self.attention:
            return read
        return self.emit(site_name(frame.path, f"{name}_{part}" if part else name), read)

    def run_whole(self, name: str, computes: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run several torch functions as one op of the calling module, with one site behind them."""
        frame, self.frame = self.frame, None
        assert frame is not None
        try:
            result = computes(x)
        finally:
            self.frame = frame
        return self.emit(site_name(frame.next_op(name), "output"), result)

    def _emit_in_place(self, site: str, x: Tensor) -> Tensor:
        """Write the site's values into a tensor that others read by its old name (`self.relu(x)` without `x =`)."""
        frame, self.frame = self.frame, None
        try:
            if self.watcher is not None:
                return self.emit(site, self.watcher.wrote_over(site, x))
            made = self.emit(site, x)
            if site not in self.write_back or made is x:
                return made
            if torch.is_grad_enabled() and x.requires_grad:
                raise ModelError(
                    f"the in-place op at {site} cannot be trained, because its tensor is read again by its old name; "
                    "write y = op(x) and read y, or use the op that is not in place"
                )
            return x.copy_(made)
        finally:
            self.frame = frame

    def quantized(self, site: str, x: Tensor) -> Tensor:
        """Give x on the grid of a site.

        Raises:
            ModelError: the plan does not know the site.
        """
        if site not in self.quantizers:
            raise ModelError(
                f"the site {site} was not reached when the model was quantized; call qsdk.quantize with an example "
                "that takes the same path through the model"
            )
        quantizer = self.quantizers[site]
        return x if quantizer is None else quantizer(x)


class SiteMode(TorchFunctionMode):
    """Sees every torch function that a module calls itself and passes its result through a site."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function and quantize what it gives; a fused one as the ops that it is made of."""
        frame = self.runtime.frame
        if frame is not None and not frame.leaf and self.runtime.phase != "float":
            parts = stand_in(func, self.runtime.read_packed, self.runtime.run_whole)
            if parts is not None:
                with self:
                    return parts(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if frame is not None and self.runtime.watcher is not None:
            self.runtime.watcher.read(frame, (args, kwargs), result)
        if frame is None or frame.leaf or self.runtime.phase == "float":
            return result
        name = op_name(func)
        if name is None or not makes_value(name, args, kwargs):
            return result
        return self.runtime.emit_result(frame.next_op(name), result, args)


def _name_of_call(parent: Frame | None, paths: tuple[str, ...]) -> str:
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
    number = parent.next(f"module {name}")
    return f"{name}@{number}" if number else name


def _refuse_recomputation(path: str) -> None:
    """Activation checkpointing calls a module again in the backward pass, where nothing says which call it repeats."""
    if torch._C._current_graph_task_id() != -1:
        raise ModelError(
            f"{path} is called several times in one forward pass, so its recomputation cannot tell its sites apart; "
            "checkpoint the module that calls it instead"
        )


def mark(x: Tensor, site: str) -> Tensor:
    """Write a site's name into the graph being exported: a node `qsdk::Quantizer(x){key=site}`."""
    return torch.onnx.ops.symbolic("qsdk::Quantizer", (x,), {"key": site}, dtype=x.dtype, shape=x.shape, version=1)
