"""Caches of keys and values, which a decoder takes and gives back from step to step, such as `DynamicCache`."""

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

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
    """Return the value that `plain_form` wrote.

    Raises:
        LookupError: it is a cache, and no model of `transformers` is loaded.
    """
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
