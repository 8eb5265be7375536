"""The runtime of a sim: what its wrapped modules do at each site of a forward pass."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qsdk.core.errors import ModelError
from qsdk.core.site import site_name
from torch_bridge.quantizers.quantizer import fake_quantize_blocks
from torch_bridge.sites.attention import decomposition_of
from torch_bridge.sites.calls import Frame, call_arguments, call_name
from torch_bridge.sites.functional import (
    computes_floats,
    op_name,
    reads_narrow,
    relu_ceiling_of_call,
    repeats_requires_grad,
    run_as_exported,
    run_narrow,
    with_narrow_scalars,
    with_one_rounding,
)
from torch_bridge.sites.runtime_state import (
    LossInputs,
    RuntimeState,
    is_recording_gradients,
    moves_values_only,
    op_of_site,
    refuse_reused,
    refuse_unreachable_site,
    saved_tensors_hook,
)
from torch_bridge.torch_values.adapters import ADAPTER
from torch_bridge.torch_values.parameters import packed_rows
from torch_bridge.torch_values.pytree import MOVES
from torch_bridge.workarounds.export_forms import export_form
from torch_bridge.workarounds.script_functions import run_scripted_as_python_within


class Runtime(RuntimeState):
    """The object that all wrapped modules of a sim share: it names their calls and runs their sites."""

    def name_call(self, call: str, frame: Frame | None, *, op: bool = True) -> str:
        """Return the name of a call in sites, see `CallNames.name`."""
        return self.calls.name(call, frame, op=op, phase=self.phase, own_path=self.takes_own_path)

    def exported_site(self, site: str) -> str | None:
        """Return a site, or None if only training has it, so that it is in no exported file."""
        return None if site in self.only_training else site

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

        The first of its paths names its parameters; `ceiling` is the upper bound of a ReLU or ReLU6.
        """
        parent = self.frame
        if self.phase == "float" or (parent is not None and parent.leaf and not parent.foreign):
            return forward(*args, **kwargs)
        if parent is None and paths[0] in self.reused_modules:
            refuse_reused(paths[0])
        frame = Frame(paths[0], call_name(parent, paths), leaf, training=training)
        if parent is not None:
            frame.calls, frame.weights = parent.calls, parent.weights
        if self.calls.differ or self.takes_own_path or self.calls.recorded is not None:
            frame.name = self.name_call(frame.name, parent, op=False)
        if is_recording_gradients():
            frame.recording, frame.hook = True, saved_tensors_hook()
        self.frame = frame
        narrow_type = self.narrow_type_at(frame.name) if leaf else None
        if narrow_type is not None:
            forward = functools.partial(run_narrow, narrow_type, frame, forward)
        try:
            loss_inputs = self.now.loss_inputs if leaf else None
            if loss_inputs is not None and self.is_of_loss(frame.name, frame, args, kwargs):
                return loss_inputs.add_result(
                    forward(*args, **kwargs), self.exported_site(site_name(frame.name, "output")), self.quantizers
                )
            if ceiling is not None and (relu_result := self.quantize_relu(frame.name, ceiling, args)) is not None:
                return relu_result
            if parent is None:
                with SiteMode(self):
                    result = forward(*args, **kwargs)
            elif leaf and self._can_bypass_mode() and not (narrow_type or reads_narrow(args, kwargs)):
                # nothing inside one op is a site, and the mode would slow down every call there
                with torch._C.DisableTorchFunction():
                    result = forward(*args, **kwargs)
            else:
                result = forward(*args, **kwargs)
            if leaf and has_output:
                result = self.emit_result(frame.name, result, call_arguments(args, kwargs))
        finally:
            self.frame = parent
        return result

    def narrow_type_at(self, owner: str) -> torch.dtype | None:
        """Return the narrow float type that an op or leaf module computes in, None for the model's own."""
        return self.narrow_regions.get(site_name(owner, "output")) if self.has_narrow_regions else None

    @property
    def has_narrow_regions(self) -> bool:
        """Return whether any op computes in a narrow float type now: none does in the float model."""
        return bool(self.narrow_regions) and (self.phase == "quantize" or self.visitor_quantizes)

    def call_foreign(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a foreign module, one that came into the model after wrapping (an adapter, say), in float.

        The model's own modules inside it are named as if the caller of the foreign module called them.
        """
        caller = self.frame
        if caller is None or caller.leaf:
            return forward(*args, **kwargs)
        self.frame = replace(caller, leaf=True, foreign=True)
        try:
            return forward(*args, **kwargs)
        finally:
            self.frame = caller

    def emit_result(self, owner: str, result: Any, given: Iterable[Any] = ()) -> Any:
        """Pass every floating-point tensor of a result through its site: `output`, `output1`, ...

        A tensor that is also in `given`, the arguments of the call, was written in place.
        """
        given = tuple(given)

        def emit_part(port: str, part: Tensor) -> Tensor:
            site = site_name(owner, port)
            return self._emit_in_place(site, part) if any(part is x for x in given) else self.emit(site, part)

        if isinstance(result, Tensor):
            return emit_part("output", result)
        if isinstance(result, tuple | list):
            parts = [
                emit_part(f"output{i or ''}", part) if isinstance(part, Tensor) else part
                for i, part in enumerate(result)
            ]
            named = hasattr(result, "_fields")
            return type(result)(*parts) if named else type(result)(parts)
        return result

    def emit(self, site: str, x: Tensor) -> Tensor:
        """Return the tensor that goes on from a site: quantized, visited, marked or unchanged, as the phase asks."""
        if not x.is_floating_point() or self.phase == "float" or site in self.written.views:
            return x
        frame, self.frame = self.frame, None
        try:
            if self.phase == "mark":
                self.marked.append(site)
                return mark(x, site)
            if frame is not None and frame.recording and self.quantizers.get(site) is not None:
                refuse_unreachable_site(frame.path, frame.hook, site)
            if not self._can_bypass_mode():
                return self._run_site(site, x)
            # the arithmetic of a site need not pass through the mode call by call
            with torch._C.DisableTorchFunction():
                return self._run_site(site, x)
        finally:
            self.frame = frame

    def _run_site(self, site: str, x: Tensor) -> Tensor:
        if self.phase == "visit":
            assert self.visitor is not None
            return self.visitor(site, x)
        return self.quantize(site, x)

    def _can_bypass_mode(self) -> bool:
        """Return whether ops inside a site may bypass the function mode.

        Not while the dataflow is recorded or a graph is traced: both are read from the mode.
        """
        return self.phase != "mark" and self.recorder is None and not torch.compiler.is_compiling()

    def read_packed(self, name: str, packed: Tensor, part: str) -> Tensor:
        """Return the packed projection of the calling attention module, or a part of it, read through its site.

        Any other caller has read its parameters through their own sites already.
        """
        frame, self.frame = self.frame, None  # taking a part of the tensor is not an op of the model
        read = packed_rows(packed, part) if part else packed
        self.frame = frame
        assert frame is not None
        if frame.path not in self.attention_modules:
            return read
        return self.emit(site_name(frame.path, f"{name}_{part}" if part else name), read)

    def run_as_one_op(self, name: str, computes: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run several torch functions as one op of the calling module, with one site for the result."""
        frame, self.frame = self.frame, None
        assert frame is not None
        owner = frame.next_owner(name)
        try:
            result = run_narrow(self.narrow_type_at(owner), None, computes, x)
        finally:
            self.frame = frame
        return self.emit(site_name(owner, "output"), result)

    def input_block(self, site: str) -> int | None:
        """Return how the layers of a weight round their input now; see `Decision`."""
        quantizer = self.quantizers.get(site) if self.phase == "quantize" or self.visitor_quantizes else None
        return None if quantizer is None else quantizer.decision.input_block

    def round_input(self, site: str, x: Tensor) -> Tensor:
        """Return the input of the layers of a weight as they multiply it: rounded to int8 where the plan says so."""
        block = self.input_block(site)
        if block is None:
            return x
        frame, self.frame = self.frame, None
        try:
            if not self._can_bypass_mode():
                return fake_quantize_blocks(x, block)
            with torch._C.DisableTorchFunction():
                return fake_quantize_blocks(x, block)
        finally:
            self.frame = frame

    def round_projected(self, name: str, x: Tensor) -> Tensor:
        """Return what the calling attention module multiplies with one of its weights, as `round_input` does."""
        assert self.frame is not None
        owner, _, port = f"{self.frame.path}.{name}".rpartition(".") if "." in name else (self.frame.path, "", name)
        return self.round_input(site_name(owner.removeprefix("."), port), x)

    def quantize_relu(self, owner: str, ceiling: float, args: tuple[Any, ...]) -> Tensor | None:
        """Return the result of a ReLU quantized by one operation, or None where that takes two."""
        site = site_name(owner, "output")
        quantizer = self.quantizers.get(site) if self.phase == "quantize" else None
        if quantizer is None or len(args) != 1 or site in self.written.write_back or not self._can_bypass_mode():
            return None
        frame, self.frame = self.frame, None
        try:
            if frame is not None and frame.recording:
                refuse_unreachable_site(frame.path, frame.hook, site)
            with torch._C.DisableTorchFunction():
                result = quantizer.quantize_relu(args[0], ceiling)
            if result is not None and self.site_observer is not None:
                self.site_observer(site, result)
            return result
        finally:
            self.frame = frame

    def _emit_in_place(self, site: str, x: Tensor) -> Tensor:
        """Write the values of a site back into a tensor that is read again by its old name.

        This serves `self.relu(x)` with `inplace=True`, where the model goes on with x.
        """
        frame, self.frame = self.frame, None
        try:
            if self.recorder is not None:
                return self.emit(site, self.recorder.after_write(site, x))
            written = site in self.written.write_back and self.quantizers.get(site) is not None
            trained = written and torch.is_grad_enabled() and x.requires_grad
            if trained and keeps_result(x):
                raise ModelError(
                    f"the in-place op at {site} cannot be trained, because its tensor is read again by its old name; "
                    "write y = op(x) and read y, or use the op that is not in place"
                )
            result = self.emit(site, x.clone() if trained else x)  # the quantizer keeps what it is given for gradients
            return result if site not in self.written.write_back or result is x else x.copy_(result)
        finally:
            self.frame = frame

    def _is_float_adapter(self, site: str) -> bool:
        """Return whether a site is of an adapter that has taken the place of one whose site there is float."""
        found = ADAPTER.fullmatch(site)
        places = [f"{found[1]}.{name}{found[3]}" for name in self._adapters] if found else []
        return any(place in self.quantizers and self.quantizers[place] is None for place in places)

    @functools.cached_property
    def _adapters(self) -> frozenset[str]:
        return frozenset(found[2] for site in self.quantizers if (found := ADAPTER.fullmatch(site)))

    def quantize(self, site: str, x: Tensor) -> Tensor:
        """Return x on the grid of a site, or x itself where the site is float."""
        if site not in self.quantizers:
            loss_inputs = self.now.loss_inputs
            if loss_inputs is not None and moves_values_only(site):
                return x
            if self.now.reads_cache and op_of_site(site) in MOVES:
                return x  # cached values are on their grid already
            if self._is_float_adapter(site):
                return x
            has = "" if loss_inputs is None else f" and has {loss_inputs.names}"
            raise ModelError(
                f"the site {site} was not reached when the model was quantized; call qsdk.quantize with an example "
                f"that takes the same path through the model{has}"
            )
        quantizer = self.quantizers[site]
        result = x if quantizer is None else quantizer(x)
        if self.site_observer is not None:
            self.site_observer(site, result)
        return result


class SiteMode(TorchFunctionMode):
    """The torch function mode that passes the result of every function a module calls through a site."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function and quantize its result; run a fused function as the ops it consists of."""
        frame = self.runtime.frame
        if repeats_requires_grad(func, args):
            return None
        if func is Tensor.unflatten:
            func = torch.unflatten  # the same op; torch.compile does not trace the method's super() under a mode
        if getattr(func, "__name__", "") == "tag_activation_checkpoint":  # torch.compile calls what is checkpointed
            return func(functools.partial(self._run_inside, args[0]), *args[1:], **(kwargs or {}))
        if func is F.linear and frame is not None and self.runtime.phase in ("quantize", "visit"):
            args, kwargs = with_one_rounding(args, kwargs)
        if frame is not None and not frame.leaf and self.runtime.phase != "float":
            loss_inputs, own_path = self.runtime.now.loss_inputs, self.runtime.takes_own_path
            parts = decomposition_of(
                func, self.runtime.read_packed, self.runtime.run_as_one_op, self.runtime.round_projected
            )
            if loss_inputs is not None and not (parts and own_path) and loss_inputs.is_read_by(args, kwargs):
                return self._after_loss_inputs(loss_inputs, frame, func, args, kwargs)
            if parts is not None:
                with self:
                    return parts(*args, **(kwargs or {}))
            name = op_name(func)
            if name and self.runtime.phase != "mark":
                args, kwargs = with_narrow_scalars(name, args, kwargs)
            ceiling = relu_ceiling_of_call(name, args, kwargs) if name else None
            if name and ceiling is not None and self.runtime.phase == "quantize":
                return self._quantize_relu(
                    self.runtime.name_call(frame.next_owner(name), frame), func, ceiling, args, kwargs
                )
            if name and self.runtime.has_narrow_regions:
                return self._run_op(frame, name, func, args, kwargs)
        recorder = self.runtime.recorder if frame is not None else None
        if recorder is not None:
            recorder.before_call((args, kwargs))
        if self.runtime.phase == "mark":
            result = export_form(func, args, kwargs or {})(*args, **(kwargs or {}))
        elif frame is not None and self.runtime.phase != "float":
            result = run_as_exported(func, *args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        if frame is not None and recorder is not None:
            recorder.after_call(frame, getattr(func, "__name__", ""), (args, kwargs), result)
        if frame is None or frame.leaf or self.runtime.phase == "float":
            return result
        if name is None or not computes_floats(name, args, kwargs):
            return result
        owner = self.runtime.name_call(frame.next_owner(name), frame)
        return self.runtime.emit_result(owner, result, call_arguments(args, kwargs))

    def _run_op(self, frame: Frame, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a function of a sim with narrow regions, in the type in which it computes."""
        if not computes_floats(name, args, kwargs):
            return func(*args, **(kwargs or {}))
        owner = self.runtime.name_call(frame.next_owner(name), frame)
        result = run_narrow(self.runtime.narrow_type_at(owner), None, run_as_exported, func, *args, **(kwargs or {}))
        return self.runtime.emit_result(owner, result, call_arguments(args, kwargs))

    def _run_inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def _after_loss_inputs(
        self, loss_inputs: LossInputs, frame: Frame, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), op_name(func)
        if not isinstance(result, Tensor) or not result.is_floating_point() or name is None:
            return loss_inputs.add_result(result, None, self.runtime.quantizers)
        chosen = not computes_floats(name, args, kwargs) and not loss_inputs.reads_floats(args, kwargs)
        if self.runtime.takes_own_path and chosen:
            return loss_inputs.add_constant(result)
        owner = frame.next_owner(name)
        if self.runtime.takes_own_path:
            owner = self.runtime.name_call(owner, frame)
            if not self.runtime.is_of_loss(owner, frame, args, kwargs):
                return self.runtime.emit_result(owner, result, call_arguments(args, kwargs))
        site = self.runtime.exported_site(site_name(owner, "output"))
        return loss_inputs.add_result(result, site, self.runtime.quantizers)

    def _quantize_relu(
        self, owner: str, func: Callable[..., Any], ceiling: float, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        result = self.runtime.quantize_relu(owner, ceiling, args)
        if result is None:
            result = self.runtime.emit_result(owner, func(*args, **(kwargs or {})), call_arguments(args, kwargs))
        return result


def mark(x: Tensor, site: str) -> Tensor:
    """Write a site's name into the graph being exported: a node `qsdk::Quantizer(x){key=site}`.

    It has an attribute `dtype` where the tensor is not float32.
    """
    facts: dict[str, Any] = (
        {"key": site} if x.dtype == torch.float32 else {"key": site, "dtype": str(x.dtype).removeprefix("torch.")}
    )
    return torch.onnx.ops.symbolic("qsdk::Quantizer", (x,), facts, dtype=x.dtype, shape=x.shape, version=1)


def keeps_result(x: Tensor) -> bool:
    """Return whether the op that made a tensor computes gradients from the values that it has left there."""
    kept = (getattr(x.grad_fn, name) for name in dir(x.grad_fn) if name.startswith("_saved_"))
    return any(isinstance(value, Tensor) and value.data_ptr() == x.data_ptr() for value in kept)


run_scripted_as_python_within(SiteMode)
