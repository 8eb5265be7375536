"""Stored tensors that are computed from others (weight norm, spectral norm, pruning, weight standardisation, a mask).

They are folded: replaced by their value.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from torch_bridge.torch_values.parameters import held_tensor
from torch_bridge.torch_values.pytree import tensors_of

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_OPS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def plain_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the layer class of torch.nn from which a layer with a forward of its own is derived, else None."""
    bases = type(module).__mro__
    defining = next(base for base in bases if "forward" in vars(base))
    if not isinstance(module, _LAYERS) or defining.__module__.startswith("torch.nn.modules") or module._modules:
        return None
    return next(base for base in bases if base.__module__.startswith("torch.nn.modules") and "forward" in vars(base))


class ComputedWeight(nn.Module):
    """The module that computes the weight a layer passes to its op, from the layer's tensors alone."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        layer = copy.deepcopy(layer)
        self._parameters, self._buffers = layer._parameters, layer._buffers
        self.inside = (layer, torch.zeros_like(x[:1]))  # a tuple: no submodule, so the tensors keep their names

    def forward(self) -> Tensor:
        """Run the layer on zeros, and return the weight that its op gets."""
        call = _linear_call(*self.inside)
        assert call is not None
        return call[0]


class _LinearCallRecorder(TorchFunctionMode):
    """The function mode that records calls of linear ops, and which tensors derive from the input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.derived = [x]
        self.calls: list[tuple[Any, Any]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tensors_of((args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        if any(one is other for one in given for other in self.derived):
            self.derived += tensors_of(result)
        if func in _OPS:
            named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            self.calls.append((named["weight"], named.get("bias")))
        return result


def _linear_call(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Return weight and bias of the one linear op of a layer, and its result.

    The result is None if the weight reads the input, or if there is not exactly one linear op.
    """
    with torch.no_grad(), _LinearCallRecorder(x) as recorder:
        result = layer.forward(x)
    if len(recorder.calls) != 1 or not isinstance(result, Tensor):
        return None
    weight, bias = recorder.calls[0]
    if any(weight is tensor for tensor in recorder.derived):
        return None
    return weight, bias, result


def computed_weights(model: nn.Module, run: Callable[[], Any]) -> Iterator[tuple[str, nn.Module, ComputedWeight]]:
    """Yield the layers that differ from layers of torch.nn only by a weight computed from their own tensors.

    Yields path, layer, and the module that computes its weight: on the example, a plain layer with this weight computes
    the same as the layer. `run` is called only where a layer has a forward of its own.
    """
    layers = {path: module for path, module in model.named_modules() if plain_class(module) is not None}
    if not layers:
        return
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor):
            seen.setdefault(module, args[0].detach().clone())

    handles = [module.register_forward_pre_hook(note) for module in layers.values()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    for path, module in layers.items():
        if module in seen and _only_computes_weight(module, seen[module]):
            yield path, module, ComputedWeight(module, seen[module])


@torch.no_grad()
def _only_computes_weight(layer: nn.Module, x: Tensor) -> bool:
    call = _linear_call(layer, x)
    stored = layer._parameters.get("weight")
    if call is None or stored is None or call[0] is stored or call[0].shape != stored.shape:
        return False
    weight, bias, expected = call
    if bias is not layer._parameters.get("bias"):
        return False
    plain = copy.copy(layer)
    plain.__dict__["_parameters"] = {**layer._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    cls = plain_class(layer)
    assert cls is not None
    plain.__class__ = cls
    result = plain.forward(x)
    return result.shape == expected.shape and bool((result - expected).abs().max() <= 1e-5 * expected.abs().max())


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor that a module computed before every call, and that is replaced by its value in eval mode.

    Attributes:
        path: of the module.
        name: of the tensor.
        how: class names of what computed it.
        prefix: prefix, after the path, of the names of the tensors that it is computed from.
        source: module that computes it from these tensors.
        kept: names of those of these tensors that remain beside it.
    """

    path: str
    name: str
    how: str
    prefix: str
    source: nn.Module
    kept: tuple[str, ...] = ()

    def value(self) -> Tensor:
        """Compute the tensor."""
        with torch.no_grad():
            result = self.source()
        assert isinstance(result, Tensor)
        return result.detach().clone()


class _HookedTensor(nn.Module):
    """A hook of torch's older interfaces (weight norm, say), with the tensors that it reads."""

    def __init__(self, hook: Any, name: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.hook, self.name = hook, name
        for key, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(key, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
            else:
                self.register_buffer(key, tensor.detach().clone())
        self.eval()

    def forward(self) -> Tensor:
        """Return the tensor that the hook computes."""
        self.hook(self, ())
        result = self.__dict__.pop(self.name)
        assert isinstance(result, Tensor)
        return result


def fold_computed_tensors(
    model: nn.Module, run: Callable[[], Any], undo_steps: list[Callable[[], None]]
) -> list[ComputedTensor]:
    """Replace every computed tensor of a model in eval mode by its value, in place.

    `undo_steps` gains the functions that restore the modules.
    """
    result: list[ComputedTensor] = []
    for path, module in list(model.named_modules()):
        computed = [*_parametrized_tensors(path, module), *_hooked_tensors(path, module)]
        if computed:
            undo_steps.append(_restore_function(module))
        for tensor in computed:
            _store(module, tensor)
        result += computed
    for path, module, source in computed_weights(model, run):
        undo_steps.append(_restore_function(module))
        kept = tuple(name for name in module._parameters if name == "bias")
        result.append(ComputedTensor(path, "weight", type(module).__name__, "", source, kept))
        _make_plain(module, result[-1])
    return result


def _make_plain(layer: nn.Module, computed: ComputedTensor) -> None:
    """Turn a layer that computes its weight into the layer of torch.nn that it is derived from."""
    plain, old = plain_class(layer), held_tensor(layer, "weight")
    assert plain is not None
    stays = {name: layer._parameters[name] for name in computed.kept}
    layer.__class__ = plain
    layer._buffers.clear()
    layer._parameters.clear()
    layer._parameters.update({"weight": nn.Parameter(computed.value(), old.requires_grad), **stays})


def _parametrized_tensors(path: str, module: nn.Module) -> Iterator[ComputedTensor]:
    if not parametrize.is_parametrized(module):
        return
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    for name, steps in lists.items():
        how = ", ".join(type(step).__name__.strip("_") for step in steps.children())
        yield ComputedTensor(path, name, how, f"parametrizations.{name}.", copy.deepcopy(steps))


def _hooked_tensors(path: str, module: nn.Module) -> Iterator[ComputedTensor]:
    for hook in module._forward_pre_hooks.values():
        endings: tuple[str, ...]
        if isinstance(hook, WeightNorm):
            name, endings = hook.name, ("g", "v")
        elif isinstance(hook, SpectralNorm):
            name, endings = hook.name, ("orig", "u", "v")
        elif isinstance(hook, BasePruningMethod):
            name, endings = hook._tensor_name, ("orig", "mask")
        else:
            continue
        stored = {**module._parameters, **module._buffers}
        tensors = {key: stored[key] for key in (f"{name}_{ending}" for ending in endings)}
        yield ComputedTensor(path, name, type(hook).__name__, "", _HookedTensor(hook, name, tensors))  # type: ignore[arg-type]


def _store(module: nn.Module, computed: ComputedTensor) -> None:
    """Store the value in the place of the tensors that it was computed from."""
    name, source = computed.name, computed.source
    value = computed.value()
    if isinstance(source, _HookedTensor):
        for hooks in (module._forward_pre_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                own = getattr(hook, "hook", hook)  # torch wraps some of them
                if own is source.hook or getattr(own, "fn", None) is source.hook:
                    del hooks[key]
        for part in source.state_dict():
            module._parameters.pop(part, None)
            module._buffers.pop(part, None)
        module.__dict__.pop(name, None)
    else:
        lists, plain = module._modules["parametrizations"], parametrize.type_before_parametrizations(module)
        assert isinstance(lists, nn.ModuleDict)
        del lists[name]
        if not lists:
            module.__class__ = plain
            del module._modules["parametrizations"]
    trained = [parameter.requires_grad for parameter in source.parameters()]
    if trained:
        module._parameters[name] = nn.Parameter(value, any(trained))
    else:
        module._buffers[name] = value
    if isinstance(module, nn.RNNBase) and not parametrize.is_parametrized(module):
        module._init_flat_weights()  # the list that torch passes to its kernel


def _restore_function(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores a module; dictionaries that hook handles refer to stay the same objects."""
    cls = module.__class__
    before = {key: (value, dict(value) if isinstance(value, dict) else None) for key, value in vars(module).items()}
    lists = module._modules.get("parametrizations")
    inner = dict(lists._modules) if lists is not None else {}

    def restore() -> None:
        """Give the module its class and attributes again, in the same dictionaries."""
        module.__class__ = cls
        module.__dict__.clear()
        for key, (value, content) in before.items():
            module.__dict__[key] = value
            if content is not None:
                value.clear()
                value.update(content)
        if lists is not None:
            lists._modules.update(inner)

    return restore


def fold_computed_in_checkpoint(
    state_dict: dict[str, Any], prefix: str, computed: ComputedTensor, *, from_folded_model: bool
) -> None:
    """Compute a folded tensor of a float checkpoint on its way in, in place.

    A checkpoint in which it is folded already stays as it is; `from_folded_model` says that this is known.
    """
    path = f"{prefix}{computed.path}." if computed.path else prefix
    names = {name: f"{path}{computed.prefix}{name}" for name in computed.source.state_dict()}
    if not all(key in state_dict for key in names.values()) or (
        from_folded_model and not computed.prefix and "weight" in names
    ):
        return
    source = copy.deepcopy(computed.source)
    source.load_state_dict({name: state_dict[key] for name, key in names.items()})
    for name, key in names.items():
        if name not in computed.kept:
            del state_dict[key]
    state_dict[f"{path}{computed.name}"] = ComputedTensor(computed.path, computed.name, "", "", source).value()
