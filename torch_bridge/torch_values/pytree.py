"""Nested values that a module takes and returns: tensors, plain values, and containers of them."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

#: path to a leaf: argument names, keys, fields and positions
Path = tuple[str, ...]
T = TypeVar("T")


def map_leaves(value: Any, each: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of a value with every leaf replaced by `each(path, leaf)`.

    Containers are tuples and lists, named ones too, mappings, dataclasses, and what torch's pytrees know; everything
    else is a leaf. The containers keep their classes.
    """
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return each(path, value)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: map_leaves(item, each, (*path, str(key))) for key, item in value.items()})
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", None)
        keys = [str(i) for i in range(len(value))] if fields is None else fields
        parts = [map_leaves(item, each, (*path, key)) for key, item in zip(keys, value, strict=True)]
        return type(value)(parts) if fields is None else type(value)(*parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            part = map_leaves(getattr(value, field.name), each, (*path, field.name))
            object.__setattr__(result, field.name, part)  # a frozen one too: the copy is ours
        return result
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return each(path, value)
    return tree_unflatten([map_leaves(leaf, each, (*path, str(i))) for i, leaf in enumerate(leaves)], spec)


def _like_mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    result = copy.copy(value)
    for key, part in parts.items():
        result[key] = part
    return result


def leaves_of(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return the leaves of a value in order, each with its path."""
    result: list[tuple[Path, Any]] = []

    def note(at: Path, leaf: Any) -> Any:
        result.append((at, leaf))
        return leaf

    map_leaves(value, note, path)
    return result


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value in order; one that occurs twice is returned twice."""
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def floats_of(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a value, in order."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def name_leaves(pairs: Iterable[tuple[Path, T]], taken: Collection[str] = ()) -> dict[str, T]:
    """Return leaves by their names in the exported file: `pair_0`, `nested_a`; a taken name gets a number."""
    result: dict[str, T] = {}
    for path, leaf in pairs:
        name = wanted = "_".join(path)
        number = 1
        while name in result or name in taken:
            name, number = f"{wanted}_{number}", number + 1
        result[name] = leaf
    return result


def input_names(forward: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Return the parameter names of positional arguments of a forward (`args.1` for the second of `*args`)."""
    names: list[str] = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{i}" for i in range(len(args) - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[: len(args)]


def argument_leaves(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[Path, Any]]:
    """Return the leaves of a call's arguments in order; their paths begin with the parameter names of forward."""
    result: list[tuple[Path, Any]] = []
    map_arguments(forward, args, kwargs, lambda path, leaf: result.append((path, leaf)))
    return result


def map_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], each: Callable[[Path, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with every leaf replaced by `each(path, leaf)`; paths as of `argument_leaves`.

    More positional arguments than the forward takes, which it will refuse, have paths that begin with their number.
    """
    names = input_names(forward, args)
    names += [str(i) for i in range(len(names), len(args))]
    mapped = tuple(map_leaves(arg, each, tuple(name.split("."))) for name, arg in zip(names, args, strict=True))
    return mapped, {name: map_leaves(value, each, tuple(name.split("."))) for name, value in kwargs.items()}
