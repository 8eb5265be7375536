"""The fingerprint of a model: all that a trace depends on besides the values of parameters and buffers."""

import hashlib
import weakref
from collections.abc import Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_bridge.torch_values.parameters import PREFIX, STATE
from torch_bridge.tracing.weights_by_name import LARGE
from torch_bridge.wrapping.wrapped_state import is_wrapped

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, slice, range)
_OWN = frozenset({STATE, "_modules", "_parameters", "_buffers", "training"})
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class _Identity:
    """A value that equals itself alone; it keeps the object alive, so that no other object takes its identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def fingerprint(model: nn.Module) -> Any:
    """Return a description of a model's modules, their attributes and hooks, and its state; compare with `==`.

    Equal descriptions of a model lead to the same trace, whatever the values of its parameters and buffers. What lies
    outside the model is not seen: a global that its code reads, a variable that a function closes over. Objects count
    by identity and by what they hold, so a copied model is described differently.
    """
    seen = {id(known) for known in (*model.modules(), *model.parameters(), *model.buffers())}
    modules = [
        (path, _Identity(_user_class(module)), [(name, _describe(x, seen)) for name, x in _attributes(module).items()])
        for path, module in model.named_modules()
    ]
    places = [(path, _Identity(module)) for path, module in model.named_modules(remove_duplicate=False)]
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    own = [(name, x) for name, x in tensors if not name.rpartition(".")[2].startswith(PREFIX)]
    state = [(name, first.setdefault(id(x), name), x.dtype, tuple(x.shape)) for name, x in own]
    return places, modules, state


def _user_class(module: nn.Module) -> type:
    """Return the user's class: the one that a wrapped module derives from, and that pickle knows by name."""
    return type(module).__mro__[1] if is_wrapped(module) else type(module)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _describe(value: Any, seen: set[int]) -> Any:
    """Return plain values for data and for what objects hold; never equal for what cannot be inspected.

    Each object is described once.
    """
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, _BY_IDENTITY) or id(value) in seen:
        return _Identity(value)
    if isinstance(value, weakref.ref):  # recurrent layers hold their weights so too
        return weakref.ref, _describe(value(), seen)
    seen.add(id(value))
    if isinstance(value, Tensor):
        small = value.tolist() if value.numel() <= LARGE else None  # a trace holds it as a constant of its own
        return _Identity(value), value._version, value.data_ptr(), repr(small)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()
    if isinstance(value, Mapping):
        return type(value), [[_describe(part, seen) for part in pair] for pair in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_describe(item, seen) for item in value]
    if isinstance(value, Set):
        return type(value), sorted(map(repr, value))
    if hasattr(value, "__dict__"):
        return _Identity(value), [(name, _describe(part, seen)) for name, part in vars(value).items()]
    return object()
