"""The runtime of a sim: where the forward pass is, what its sites are called and what happens at them."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qsdk.core.errors import ModelError
from qsdk.core.site import site_name
from torch_bridge.quantizers.marks import mark
from torch_bridge.quantizers.phases import given_to
from torch_bridge.sites.export_forms import as_written
from torch_bridge.sites.attention import stand_in
from torch_bridge.sites.call_scopes import Frame, name_of_call
from torch_bridge.sites.checkpointing import (
    is_recomputed,
    records_gradients,
    refuse_lost_sites,
    refuse_reused,
    saving_hook,
)
from torch_bridge.sites.functional import asks_again_for_gradients, makes_value, op_name
from torch_bridge.sites.fused_relu import ceiling_of_call
from torch_bridge.sites.loss_inputs import LaterInputs, only_moves
from torch_bridge.sites.runtime_state import RuntimeState
from torch_bridge.sites.source_lines import Call, place, require_place
from torch_bridge.torch_values.parameters import third_of
from torch_bridge.torch_values.pytree import tensors_of


class Runtime(RuntimeState):
    """What the wrapped modules of a sim do at their sites."""

    def at_its_place(self, call: str, frame: Frame | None, *, op: bool = True) -> str:
        """Note the place of a call, or hold it against that of the example; gives the name of the call.

        Raises:
            ModelError: it is another.
        """
        if self.noted is not None:
            self.noted.append(Call(call, "" if frame is None else frame.name, op, place()))
            return call
        if not self.placed:
            return call
        training = frame is not None and frame.training
        if not training and self.numbers is not None and self.phase != "mark" and not torch.compiler.is_compiling():
            call = self.numbers.name(call, frame, op=op)
        places = self.training_places if training else self.places
        if self.phase == "quantize" and call in places and not torch.compiler.is_compiling():
            require_place(call, places[call], recomputed=is_recomputed())
        return self.training_names.get(call, call) if training else call

    def in_file(self, site: str) -> str | None:
        """A site, if not only training has it."""
        return None if site in self.only_training else site

    def is_later(self, name: str, value: Any) -> bool:
        """Whether an input holds tensors, and the example did not have it."""
        return self.phase == "quantize" and name.partition(".")[0] not in self.inputs and bool(tensors_of(value))

    def call(
        self,
        paths: tuple[str, ...],
        leaf: bool,
        has_output: bool,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ceiling: float | None = None,
        *,
        training: bool = False,
    ) -> Any:
        """Run a wrapped module's forward in a frame of its own; a leaf's result passes through its site.

        Args:
            paths: all paths of the module in the model, the first one being its own.
            leaf: whether the module is one op.
            has_output: whether a leaf makes a new tensor.
            forward: the module's own forward.
            args: what it is called with.
            kwargs: and by keyword.
            ceiling: upper bound of a ReLU.
            training: whether the module is in train mode.
        """
        parent = self.frame
        if self.phase == "float" or (parent is not None and parent.leaf and not parent.guest):
            return forward(*args, **kwargs)
        if parent is None and paths[0] in self.reused:
            refuse_reused(paths[0])
        frame = Frame(paths[0], name_of_call(parent, paths), leaf, training=training)
        if parent is not None:
            frame.calls = parent.calls
        if self.placed or self.noted is not None:
            frame.name = self.at_its_place(frame.name, parent, op=False)
        if records_gradients():
            frame.recording, frame.hook = True, saving_hook()
        self.frame = frame
        try:
            if leaf and self.later is not None and self.later.read_by(args, kwargs):
                return self.later.make(
                    forward(*args, **kwargs), self.in_file(site_name(frame.name, "output")), self.quantizers
                )
            if ceiling is not None and (made := self.rectified(frame.name, ceiling, args)) is not None:
                return made
            if parent is None:
                with SiteMode(self):
                    result = forward(*args, **kwargs)
            elif leaf and self._off_the_mode():
                # nothing inside one op is a site, and each detour through the mode is felt
                with torch._C.DisableTorchFunction():
                    result = forward(*args, **kwargs)
            else:
                result = forward(*args, **kwargs)
            if leaf and has_output:
                result = self.emit_result(frame.name, result, given_to(args, kwargs))
        finally:
            self.frame = parent
        return result

    def as_guest(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a module that was put into the model later, as adapters are: it computes in float.

        The modules of the model in it are called as if by its caller.
        """
        caller = self.frame
        if caller is None or caller.leaf:
            return forward(*args, **kwargs)
        self.frame = replace(caller, leaf=True, guest=True)
        try:
            return forward(*args, **kwargs)
        finally:
            self.frame = caller

    def emit_result(self, owner: str, result: Any, given: Iterable[Any] = ()) -> Any:
        """Pass every floating-point tensor of a result through its site: `output`, `output1`, ...

        A result that was `given` was written in place.
        """
        given = tuple(given)

        def through(port: str, part: Tensor) -> Tensor:
            site = site_name(owner, port)
            return self._emit_in_place(site, part) if any(part is x for x in given) else self.emit(site, part)

        if isinstance(result, Tensor):
            return through("output", result)
        if isinstance(result, tuple | list):
            parts = [
                through(f"output{i or ''}", part) if isinstance(part, Tensor) else part for i, part in enumerate(result)
            ]
            named = hasattr(result, "_fields")
            return type(result)(*parts) if named else type(result)(parts)
        return result

    def emit(self, site: str, x: Tensor) -> Tensor:
        """Do at a site what the phase asks for.

        Raises:
            ModelError: the plan does not know the site.
        """
        if not x.is_floating_point() or self.phase == "float" or site in self.views:
            return x
        frame, self.frame = self.frame, None
        try:
            if self.phase == "mark":
                self.marked.append(site)
                return mark(x, site)
            if frame is not None and frame.recording and self.quantizers.get(site) is not None:
                refuse_lost_sites(frame.path, frame.hook, site)
            if not self._off_the_mode():
                return self._at(site, x)
            # the arithmetic of a site need not pass through the mode call by call
            with torch._C.DisableTorchFunction():
                return self._at(site, x)
        finally:
            self.frame = frame

    def _at(self, site: str, x: Tensor) -> Tensor:
        if self.phase == "visit":
            assert self.visitor is not None
            return self.visitor(site, x)
        return self.quantized(site, x)

    def _off_the_mode(self) -> bool:
        """Whether what is no site's business may bypass the mode: not while wiring or graphs are read from it."""
        return self.phase != "mark" and self.watcher is None and not torch.compiler.is_compiling()

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

    def rectified(self, owner: str, ceiling: float, args: tuple[Any, ...]) -> Tensor | None:
        """What a ReLU gives at its site, where its quantizer does its work too."""
        site = site_name(owner, "output")
        quantizer = self.quantizers.get(site) if self.phase == "quantize" else None
        if quantizer is None or len(args) != 1 or site in self.write_back or not self._off_the_mode():
            return None
        frame, self.frame = self.frame, None
        try:
            if frame is not None and frame.recording:
                refuse_lost_sites(frame.path, frame.hook, site)
            with torch._C.DisableTorchFunction():
                made = quantizer.rectified(args[0], ceiling)
            if made is not None and self.told is not None:
                self.told(site, made)
            return made
        finally:
            self.frame = frame

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
            if self.later is not None and only_moves(site):
                return x
            has = "" if self.later is None else f" and has {self.later.names}"
            raise ModelError(
                f"the site {site} was not reached when the model was quantized; call qsdk.quantize with an example "
                f"that takes the same path through the model{has}"
            )
        quantizer = self.quantizers[site]
        made = x if quantizer is None else quantizer(x)
        if self.told is not None:
            self.told(site, made)
        return made


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
        if asks_again_for_gradients(func, args):
            return None
        if func is Tensor.unflatten:
            func = torch.unflatten  # the same op; torch.compile does not trace the method's super() under a mode
        if getattr(func, "__name__", "") == "tag_activation_checkpoint":  # torch.compile calls what is checkpointed
            return func(functools.partial(self._inside, args[0]), *args[1:], **(kwargs or {}))
        if frame is not None and not frame.leaf and self.runtime.phase != "float":
            if self.runtime.later is not None and self.runtime.later.read_by(args, kwargs):
                return self._after_later_inputs(self.runtime.later, frame, func, args, kwargs)
            parts = stand_in(func, self.runtime.read_packed, self.runtime.run_whole)
            if parts is not None:
                with self:
                    return parts(*args, **(kwargs or {}))
            name = op_name(func)
            ceiling = ceiling_of_call(name, args, kwargs) if name else None
            if name and ceiling is not None and self.runtime.phase == "quantize":
                return self._rectified(
                    self.runtime.at_its_place(frame.next_op(name), frame), func, ceiling, args, kwargs
                )
        watcher = self.runtime.watcher if frame is not None else None
        if watcher is not None:
            watcher.begins((args, kwargs))
        runs = as_written(func, args, kwargs or {}) if self.runtime.phase == "mark" else func
        result = runs(*args, **(kwargs or {}))
        if frame is not None and watcher is not None:
            watcher.read(frame, getattr(func, "__name__", ""), (args, kwargs), result)
        if frame is None or frame.leaf or self.runtime.phase == "float":
            return result
        if name is None or not makes_value(name, args, kwargs):
            return result
        owner = self.runtime.at_its_place(frame.next_op(name), frame)
        return self.runtime.emit_result(owner, result, given_to(args, kwargs))

    def _inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def _after_later_inputs(
        self, later: LaterInputs, frame: Frame, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), op_name(func)
        computes = isinstance(result, Tensor) and result.is_floating_point() and name is not None
        site = None
        if computes and name is not None:
            site = self.runtime.in_file(site_name(frame.next_op(name), "output"))
        return later.make(result, site, self.runtime.quantizers)

    def _rectified(
        self, owner: str, func: Callable[..., Any], ceiling: float, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        made = self.runtime.rectified(owner, ceiling, args)
        if made is None:
            made = self.runtime.emit_result(owner, func(*args, **(kwargs or {})), given_to(args, kwargs))
        return made
