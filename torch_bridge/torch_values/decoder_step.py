"""The example of a decoder's step: its last tokens beside the cache of those before."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ConfigError
from torch_bridge.torch_values.batches import Example
from torch_bridge.torch_values.caches import ARGUMENTS, has_fixed_size, is_cache, parts_of
from torch_bridge.torch_values.pytree import input_names, leaves_of

_DECODER_TOKENS = "decoder_input_ids"
_TOKENS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"


def as_step(model: nn.Module, example: Example) -> Example:
    """Return an example of tokens [batch, length] as a step: the second half of them, and the cache of the first half.

    Args:
        model: a decoder in the form of `transformers`, which takes a cache of keys and values and gives it back.
        example: with `input_ids`, positional or by name, and perhaps an `attention_mask`.

    Raises:
        ConfigError: the model has no cache, or an encoder as well, or the example has no three tokens.
    """
    taken = inspect.signature(model.forward).parameters
    names = input_names(model.forward, example.args)
    given = {**dict(zip(names, example.args, strict=False)), **example.kwargs}
    tokens = given.get(_TOKENS)
    if _DECODER_TOKENS in taken:
        raise ConfigError(
            f"kv_cache is chosen, and {type(model).__name__} has an encoder beside its decoder; give quantize an "
            "example of one step, with encoder_outputs and past_key_values"
        )
    argument = next((name for name in ARGUMENTS if name in taken), None)
    # a step of one token takes a path of its own, which would be the file's
    if argument is None or not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 3:
        raise ConfigError(
            f"kv_cache is chosen, and the example has no cache that {type(model).__name__} could go on from; give "
            "quantize one of a step, with past_key_values, or input_ids of three tokens at least"
        )
    past = tokens.shape[1] // 2
    cache = _filled_cache(model, tokens[:, :past], argument)
    mask = given.get(_MASK)
    step = {
        _TOKENS: tokens[:, past:],
        _MASK: torch.ones_like(tokens) if mask is None else mask,
        _POSITIONS: torch.arange(past, tokens.shape[1], device=tokens.device)[None].repeat(len(tokens), 1),
        argument: cache,
    }
    step = {name: value for name, value in step.items() if name in taken}
    args = tuple(step.pop(name, value) for name, value in zip(names, example.args, strict=False))
    return replace(example, args=args, kwargs={**example.kwargs, **step})


def require_whole_caches(example: Example) -> None:
    """Refuse an example whose cache keeps a window of tokens, or has a fixed size: its file would be wrong later on.

    Raises:
        ConfigError: names the remedy.
    """
    for value in (*example.args, *example.kwargs.values()):
        for cache in parts_of(value) if is_cache(value) else ():
            kind, layers = type(cache).__name__, getattr(cache, "layers", ())
            if any(map(has_fixed_size, layers)):
                raise ConfigError(
                    f"the cache of the example, a {kind}, has a fixed size and counts its tokens in place: the "
                    "exported file would write each token where the example's stands; give a cache that grows, "
                    "DynamicCache(). The sim generates with a fixed one all the same"
                )
            if any(getattr(layer, "is_sliding", False) for layer in layers):
                raise ConfigError(
                    "the cache of the example keeps a sliding window alone, and the exported file would count on how "
                    f"far it has slid; give a cache that keeps all tokens, {kind}() without the model's config"
                )


def _filled_cache(model: nn.Module, tokens: Tensor, argument: str) -> Any:
    """Return the cache after some tokens, one that keeps all of them, also for layers with a sliding window.

    Args:
        model: a decoder.
        tokens: [batch, length].
        argument: of the model, that takes the cache.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            first = _cache_of(model(**{_TOKENS: tokens, "use_cache": True}))
            whole = type(first)()
            return _cache_of(model(**{_TOKENS: tokens, argument: whole, "use_cache": True}))
    finally:
        for module, training in modes.items():
            module.training = training


def _cache_of(result: Any) -> Any:
    found = next((leaf for _, leaf in leaves_of(result) if is_cache(leaf)), None)
    if found is None:
        raise ConfigError("kv_cache is chosen, and the model gives back no cache; set use_cache=True in its config")
    return found
