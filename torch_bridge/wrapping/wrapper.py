"""Wrapping: every module of a model gets sites and keeps its identity, its keys and its class.

`wrap_model` gives every module of a model a subclass of its own class (`QuantizedConv2d(Conv2d)`) whose parameters are
read through quantizers while a sim runs, and whose forward passes results through sites. Outside a running forward the
raw Parameter is read, so `.data`, `nn.init`, `.grad`, tying and parameter groups work as on the float model.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.missing_names import OF_MODULES, quantizers_of
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import (
    TrainableBatchNorm,
    fold_norm_in_checkpoint,
    read_norm_from_checkpoint,
    run_without_normalization,
)
from torch_bridge.folding.computed_weights import fold_computed_in_checkpoint
from torch_bridge.quantizers.quantizer import adapt_learned_state, keeping_float32, prepare_buffers
from torch_bridge.sites.functional import relu_ceiling, run_batch_norm, with_one_rounding
from torch_bridge.sites.recurrent import run_cell, run_recurrent
from torch_bridge.sites.runtime import Runtime
from torch_bridge.sites.runtime_state import LossInputs, is_recording_gradients, own_tensors
from torch_bridge.torch_values.layers import has_output_site, is_leaf, quantized_parameters
from torch_bridge.torch_values.module_state import without_caches
from torch_bridge.torch_values.parameters import STATE, STEPS, is_cell, is_recurrent
from torch_bridge.torch_values.pytree import Path, clone_tensors, input_names, is_cache, map_leaves, replace_cache
from torch_bridge.torch_values.sharding import is_fsdp_hook, require_synchronized
from torch_bridge.wrapping.own_forward import remove_own_forward, set_own_forward
from torch_bridge.wrapping.wrapped_state import ModuleState, is_wrapped, saving_with_sim, state_of

FOLDED = "qsdk_folded"  # key in the metadata of a state_dict whose weights are folded


def float_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a wrapped module before wrapping.

    FSDP and others may have put a class of theirs in front of ours.
    """
    order = type(module).__mro__
    result: type[nn.Module] = order[order.index(_QuantizedModule) + 1]
    return result


def wrap_model(model: nn.Module, declared: Mapping[str, tuple[str, ...]]) -> Runtime:
    """Wrap every module of a model in place and return the runtime that they share."""
    runtime = Runtime()
    paths: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module] = (*paths.get(module, ()), path)
    runtime.attention_modules = frozenset(
        known[0] for module, known in paths.items() if isinstance(module, nn.MultiheadAttention)
    )
    for module, known in paths.items():
        wrapped = quantized_class(type(module), quantized_parameters(module, declared))  # type: ignore[arg-type]
        own = remove_own_forward(module)
        leaf = own is None and is_leaf(module)
        module.__dict__[STATE] = ModuleState(known, leaf, has_output_site(module), runtime, [], own_forward=own)
        module.__class__ = wrapped
    return runtime


def wrap_trainable_norms(model: nn.Module, trainable: tuple[TrainableBatchNorm, ...]) -> None:
    """Wrap folded BatchNorms, so that they can take the places of the Identities that stand for them."""
    root = state_of(model)
    root.trainable_norms = trainable
    for one in trainable:
        paths = state_of(model.get_submodule(one.fold.norm)).paths
        own = one.fold.has_own_forward
        one.norm.__dict__[STATE] = ModuleState(paths, not own, False, root.runtime, [], without_norm=own)
        one.norm.__class__ = quantized_class(type(one.norm), ())  # type: ignore[arg-type]


def unwrap_model(model: nn.Module) -> None:
    """Give every module its own class back and remove its quantizers, in place."""
    trainable = [one.norm for one in state_of(model).trainable_norms] if is_wrapped(model) else []
    for module in (*model.modules(), *trainable):
        if not is_wrapped(module):
            continue
        drop_quantizers(module)
        module._buffers.pop(STEPS, None)
        set_own_forward(module, state_of(module).own_forward)
        del module.__dict__[STATE]
        module.__class__ = float_class(module)


