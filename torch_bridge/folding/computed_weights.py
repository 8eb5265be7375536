"""Stored tensors that are computed from others (weight norm, spectral norm, pruning, weight standardisation).

They are folded into their value.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from torch_bridge.folding.standardized_weights import own_weights, plain_class


@dataclass(frozen=True)
class Computed:
    """A tensor that a module computed before every call, and that is now its value in eval mode.

    Attributes:
        path: of the module.
        name: of the tensor.
        how: what computed it.
        prefix: what the names of the tensors that it is made of begin with, behind the path.
        source: computes it of these tensors.
        kept: which of these tensors stay beside it.
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


class _Hooked(nn.Module):
    """The tensors that a hook of the older interfaces reads, and the hook."""

    def __init__(self, hook: Any, name: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.hook, self.made = hook, name
        for key, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(key, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
            else:
                self.register_buffer(key, tensor.detach().clone())
        self.eval()

    def forward(self) -> Tensor:
        self.hook(self, ())
        result = self.__dict__.pop(self.made)
        assert isinstance(result, Tensor)
        return result


def fold_computed(model: nn.Module, run: Callable[[], Any], undone: list[Callable[[], None]]) -> list[Computed]:
    """Fold every computed tensor of a model in eval mode into its value, in place.

    Args:
        model: not wrapped.
        run: runs it on its example; called where a layer may compute its weight in a forward of its own.
        undone: gets what takes it back, step by step.
    """
    found: list[Computed] = []
    for path, module in list(model.named_modules()):
        computed = [*_parametrized(path, module), *_hooked(path, module)]
        if computed:
            undone.append(_restorer(module))
        for tensor in computed:
            _store(module, tensor)
        found += computed
    for path, module, source in own_weights(model, run):
        undone.append(_restorer(module))
        kept = tuple(name for name in module._parameters if name == "bias")
        found.append(Computed(path, "weight", type(module).__name__, "", source, kept))
        _make_plain(module, found[-1])
    return found


def _make_plain(layer: nn.Module, computed: Computed) -> None:
    """Turn a layer that computes its weight into the layer of torch.nn that it is made from."""
    plain, old = plain_class(layer), layer._parameters["weight"]
    assert plain is not None
    assert old is not None
    stays = {name: layer._parameters[name] for name in computed.kept}
    layer.__class__ = plain
    layer._buffers.clear()
    layer._parameters.clear()
    layer._parameters.update({"weight": nn.Parameter(computed.value(), old.requires_grad), **stays})


def _parametrized(path: str, module: nn.Module) -> Iterator[Computed]:
    if not parametrize.is_parametrized(module):
        return
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    for name, steps in lists.items():
        how = ", ".join(type(step).__name__.strip("_") for step in steps.children())
        yield Computed(path, name, how, f"parametrizations.{name}.", copy.deepcopy(steps))


def _hooked(path: str, module: nn.Module) -> Iterator[Computed]:
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
        yield Computed(path, name, type(hook).__name__, "", _Hooked(hook, name, tensors))  # type: ignore[arg-type]


def _store(module: nn.Module, computed: Computed) -> None:
    """Put the value in the place of what it was computed of."""
    name, source = computed.name, computed.source
    value = computed.value()
    if isinstance(source, _Hooked):
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
        module._init_flat_weights()  # what it hands to its kernel


def _restorer(module: nn.Module) -> Callable[[], None]:
    """What makes a module what it is now; the dictionaries that hooks' handles know stay the same objects."""
    cls = module.__class__
    before = {key: (value, dict(value) if isinstance(value, dict) else None) for key, value in vars(module).items()}
    lists = module._modules.get("parametrizations")
    inner = dict(lists._modules) if lists is not None else {}

    def restore() -> None:
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


def fold_computed_checkpoint(state_dict: dict[str, Any], prefix: str, computed: Computed, *, ours: bool) -> None:
    """Compute a folded tensor of a float checkpoint on its way in, in place; where it is folded already, nothing.

    `ours` says that the checkpoint is known to come from a folded model.
    """
    path = f"{prefix}{computed.path}." if computed.path else prefix
    names = {name: f"{path}{computed.prefix}{name}" for name in computed.source.state_dict()}
    if not all(key in state_dict for key in names.values()) or (ours and not computed.prefix and "weight" in names):
        return
    anew = copy.deepcopy(computed.source)
    anew.load_state_dict({name: state_dict[key] for name, key in names.items()})
    for name, key in names.items():
        if name not in computed.kept:
            del state_dict[key]
    state_dict[f"{path}{computed.name}"] = Computed(computed.path, computed.name, "", "", anew).value()
