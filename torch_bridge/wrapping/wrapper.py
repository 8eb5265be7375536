"""Wrapping: a module keeps its identity, keys and class, and gains sites.

`wrap_model` gives every module of a model a subclass of its own class (`QuantizedConv2d(Conv2d)`) whose parameters
are read through quantizers while a sim runs, and whose forward passes results through sites. Outside a running
forward the raw Parameter is read, so `.data`, `nn.init`, `.grad`, tying and parameter groups are as on the float model.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.layers.folded_norms import FoldedNorm
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import Fold, fold_checkpoint
from torch_bridge.folding.computed_weights import Computed, fold_computed_checkpoint
from torch_bridge.folding.trainable_batch_norm import KeptNorm, meet_checkpoint
from torch_bridge.quantizers.learned_checkpoint import keep_float32, meet_learned, prepare_buffers
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.checkpointing import records_gradients
from torch_bridge.sites.fused_relu import ceiling_of
from torch_bridge.sites.loss_inputs import LaterInputs
from torch_bridge.sites.recurrent import run_recurrent
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.cells import is_cell, run_cell
from torch_bridge.torch_values.gate_order import is_recurrent
from torch_bridge.torch_values.layers import has_output_site, is_leaf, quantized_parameters
from torch_bridge.torch_values.module_state import forgotten
from torch_bridge.torch_values.parameters import RANGES, STATE, STEPS
from torch_bridge.torch_values.pytree import Path, input_names, mapped
from torch_bridge.torch_values.sharding import of_the_sharding, require_synchronized
from torch_bridge.wrapping.own_forward import give_own_forward, take_own_forward

FOLDED = "qsdk_folded"  # in the metadata of a state_dict


@dataclass
class ModuleState:
    """What a wrapped module knows of itself: its paths, its place in the sim, and its own quantizers.

    A layer and a BatchNorm that are trained together both have this one as `live`; `holds_eval` keeps a BatchNorm in
    eval mode. A `guest` was put into the model after that was wrapped. An `own_forward` stood on the object in place of
    the class's. The root knows the `kept` BatchNorms that were folded into the layers before them, and the sites whose
    `frozen_values` no training changes.
    """

    paths: tuple[str, ...]
    leaf: bool
    has_output: bool
    runtime: Runtime
    quantizers: list[Quantizer]
    folds: tuple[Fold, ...] = ()
    computed: tuple[Computed, ...] = ()
    norms: dict[str, FoldedNorm] = field(default_factory=dict)
    kept: tuple[KeptNorm, ...] = ()
    frozen_values: frozenset[str] = frozenset()
    live: KeptNorm | None = None
    holds_eval: bool = False
    guest: bool = False
    own_forward: Callable[..., Any] | None = None

    @property
    def path(self) -> str:
        """The first path of the module, which names its parameters."""
        return self.paths[0]


def state_of(module: nn.Module) -> ModuleState:
    """The state of a wrapped module."""
    found = module.__dict__[STATE]
    assert isinstance(found, ModuleState)
    return found


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module belongs to a sim."""
    return STATE in module.__dict__


def float_class(module: nn.Module) -> type[nn.Module]:
    """The class that a wrapped module had before; FSDP and others may have put one of theirs in front of ours."""
    order = type(module).__mro__
    found: type[nn.Module] = order[order.index(_Quantized) + 1]
    return found


def wrap_model(model: nn.Module, declared: Mapping[str, tuple[str, ...]]) -> Runtime:
    """Wrap every module of a model in place and give the runtime they share."""
    runtime = Runtime()
    paths: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module] = (*paths.get(module, ()), path)
    runtime.attention = frozenset(
        known[0] for module, known in paths.items() if isinstance(module, nn.MultiheadAttention)
    )
    for module, known in paths.items():
        names = quantized_parameters(module, declared)
        own = take_own_forward(module)
        leaf = own is None and is_leaf(module)
        module.__dict__[STATE] = ModuleState(known, leaf, has_output_site(module), runtime, [], own_forward=own)
        module.__class__ = quantized_class(type(module), names)  # type: ignore[arg-type]
    return runtime


def keep_norms(model: nn.Module, kept: tuple[KeptNorm, ...]) -> None:
    """Wrap BatchNorms that were folded, so that they can take the places of the Identities that stand for them."""
    root = state_of(model)
    root.kept = kept
    for one in kept:
        paths = state_of(model.get_submodule(one.fold.norm)).paths
        one.norm.__dict__[STATE] = ModuleState(paths, leaf=True, has_output=False, runtime=root.runtime, quantizers=[])
        one.norm.__class__ = quantized_class(type(one.norm), ())  # type: ignore[arg-type]


