"""Attributes of modules besides parameters: snapshots of them, and what modules cache of their parameters."""

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qsdk.core.errors import ModelError
from qsdk.core.shared_folder import PerCopyLock
from torch_bridge.torch_values.parameters import STATE

_MISSING = object()
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
_OF_TORCH = frozenset({STATE, "_modules", "_parameters", "_buffers", "training"})


@dataclass(frozen=True)
class ContainerSnapshot:
    """The contents of a dictionary or list at some time, including the containers in it."""

    original: Any
    parts: Any

    def restore(self) -> Any:
        """Put the contents back into the container, and return it."""
        if isinstance(self.original, list):
            self.original[:] = [restore_contents(part) for part in self.parts]
        else:
            self.original.clear()
            self.original.update({key: restore_contents(part) for key, part in self.parts.items()})
        return self.original

    def rebuild(self) -> Any:
        """Return a new container with these contents."""
        if isinstance(self.original, list):
            return [rebuild(part) for part in self.parts]
        result = copy.copy(self.original)
        result.clear()
        result.update({key: rebuild(part) for key, part in self.parts.items()})
        return result


def snapshot_of(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Return a `ContainerSnapshot` of a container; any other value is returned as it is."""
    if type(value) not in _CONTAINERS or id(value) in above:
        return value
    within = above | {id(value)}
    if isinstance(value, list):
        return ContainerSnapshot(value, [snapshot_of(part, within) for part in value])
    return ContainerSnapshot(value, {key: snapshot_of(part, within) for key, part in value.items()})


def restore_contents(image: Any) -> Any:
    """Put the contents of a snapshot back into its container, and return it; any other value is returned as it is."""
    return image.restore() if isinstance(image, ContainerSnapshot) else image


def restore_attributes(attributes: "Attributes") -> None:
    """Give modules the attributes of `attributes_of` back."""
    for (module, name), image in attributes.items():
        vars(module)[name] = restore_contents(image)


def rebuild(image: Any) -> Any:
    """Return a new container with the contents of a snapshot; any other value is returned as it is."""
    return image.rebuild() if isinstance(image, ContainerSnapshot) else image


def tensors_in(value: Any, above: frozenset[int] = frozenset()) -> list[Tensor]:
    """Return the tensors of a value and of the containers in it, except parameters."""
    if isinstance(value, Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, ContainerSnapshot):
        value = value.parts
    if not isinstance(value, dict | list | tuple) or id(value) in above:
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_in(part, above | {id(value)})]


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore a model's modules and tensors and the state of random numbers after the block."""
    images = [snapshot_of(vars(module)) for module in model.modules()]
    buffers = [(tensor, tensor.detach().clone()) for tensor in model.buffers()]
    written = _WriteRecorder(model.parameters())
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), written:
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for image in images:
            image.restore()
        with torch.no_grad():
            for tensor, value in (*buffers, *written.before.values()):
                tensor.detach().copy_(value)


class _WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode that copies tensors before an op writes into their memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else given.get(argument.name)
            for tensor in tensors_in([value]) if not isinstance(value, nn.Parameter) else [value]:
                place = tensor.untyped_storage()._cdata
                if place in self._own and place not in self.before:
                    self.before[place] = self._own[place], self._own[place].detach().clone()
        return func(*args, **given)


@dataclass(frozen=True)
class Cache:
    """An attribute in which a module caches what it has computed from its parameters.

    `empty` is a snapshot of it before the module has computed anything, if it `exists` by then.
    """

    module: nn.Module
    name: str
    empty: Any
    exists: bool

    def clear(self) -> None:
        """Empty the cache, so that the module computes its contents again."""
        if self.exists:
            vars(self.module)[self.name] = rebuild(self.empty)
        else:
            vars(self.module).pop(self.name, None)


@contextmanager
def without_caches(caches: Sequence[Cache], one_at_a_time: PerCopyLock) -> Iterator[None]:
    """Empty caches before and after the block: what they hold depends on the phase of the sim.

    Threads that run a model with caches take turns, or one would empty a cache that another is about to read.
    """
    if not caches:
        yield
        return
    with one_at_a_time:
        for cache in caches:
            cache.clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.clear()


Attributes = dict[tuple[nn.Module, str], Any]


def attributes_of(model: nn.Module) -> Attributes:
    """Return snapshots of all attributes that the modules of a model have of their own."""
    return {
        (module, name): snapshot_of(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def emptied_attributes(before: Attributes, now: Attributes) -> Attributes:
    """Return the attributes that held tensors before and hold none now."""
    return {
        key: image for key, image in now.items() if key in before and tensors_in(before[key]) and not tensors_in(image)
    }


def find_caches(model: nn.Module, empty: Attributes, run: Callable[[], Any]) -> tuple[Cache, ...]:
    """Return the attributes in which modules of a model cache what they compute from parameters in eval mode.

    A forward fills a cache, the next one leaves it as it is, and what it holds depends on parameters. The caches are
    empty afterwards. The model is in eval mode and has run since `empty`, its attributes before it ran, was taken.
    """
    filled = attributes_of(model)
    candidates = [key for key, image in filled.items() if _identities(image) != _identities(empty.get(key))]
    if not candidates:
        return ()
    with torch.no_grad():
        run()
    again = attributes_of(model)
    kept = [key for key in candidates if _identities(again.get(key)) == _identities(filled[key])]
    keys = _keys_of({module for module, _ in kept}, filled, empty)
    caches = [_cache(key, empty) for key in (*kept, *keys)]
    if caches:
        with torch.enable_grad(), without_caches(caches, PerCopyLock()):
            after = attributes_of(model) if _runs_without_error(run) else {}
            computed = {
                c.module for c in caches if any(t.requires_grad for t in tensors_in(after.get((c.module, c.name))))
            }
        for module, name in (*candidates, *keys):
            vars(module)[name] = restore_contents(filled[module, name])
        # a module whose cache depends on no parameter keeps it, such as the coordinates of a grid
        caches = [cache for cache in caches if cache.module in computed]
        for cache in caches:
            cache.clear()
    return tuple(caches)


def _cache(key: tuple[nn.Module, str], empty: Attributes) -> Cache:
    module, name = key
    return Cache(module, name, empty.get(key), key in empty)


def _keys_of(modules: set[nn.Module], filled: Attributes, empty: Attributes) -> list[tuple[nn.Module, str]]:
    """Return the attributes without tensors that a forward has set: caches may depend on them."""
    return [
        (module, name)
        for (module, name), image in filled.items()
        if module in modules and not tensors_in(image) and not _are_equal(image, empty.get((module, name), _MISSING))
    ]


def _are_equal(image: Any, other: Any) -> bool:
    if isinstance(image, ContainerSnapshot) and isinstance(other, ContainerSnapshot):
        image, other = image.parts, other.parts
    try:
        return image is other or bool(image == other)
    except (RuntimeError, ValueError, TypeError):  # arrays have no truth value
        return False


def _runs_without_error(run: Callable[[], Any]) -> bool:
    try:
        run()
    except ModelError:  # some modules cannot run without what they hold
        return False
    return True


def _identities(image: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_in(image)]
