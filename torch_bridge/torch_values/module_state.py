"""What modules hold besides their code: kept over a look at them, and what they cache of their parameters."""

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
from qsdk.core.own_lock import OwnLock
from torch_bridge.torch_values.parameters import STATE

_MISSING = object()
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
_OF_TORCH = frozenset({STATE, "_modules", "_parameters", "_buffers", "training"})


@dataclass(frozen=True)
class Image:
    """What a dictionary or a list held at some time, containers in it too."""

    original: Any
    parts: Any

    def put_back(self) -> Any:
        """Have the container hold that again, and return it."""
        if isinstance(self.original, list):
            self.original[:] = [put_back(part) for part in self.parts]
        else:
            self.original.clear()
            self.original.update({key: put_back(part) for key, part in self.parts.items()})
        return self.original

    def renewed(self) -> Any:
        """Return a new container that holds that."""
        if isinstance(self.original, list):
            return [renewed(part) for part in self.parts]
        made = copy.copy(self.original)
        made.clear()
        made.update({key: renewed(part) for key, part in self.parts.items()})
        return made


def image_of(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Return an `Image` of a container, and anything else as it is."""
    if type(value) not in _CONTAINERS or id(value) in above:
        return value
    within = above | {id(value)}
    if isinstance(value, list):
        return Image(value, [image_of(part, within) for part in value])
    return Image(value, {key: image_of(part, within) for key, part in value.items()})


def put_back(image: Any) -> Any:
    """Have what an image is of hold the same again, and return it."""
    return image.put_back() if isinstance(image, Image) else image


def renewed(image: Any) -> Any:
    """Return new containers that hold what an image shows."""
    return image.renewed() if isinstance(image, Image) else image


def tensors_in(value: Any, above: frozenset[int] = frozenset()) -> list[Tensor]:
    """Return the tensors of a value and of the containers in it, parameters left out."""
    if isinstance(value, Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, Image):
        value = value.parts
    if not isinstance(value, dict | list | tuple) or id(value) in above:
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_in(part, above | {id(value)})]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Have the modules of a model, their tensors and the next random numbers be afterwards what they are now."""
    images = [image_of(vars(module)) for module in model.modules()]
    buffers = [(tensor, tensor.detach().clone()) for tensor in model.buffers()]
    written = _Written(model.parameters())
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), written:
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for image in images:
            image.put_back()
        with torch.no_grad():
            for tensor, value in (*buffers, *written.before.values()):
                tensor.detach().copy_(value)


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what tensors held before an op writes into their memory."""

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
    """An attribute in which a module keeps what it has computed of its parameters.

    Attributes:
        module: that has it.
        name: of the attribute.
        empty: its image before the module has computed anything.
        exists: whether the attribute is there by then.
    """

    module: nn.Module
    name: str
    empty: Any
    exists: bool

    def forget(self) -> None:
        """Have the module compute it anew."""
        if self.exists:
            vars(self.module)[self.name] = renewed(self.empty)
        else:
            vars(self.module).pop(self.name, None)


@contextmanager
def forgotten(caches: Sequence[Cache], one_at_a_time: OwnLock) -> Iterator[None]:
    """Have modules compute anew inside what they cache, and keep nothing of it: it depends on the phase of the sim.

    Threads that run a model with caches take turns, or one would forget what another is about to read.
    """
    if not caches:
        yield
        return
    with one_at_a_time:
        for cache in caches:
            cache.forget()
        try:
            yield
        finally:
            for cache in caches:
                cache.forget()


Attributes = dict[tuple[nn.Module, str], Any]


def attributes_of(model: nn.Module) -> Attributes:
    """Return the images of all attributes that the modules of a model have of their own."""
    return {
        (module, name): image_of(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def emptied(before: Attributes, now: Attributes) -> Attributes:
    """Return the attributes that held tensors before and hold none now."""
    return {
        key: image for key, image in now.items() if key in before and tensors_in(before[key]) and not tensors_in(image)
    }


def caches_of(model: nn.Module, empty: Attributes, run: Callable[[], Any]) -> tuple[Cache, ...]:
    """Find what the modules of a model cache of their parameters in eval mode; they have forgotten it afterwards.

    A forward fills a cache, the next one leaves it as it is, and what it holds depends on parameters.

    Args:
        model: in eval mode; it has run since.
        empty: its attributes before it ran.
        run: runs it in float.
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
        with torch.enable_grad(), forgotten(caches, OwnLock()):
            after = attributes_of(model) if _runs(run) else {}
            computed = {
                c.module for c in caches if any(t.requires_grad for t in tensors_in(after.get((c.module, c.name))))
            }
        for module, name in (*candidates, *keys):
            vars(module)[name] = put_back(filled[module, name])
        # a module without a trained cache keeps what it has, such as the places of a grid
        caches = [cache for cache in caches if cache.module in computed]
        for cache in caches:
            cache.forget()
    return tuple(caches)


def _cache(key: tuple[nn.Module, str], empty: Attributes) -> Cache:
    module, name = key
    return Cache(module, name, empty.get(key), key in empty)


def _keys_of(modules: set[nn.Module], filled: Attributes, empty: Attributes) -> list[tuple[nn.Module, str]]:
    """Return the attributes without tensors that a forward has set: a cache may be computed anew where they differ."""
    return [
        (module, name)
        for (module, name), image in filled.items()
        if module in modules and not tensors_in(image) and not _alike(image, empty.get((module, name), _MISSING))
    ]


def _alike(image: Any, other: Any) -> bool:
    if isinstance(image, Image) and isinstance(other, Image):
        image, other = image.parts, other.parts
    try:
        return image is other or bool(image == other)
    except (RuntimeError, ValueError, TypeError):  # arrays have no truth value
        return False


def _runs(run: Callable[[], Any]) -> bool:
    try:
        run()
    except ModelError:  # some modules cannot do without what they hold
        return False
    return True


def _identities(image: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_in(image)]