def unwrap_model(model: nn.Module) -> None:
    """Give every module its own class back and drop its quantizers, in place."""
    kept = [one.norm for one in state_of(model).kept] if is_wrapped(model) else []
    for module in (*model.modules(), *kept):
        if not is_wrapped(module):
            continue
        drop_quantizers(module)
        module._buffers.pop(STEPS, None)
        give_own_forward(module, state_of(module).own_forward)
        del module.__dict__[STATE]
        module.__class__ = float_class(module)


def drop_quantizers(module: nn.Module) -> None:
    """Take the quantizers of a wrapped module away, with their buffers."""
    state = state_of(module)
    for quantizer in state.quantizers:
        for name in quantizer.learned_names:
            del module._parameters[name]
        for name in quantizer.buffer_names:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
    state.quantizers.clear()


class _Quantized(nn.Module):
    """The behaviour that every wrapped class puts before its own."""

    def _simulate(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = state_of(self)
        runtime = state.runtime
        if not torch.compiler.is_compiling() and runtime.is_first_call():
            return runtime.forward_pass(self._simulate, inner, args, kwargs)
        inner = state.own_forward or inner
        if state.guest:
            return runtime.as_guest(inner, args, kwargs)
        if runtime.phase == "float" and runtime.caches and state.path == "":
            with forgotten(runtime.caches, runtime.caching):
                return inner(*args, **kwargs)
        if state.live is not None and runtime.phase != "float":
            if state.live.norm is not self:
                inner = functools.partial(state.live.run, runtime, inner)
            elif runtime.frame is None or not runtime.frame.leaf:
                return args[0] if args else kwargs["input"]  # its layer has done it
        if runtime.phase != "float" and isinstance(self, nn.RNNBase) and is_recurrent(self):
            inner = functools.partial(run_recurrent, self, runtime)
        elif runtime.phase != "float" and is_cell(self):
            inner = functools.partial(run_cell, self)
        if state.path == "" and runtime.frame is None and runtime.writes_inputs:  # the caller's stay as they are
            args, kwargs = mapped((args, kwargs), _copied)
        if state.path == "" and runtime.frame is None and runtime.phase != "float":
            with forgotten(runtime.caches, runtime.caching):
                return self._root_forward(runtime, inner, args, kwargs)
        ceiling = ceiling_of(self) if state.leaf else None
        return runtime.call(
            state.paths, state.leaf, state.has_output, inner, args, kwargs, ceiling, training=self.training
        )

    def _root_forward(
        self, runtime: Runtime, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if records_gradients():
            runtime.ddp = require_synchronized(self, runtime.ddp)
        names = input_names(inner, args)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        later = {name: value for name, value in given.items() if runtime.is_later(name, value)}
        given |= {name: quantize_input(runtime, name, x) for name, x in given.items() if name not in later}
        # surplus arguments go on as they are: the model's own error is the best one
        args, kwargs = (*(given[name] for name in names), *args[len(names) :]), {name: given[name] for name in kwargs}
        state = state_of(self)
        runtime.later = LaterInputs(later) if later else None
        try:
            return runtime.call(state.paths, state.leaf, state.has_output, inner, args, kwargs, training=self.training)
        finally:
            runtime.later = None

    def train(self, mode: bool = True) -> Any:
        """As ever, but for a BatchNorm that is held in eval mode."""
        return super().train(mode and not state_of(self).holds_eval)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Note in the metadata that weights are folded: the keys and shapes of some say nothing of it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and state_of(self).computed:
            metadata[prefix[:-1]][FOLDED] = True

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load float checkpoints (folding on the way in) and checkpoints with encodings alike."""
        state = state_of(self)
        ours = FOLDED in local_metadata or any(key.startswith(prefix) and "qsdk_" in key for key in state_dict)
        for computed in state.computed:
            fold_computed_checkpoint(state_dict, prefix, computed, ours=ours)
        for kept in state.kept:
            meet_checkpoint(self, state_dict, prefix, kept)
        live = {kept.fold for kept in state.kept if kept.live}
        for fold in state.folds:
            if fold in live:
                continue
            said = fold_checkpoint(self, state_dict, prefix, fold)
            if said is not None:
                state.norms[fold.layer] = said
            elif f"{prefix}{fold.layer}.weight" in state_dict:  # folded before, and nobody knows of what
                state.norms.pop(fold.layer, None)
        for name in (STEPS, RANGES):
            if name not in self._buffers:
                state_dict.pop(prefix + name, None)  # saved inside of a training, and loaded outside
        if (averages := self._buffers.get(RANGES)) is not None and prefix + RANGES not in state_dict:
            state_dict[prefix + RANGES] = torch.full_like(averages, -torch.inf)  # they start from the encodings
        for quantizer in state.quantizers:
            meet_learned(quantizer, state_dict, prefix)
            prepare_buffers(self, quantizer, state_dict, prefix, error_msgs)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        own = {
            prefix + n for quantizer in state.quantizers for n in (*quantizer.buffer_names, *quantizer.learned_names)
        }
        own.add(prefix + STEPS)
        missing_keys.extend(key for key in missing if key not in own)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move encodings with the module, but keep their type: `half()` would break scales and zero points."""
        before: dict[str, Tensor] = {}
        for quantizer in state_of(self).quantizers:
            before |= keep_float32(quantizer)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            moved = self._buffers.get(name, self._parameters.get(name))
            assert moved is not None
            if moved.dtype != old.dtype:
                moved.data, moved.grad = old.to(moved.device), None
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            _receive(self, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As ever; a module that is not of the sim is its guest."""
        if module is not None:
            _receive(self, name, module)
        super().add_module(name, module)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """As ever, but FSDP's are no part of the caller's forward."""
        return super().register_forward_pre_hook(_aside(self, hook), **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        """As ever, but FSDP's are no part of the caller's forward."""
        return super().register_forward_hook(_aside(self, hook), **options)

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse copies whose sites would share one state between threads.

        Raises:
            ModelError: says what to use instead.
        """
        raise ModelError(
            "nn.DataParallel copies a module in every forward pass, and the copies of a simulated one would share "
            "their sites; train with torch.nn.parallel.DistributedDataParallel, one process for each GPU"
        )

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which does not take forwards with *args.

        Raises:
            ModelError: says what to use instead.
        """
        raise ModelError(
            "torch.jit.script cannot compile a simulated module; use torch.compile(sim.model), or script sim.unwrap()"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        names = type(self)._qsdk_parameters
        return _rebuild, (float_class(self), names), self.__getstate__()  # type: ignore[no-untyped-call]

    _qsdk_parameters: tuple[str, ...] = ()


def _receive(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Make guests of modules that come into a wrapped model, such as adapters around its layers."""
    if not is_wrapped(owner):
        return
    state = state_of(owner)
    for path, one in module.named_modules(prefix=f"{state.path}.{name}" if state.path else name):
        if not is_wrapped(one):
            one.__dict__[STATE] = ModuleState((path,), False, False, state.runtime, [], guest=True)
            one.__class__ = quantized_class(type(one), ())  # type: ignore[arg-type]


def guests_of(model: nn.Module) -> dict[str, str]:
    """Path -> class name of the modules that were put into a wrapped model later."""
    named = model.named_modules()
    return {path: float_class(m).__name__ for path, m in named if is_wrapped(m) and state_of(m).guest}


def _aside(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook whose ops are no sites, if it is FSDP's."""
    if not of_the_sharding(hook):
        return hook

    def called(*args: Any, **kwargs: Any) -> Any:
        runtime = state_of(module).runtime
        frame, runtime.frame = runtime.frame, None
        try:
            return hook(*args, **kwargs)
        finally:
            runtime.frame = frame

    return called


def _copied(path: Path, leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def quantize_input(runtime: Runtime, name: str, value: Any) -> Any:
    """Pass the tensors of a model input through their sites: `x:input`, and `x.0:input` inside containers."""

    def through_site(path: Path, leaf: Any) -> Any:
        return runtime.emit(site_name(".".join(path), "input"), leaf) if isinstance(leaf, Tensor) else leaf

    return mapped(value, through_site, (name,))


@functools.cache
def quantized_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The wrapped subclass of a module class whose tensors `names` are read through quantizers; made once."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._simulate(functools.partial(base.forward, self), args, kwargs)

    # tracers and callers read the names of the inputs from the signature
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    body: dict[str, Any] = {name: _through_quantizer(name) for name in names} | {"forward": forward}
    # registries keep classes by their text, `str(cls)`, which is made of these two
    body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    body |= {"__doc__": base.__doc__, "_qsdk_parameters": names}
    return type(f"Quantized{base.__name__}", (_Quantized, base), body)


def _through_quantizer(name: str) -> property:
    def read(self: nn.Module) -> Any:
        raw = self._parameters.get(name)
        if raw is None:
            raw = self._buffers.get(name)  # type: ignore[assignment]
        if raw is None and name not in self._parameters and name not in self._buffers:
            raise AttributeError(name)  # deleted; nn.Module.__getattr__ says it in full
        state = self.__dict__.get(STATE)
        if state is not None and state.live is not None and state.runtime.frame is not None:
            return state.live.read(self, name, state.path, state.runtime)
        if raw is None or state is None or state.runtime.frame is None:
            return raw
        return state.runtime.emit(site_name(state.path, name), raw)

    def write(self: nn.Module, value: Any) -> None:
        # nn.Module.__setattr__ takes Parameters; what reaches the property is a plain tensor or None
        target = self._parameters if name in self._parameters else self._buffers
        target[name] = value

    return property(read, write)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = quantized_class(base, names)  # type: ignore[arg-type]
    return cls.__new__(cls)