def drop_quantizers(module: nn.Module) -> None:
    """Remove the quantizers of a wrapped module, with their buffers and learned parameters."""
    state = state_of(module)
    for quantizer in state.quantizers:
        for name in quantizer.learned_names:
            del module._parameters[name]
        for name in quantizer.buffer_names:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
    state.quantizers.clear()


class _Elsewhere:
    """What AIMET keeps on a module, and qsdk does not: whoever uses it is told where qsdk has it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by tools that inspect objects
            raise AttributeError(name)
        raise ModelError(self._text)

    def __getitem__(self, key: object) -> Any:
        raise ModelError(self._text)

    def __repr__(self) -> str:
        return self._text


class _ElsewhereOf:
    """The attribute of that name, unless the module has one of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        for held in () if module is None else (module._modules, module._buffers, module._parameters):
            if self._name in held:
                return held[self._name]
        path = state_of(module).path if module is not None and is_wrapped(module) else ""
        return _Elsewhere(quantizers_of(self._name, path))


class _QuantizedModule(nn.Module):
    """The base class that every wrapped class puts before the module's own class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell no class of a library, which may want arguments or list the classes made of it."""

    def _simulate(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = state_of(self)
        runtime = state.runtime
        if not torch.compiler.is_compiling() and runtime.is_first_call():
            return runtime.forward_pass(self._simulate, inner, args, kwargs)
        inner = state.own_forward or inner
        if state.foreign:
            return runtime.call_foreign(inner, args, kwargs)
        if runtime.phase == "float" and runtime.caches and state.path == "":
            with without_caches(runtime.caches, runtime.cache_lock):
                return inner(*args, **kwargs)
        if state.active_norm is not None and runtime.phase != "float":
            if state.active_norm.norm is not self:
                inner = functools.partial(state.active_norm.run, runtime, inner)
            elif not state.without_norm and (runtime.frame is None or not runtime.frame.leaf):
                return args[0] if args else kwargs["input"]  # its layer's call has normalized already
        if state.without_norm and (runtime.phase != "float" or state.active_norm is None):
            inner = functools.partial(run_without_normalization, inner, state.note_statistics)
        if runtime.phase != "float" and isinstance(self, nn.RNNBase) and is_recurrent(self):
            inner = functools.partial(run_recurrent, self, runtime)
        elif runtime.phase != "float" and is_cell(self):
            inner = functools.partial(run_cell, self)
        elif runtime.narrow_regions and state.leaf and isinstance(self, nn.modules.batchnorm._BatchNorm):
            inner = functools.partial(run_batch_norm, self, inner)
        elif isinstance(self, nn.Linear) and runtime.phase in ("quantize", "visit"):
            args, kwargs = with_one_rounding(args, kwargs)
            if state.leaf and args:
                args = (runtime.round_input(site_name(state.path, "weight"), args[0]), *args[1:])
            elif state.leaf:
                kwargs = {**kwargs, "input": runtime.round_input(site_name(state.path, "weight"), kwargs["input"])}
        if state.path == "" and runtime.frame is None and runtime.writes_inputs:  # the caller's inputs stay unchanged
            args, kwargs = clone_tensors((args, kwargs))
        if state.path == "" and runtime.frame is None and runtime.phase != "float":
            with without_caches(runtime.caches, runtime.cache_lock):
                return self._root_forward(runtime, inner, args, kwargs)
        if runtime.frame is None and runtime.phase != "float":  # generate of peft calls the model inside
            runtime.now.reads_cache = runtime.has_cache or any(is_cache(value) for value in (*args, *kwargs.values()))
        ceiling = relu_ceiling(self) if state.leaf else None
        return runtime.call(
            state.paths, state.leaf, state.has_output, inner, args, kwargs, ceiling, training=self.training
        )

    def _root_forward(
        self, runtime: Runtime, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_recording_gradients():
            runtime.ddp = require_synchronized(self, runtime.ddp)
        names = input_names(inner, args)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        runtime.now.reads_cache = runtime.has_cache or any(is_cache(value) for value in given.values())
        loss_inputs = own_tensors({name: x for name, x in given.items() if runtime.is_loss_input(name, x)})
        given |= loss_inputs | {
            name: quantize_input(runtime, name, x)
            for name, x in given.items()
            if name not in loss_inputs and (not runtime.takes_own_path or runtime.is_input(name))
        }
        # surplus arguments are passed on, because the model's own error says best what is wrong
        args, kwargs = (*(given[name] for name in names), *args[len(names) :]), {name: given[name] for name in kwargs}
        state = state_of(self)
        runtime.now.loss_inputs = LossInputs(loss_inputs) if loss_inputs else None
        try:
            return runtime.call(state.paths, state.leaf, state.has_output, inner, args, kwargs, training=self.training)
        finally:
            runtime.now.loss_inputs, runtime.now.reads_cache = None, False

    def train(self, mode: bool = True) -> Any:
        """Set the mode, but leave a BatchNorm with frozen statistics in eval mode."""
        super().train(mode)
        if state_of(self).stays_in_eval:
            self.training = False
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as usual, and note in the metadata that weights are folded; keys and shapes do not always show it."""
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
        """Load float checkpoints, which are folded on the way in, and checkpoints with encodings."""
        state = state_of(self)
        ours = FOLDED in local_metadata or any(key.startswith(prefix) and "qsdk_" in key for key in state_dict)
        for computed in state.computed:
            fold_computed_in_checkpoint(state_dict, prefix, computed, from_folded_model=ours)
        for trainable in state.trainable_norms:
            read_norm_from_checkpoint(self, state_dict, prefix, trainable)
        active = {trainable.fold for trainable in state.trainable_norms if trainable.is_active}
        for fold in state.folds:
            if fold in active:
                continue
            output_stats = fold_norm_in_checkpoint(self, state_dict, prefix, fold)
            if output_stats is not None:
                state.norms[fold.layer] = output_stats
            elif f"{prefix}{fold.layer}.weight" in state_dict:  # folded already; the BatchNorm is not in the file
                state.norms.pop(fold.layer, None)
        if STEPS not in self._buffers:
            state_dict.pop(prefix + STEPS, None)  # saved inside a training block, and loaded outside
        for quantizer in state.quantizers:
            adapt_learned_state(quantizer, state_dict, prefix)
            prepare_buffers(self, quantizer, state_dict, prefix, error_msgs)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        own = {
            prefix + n for quantizer in state.quantizers for n in (*quantizer.buffer_names, *quantizer.learned_names)
        }
        own.add(prefix + STEPS)
        missing_keys.extend(key for key in missing if key not in own)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move encodings with the module, but keep their dtype: `half()` would break scales and zero points."""
        state = state_of(self)
        with keeping_float32(self, state.quantizers):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for trainable in state.trainable_norms if recurse else ():
            trainable.convert(fn)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            _wrap_foreign(self, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module as usual; one that does not belong to the sim becomes a foreign module."""
        if module is not None:
            _wrap_foreign(self, name, module)
        super().add_module(name, module)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook as usual, but keep the ops of FSDP's hooks from being sites."""
        return super().register_forward_pre_hook(_without_sites(self, hook), **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook as usual, but keep the ops of FSDP's hooks from being sites."""
        return super().register_forward_hook(_without_sites(self, hook), **options)

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse nn.DataParallel, whose copies would share the state of their sites between threads."""
        raise ModelError(
            "nn.DataParallel copies a module in every forward pass, and the copies of a simulated one would share "
            "their sites; train with torch.nn.parallel.DistributedDataParallel, one process for each GPU"
        )

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which does not take forwards with *args."""
        raise ModelError(
            "torch.jit.script cannot compile a simulated module; use torch.compile(sim.model), or script sim.unwrap()"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        names = type(self)._qsdk_parameters
        return _rebuild, (float_class(self), names), self.__getstate__()  # type: ignore[no-untyped-call]

    _qsdk_parameters: tuple[str, ...] = ()


def _wrap_foreign(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Wrap modules that come into a wrapped model later, such as adapters around its layers, as foreign modules."""
    if not is_wrapped(owner):
        return
    state = state_of(owner)
    for path, one in module.named_modules(prefix=f"{state.path}.{name}" if state.path else name):
        if not is_wrapped(one):
            one.__dict__[STATE] = ModuleState((path,), False, False, state.runtime, [], foreign=True)
            one.__class__ = quantized_class(type(one), ())  # type: ignore[arg-type]


def foreign_modules(model: nn.Module) -> dict[str, str]:
    """Return path -> class name of the modules that came into a wrapped model later."""
    named = model.named_modules()
    return {path: float_class(m).__name__ for path, m in named if is_wrapped(m) and state_of(m).foreign}


def _without_sites(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook; if it is FSDP's, its ops are no sites."""
    if not is_fsdp_hook(hook):
        return hook

    def called(*args: Any, **kwargs: Any) -> Any:
        runtime = state_of(module).runtime
        frame, runtime.frame = runtime.frame, None
        try:
            return hook(*args, **kwargs)
        finally:
            runtime.frame = frame

    return called


def quantize_input(runtime: Runtime, name: str, value: Any) -> Any:
    """Pass the tensors of a model input through their sites: `x:input`, and `x.0:input` inside containers."""

    def through_site(path: Path, leaf: Any) -> Any:
        return runtime.emit(site_name(".".join(path), "input"), leaf) if isinstance(leaf, Tensor) else leaf

    result = map_leaves(value, through_site, (name,))
    if not is_cache(value):
        return result
    replace_cache(value, result)  # the model writes into the caller's cache, as it does in float
    return value


@functools.cache
def quantized_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the wrapped subclass of a module class, made once; it reads the tensors `names` through quantizers."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._simulate(functools.partial(base.forward, self), args, kwargs)

    # tracers and callers read the names of the inputs from the signature
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    body: dict[str, Any] = {name: _quantized_property(name) for name in names} | {"forward": forward}
    # registries find classes by `str(cls)`, which consists of these two
    body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    body |= {"__doc__": base.__doc__, "_qsdk_parameters": names}
    body |= {name: _ElsewhereOf(name) for name in OF_MODULES if not hasattr(base, name)}
    if hasattr(base, "save_pretrained"):
        body["save_pretrained"] = saving_with_sim(base)
    return type(f"Quantized{base.__name__}", (_QuantizedModule, base), body)


def _quantized_property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        """Return the tensor: quantized while a sim runs the module, else as it is stored."""
        raw = self._parameters.get(name)
        if raw is None:
            raw = self._buffers.get(name)  # type: ignore[assignment]
        if raw is None and name not in self._parameters and name not in self._buffers:
            raise AttributeError(name)  # deleted; nn.Module.__getattr__ raises the full message
        # typed: an AttributeError in here would make nn.Module return the raw parameter
        state: ModuleState | None = self.__dict__.get(STATE)
        if state is not None and state.active_norm is not None and state.runtime.frame is not None:
            return _as_read(state.runtime, state.active_norm.read_parameter(self, name, state.path, state.runtime))
        if raw is None or state is None or state.runtime.frame is None:
            return raw
        site = site_name(state.path, name)
        if site in state.runtime.written.made_anew:
            return raw  # what is written must be the buffer itself, also in a trace
        return _as_read(state.runtime, state.runtime.emit(site, raw))

    def write(self: nn.Module, value: Any) -> None:
        # nn.Module.__setattr__ takes Parameters; what reaches the property is a plain tensor or None
        target = self._parameters if name in self._parameters else self._buffers
        target[name] = value

    return property(read, write)


def _as_read(runtime: Runtime, value: Tensor | None) -> Tensor | None:
    """Return a parameter in the type in which the op that reads it computes."""
    frame = runtime.frame
    return value if value is None or frame is None or frame.narrowing is None else frame.narrowing.narrow(value)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = quantized_class(base, names)  # type: ignore[arg-type]
    return cls.__new__(cls)
