"""Nested values that a module takes and returns: tensors, containers of them, and caches of keys and values."""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

#: path to a leaf: argument names, keys, fields and positions
Path = tuple[str, ...]


class CacheKey(str):
    """A part of a path that leads into a cache; in an exported file it stands behind a dot: `past_key_values.0.key`."""


#: an argument's name for a cache in transformers, the second one since 5.24; in exported files it has the first
ARGUMENTS = ("past_key_values", "cache")
_DYNAMIC = "DynamicCache"
_SINGULAR = {"keys": "key", "values": "value"}
_PARTS = ("self_attention_cache", "cross_attention_cache")  # of a cache for an encoder and a decoder

#: ops that write, cut or repeat cached values without changing any
MOVES = frozenset(
    {"cat", "expand", "getitem", "index_copy", "index_select", "narrow", "permute", "repeat", "repeat_interleave"}
    | {"reshape", "roll", "slice", "squeeze", "transpose", "unsqueeze", "view"}
)


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of keys and values, in the form of `transformers`."""
    if isinstance(value, nn.Module) or not callable(getattr(value, "get_seq_length", None)):
        return False
    return isinstance(getattr(value, "layers", None), list) or hasattr(value, "self_attention_cache")


def parts_of(cache: Any) -> list[Any]:
    """Return the caches that a cache for an encoder and a decoder consists of; of another one, itself."""
    return [getattr(cache, name) for name in _PARTS if hasattr(cache, name)] or [cache]


def map_cache(cache: Any, each: Callable[[Path, Any], Any], path: Path) -> Any:
    """Return a copy of a cache with every tensor of values that it holds replaced by `each(path, tensor)`.

    Paths go on with the layer's number and the name that the layer has for the tensor: "0", "key". What a layer
    counts, such as the tokens seen, stays; it follows the length of the new keys where it was that of the old ones.
    """
    result = copy.copy(cache)
    for name in _PARTS:
        if hasattr(cache, name):
            setattr(result, name, map_cache(getattr(cache, name), each, (*path, CacheKey(name.partition("_")[0]))))
    layers = getattr(cache, "layers", None)
    if layers is not None:
        result.layers = [_map_layer(layer, each, (*path, CacheKey(number))) for number, layer in enumerate(layers)]
    return result


def replace_cache(cache: Any, by: Any) -> None:
    """Make a cache hold what another one, made by `map_cache` of it, holds."""
    for name in _PARTS:
        if hasattr(cache, name):
            replace_cache(getattr(cache, name), getattr(by, name))
    if hasattr(cache, "layers"):
        cache.layers = by.layers


def plain_form(value: Any) -> Any:
    """Return a DynamicCache as plain data for a file, and any other value as it is."""
    if type(value).__name__ != _DYNAMIC or not is_cache(value):
        return value
    return {_DYNAMIC: [(layer.keys, layer.values) for layer in value.layers if isinstance(layer.keys, Tensor)]}


def from_plain_form(value: Any) -> Any:
    """Return the value that `plain_form` wrote."""
    if not isinstance(value, dict) or set(value) != {_DYNAMIC}:
        return value
    made = getattr(sys.modules["transformers.cache_utils"], _DYNAMIC)()
    for number, (keys, values) in enumerate(value[_DYNAMIC]):
        made.update(keys, values, number)
    return made


def _map_layer(layer: Any, each: Callable[[Path, Any], Any], path: Path) -> Any:
    result = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            found = each((*path, CacheKey(_SINGULAR.get(name, name))), value)
            # a layer of fixed size writes into its tensors, and the one that was given is the caller's
            setattr(result, name, found.clone() if found is value and has_fixed_size(layer) else found)
        elif isinstance(value, Tensor):
            setattr(result, name, value.clone())
    keys = getattr(layer, "keys", None)
    seen = getattr(layer, "cumulative_length", None)
    if isinstance(keys, Tensor) and isinstance(seen, int) and keys.ndim > 1 and seen == keys.shape[-2]:
        result.cumulative_length = result.keys.shape[-2]
    return result


def has_fixed_size(layer: Any) -> bool:
    """Return whether a layer of a cache has room for a fixed number of tokens, which it counts in a tensor."""
    return isinstance(getattr(layer, "cumulative_length", None), Tensor)


T = TypeVar("T")


def map_leaves(value: Any, each: Callable[[Path, Any], Any], path: Path = (), *, caches: bool = True) -> Any:
    """Return a copy of a value with every leaf replaced by `each(path, leaf)`.

    Containers are tuples and lists, named ones too, mappings, dataclasses, caches of keys and values (unless `caches`
    is False), and what torch's pytrees know; everything else is a leaf. The containers keep their classes.
    """

    def inside(part: Any, name: str) -> Any:
        return map_leaves(part, each, (*path, name), caches=caches)

    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return each(path, value)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: inside(item, str(key)) for key, item in value.items()})
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", None)
        keys = [str(i) for i in range(len(value))] if fields is None else fields
        parts = [inside(item, key) for key, item in zip(keys, value, strict=True)]
        return type(value)(parts) if fields is None else type(value)(*parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            # a frozen one too: the copy is ours
            object.__setattr__(result, field.name, inside(getattr(value, field.name), field.name))
        return result
    if is_cache(value):
        return map_cache(value, each, path) if caches else each(path, value)
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return each(path, value)
    return tree_unflatten([inside(leaf, str(i)) for i, leaf in enumerate(leaves)], spec)


def _like_mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    result = copy.copy(value)
    for key, part in parts.items():
        result[key] = part
    return result


def clone_tensors(value: Any) -> Any:
    """Return a copy of a value with copies of its tensors."""
    return map_leaves(value, lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def leaves_of(value: Any, path: Path = (), *, caches: bool = False) -> list[tuple[Path, Any]]:
    """Return the leaves of a value in order, each with its path; a cache is one leaf, unless `caches` is True."""
    result: list[tuple[Path, Any]] = []

    def note(at: Path, leaf: Any) -> Any:
        result.append((at, leaf))
        return leaf

    map_leaves(value, note, path, caches=caches)
    return result


def tensors_of(value: Any, *, caches: bool = False) -> list[Tensor]:
    """Return the tensors of a value in order, those of caches if asked; one that occurs twice is returned twice."""
    return [leaf for _, leaf in leaves_of(value, caches=caches) if isinstance(leaf, Tensor)]


def floats_of(value: Any, *, caches: bool = False) -> list[Tensor]:
    """Return the floating-point tensors of a value in order, those of caches if asked."""
    return [tensor for tensor in tensors_of(value, caches=caches) if tensor.is_floating_point()]


def name_leaves(pairs: Iterable[tuple[Path, T]], taken: Collection[str] = ()) -> dict[str, T]:
    """Return leaves by their names in the exported file: `pair_0`, `nested_a`; a taken name gets a number.

    Those inside a cache have the names that other tools give them: `past_key_values.0.key`.
    """
    result: dict[str, T] = {}
    for path, leaf in pairs:
        name = wanted = "".join(f".{key}" if isinstance(key, CacheKey) else f"_{key}" for key in path)[1:]
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
    mapped = tuple(map_leaves(arg, each, _begin(name, arg)) for name, arg in zip(names, args, strict=True))
    return mapped, {name: map_leaves(value, each, _begin(name, value)) for name, value in kwargs.items()}


def _begin(name: str, value: Any) -> Path:
    """Return the path of an argument: its name, and for a cache the one that it has in every exported file."""
    return ARGUMENTS[:1] if name in ARGUMENTS and is_cache(value) else tuple(name.split("."))
