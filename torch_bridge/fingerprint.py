"""What a trace depends on besides the values of parameters and buffers: whether an old trace still holds."""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.attach import PREFIX
from torch_bridge.wrapper import STATE, is_wrapped

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, slice, range)
_OWN = frozenset({STATE, "_modules", "_parameters", "_buffers", "training"})
_DEPTH = 8


class _Same:
    """Equal to itself alone; it keeps what it holds alive, so that no other object takes its identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def fingerprint(model: nn.Module) -> Any:
    """Describe a model's modules, their attributes and hooks, and where its state is; compare with `==`.

    Two equal descriptions of a model lead to the same trace, whatever the values of its parameters and buffers; only
    what lies outside the model (a global that its code reads) is not seen. Attributes that are no plain data count by
    identity, so a copied model is described differently.
    """
    modules = [
        (path, _Same(_own_class(module)), _described(_attributes(module), _DEPTH, set()))
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    own = [(name, x) for name, x in tensors if not name.rpartition(".")[2].startswith(PREFIX)]
    state = [(name, first.setdefault(id(x), name), x.dtype, tuple(x.shape)) for name, x in own]
    return modules, state


def _own_class(module: nn.Module) -> type:
    """The user's class: what a wrapped module is made of, and what pickle knows by name."""
    return type(module).__mro__[1] if is_wrapped(module) else type(module)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _described(value: Any, depth: int, seen: set[int]) -> Any:
    """Plain values for plain data, containers and objects of the user's; identity for all else."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return _Same(value), value._version
    if depth == 0 or id(value) in seen:
        return _Same(value)
    inner = seen | {id(value)}
    if isinstance(value, Mapping):
        return type(value), [[_described(part, depth - 1, inner) for part in pair] for pair in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_described(item, depth - 1, inner) for item in value]
    if isinstance(value, Set):
        return type(value), sorted(map(repr, value))
    if callable(value) or isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return _Same(value)
    return _Same(value), _described(dict(vars(value)), depth - 1, inner)
