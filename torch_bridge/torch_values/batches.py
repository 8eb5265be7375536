"""Feeding data: tensors, tuples (positional) or mappings (keywords), and the example of a decoder's step."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qsdk.core.errors import ConfigError, DataError, QsdkError
from qsdk.progress import numbered_batches
from torch_bridge.torch_values.parameters import dtype_name, main_dtype
from torch_bridge.torch_values.pytree import (
    ARGUMENTS,
    Path,
    argument_leaves,
    has_fixed_size,
    input_names,
    is_cache,
    leaves_of,
    map_arguments,
    map_leaves,
    parts_of,
)

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Example:
    """The arguments of one call.

    Attributes:
        args: positional.
        kwargs: by keyword.
        dynamic_shapes: the dynamic axes, as the user named them; None for the batch axis where that is possible.
        device: of the model that it was given with; None where that lies on several.
        apart: the paths of tensors that were on another device then, such as the lengths of a packed sequence.
        float32_edges: whether an exported file takes and gives float32 where the module has bfloat16 or float16.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    device: torch.device | None = None
    apart: frozenset[Path] = frozenset()
    float32_edges: bool = False

    @property
    def has_cache(self) -> bool:
        """Return whether a cache of keys and values is among the arguments; the model's own is an output then."""
        return any(is_cache(value) for value in (*self.args, *self.kwargs.values()))

    def beside(self, model: nn.Module) -> "Example":
        """Return the example with the device of its model, and the tensors that are on another one."""
        device = only_device(model)
        leaves = argument_leaves(model.forward, self.args, self.kwargs)
        apart = {path for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.device != device}
        return replace(self, device=device, apart=frozenset() if device is None else frozenset(apart))

    def placed(self, model: nn.Module) -> "Example":
        """Return the example on the device of the model, which may have moved; what was apart from it stays."""
        args, kwargs = move_arguments(model, self.args, self.kwargs, self)
        return replace(self, args=args, kwargs=kwargs)

    def converted(self, old: torch.dtype | None, new: torch.dtype | None) -> "Example":
        """Return the example with its tensors of one dtype converted to another."""
        if old == new or old is None or new is None:
            return self
        args, kwargs = map_leaves(
            (self.args, dict(self.kwargs)),
            lambda _, leaf: leaf.to(new) if isinstance(leaf, Tensor) and leaf.dtype == old else leaf,
        )
        return replace(self, args=args, kwargs=kwargs)


def as_example(value: Any) -> Example:
    """Return the arguments in an example or batch: a tensor, a tuple or list (positional), or a mapping (keywords)."""
    if isinstance(value, Example):  # of a sim
        return value
    if isinstance(value, Tensor):
        return Example((value,), {})
    if isinstance(value, tuple | list):
        return Example(tuple(value), {})
    if isinstance(value, Mapping):
        return Example((), dict(value))
    batches = isinstance(value, Iterable) and not hasattr(value, "dtype")
    remedy = "give one of its batches" if batches else "convert it to tensors first"
    if value is None:
        remedy = "give what the module is called with, such as one batch of data"
    elif hasattr(value, "__array_interface__"):
        remedy += ", by torch.from_numpy"
    raise DataError(f"expected a tensor, a tuple or a mapping, got {type(value).__name__}; {remedy}")


def only_device(model: nn.Module) -> torch.device | None:
    """Return the device of all parameters of a model (or buffers, if it has none); None where they are on several."""
    devices = {tensor.device for tensor in model.parameters()} or {tensor.device for tensor in model.buffers()}
    return devices.pop() if len(devices) == 1 else None


def move_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], example: Example
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with their tensors on the device of the model.

    A tensor that was apart from the model in the example stays where it is. Where the model has moved since, the
    example cannot tell which ones that are; arguments of which any is on the model's device then stay as they are.
    """
    device = only_device(model)
    present = {leaf.device for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)}
    if device is None or present <= {device} or (device in present and device != example.device):
        return args, dict(kwargs)
    return map_arguments(
        model.forward,
        args,
        kwargs,
        lambda path, leaf: leaf.to(device) if isinstance(leaf, Tensor) and path not in example.apart else leaf,
    )


def feed(model: nn.Module, batch: Any, example: Example, forward: Forward | None, where: str) -> Any:
    """Call the model on a batch, which goes to the model's device unless the user calls the model himself."""
    if forward is not None:
        return forward(model, batch)
    given = as_example(batch)
    surplus = len(given.args) - len(example.args)
    if given.args and surplus > 0:
        raise DataError(
            f"{where} has {len(given.args)} elements, the model was quantized with {len(example.args)}; if the rest "
            "are labels, give qsdk.inputs_only(loader) as the data, or pass forward=lambda m, b: m(b[0])"
        )
    args, kwargs = move_arguments(model, given.args, given.kwargs, example)
    args, kwargs = map_leaves((args, kwargs), lambda _, leaf: leaf)  # a model writes into a cache, which is the user's
    try:
        return model(*args, **kwargs)
    except QsdkError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = [tuple(v.shape) for v in (*given.args, *given.kwargs.values()) if isinstance(v, Tensor)]
        usual = "give batches shaped like the example, or forward= to call the model yourself"
        remedy = other_dtype(model, given) or usual
        raise DataError(f"the model does not run on {where} (tensors of shape {shapes}): {error}; {remedy}") from error


def other_dtype(model: nn.Module, given: Example) -> str:
    """Return how to convert inputs of another float dtype than the model's, or nothing where there are none."""
    own = main_dtype(model)
    leaves = [leaf for leaf in tree_leaves((given.args, dict(given.kwargs))) if isinstance(leaf, Tensor)]
    others = [leaf.dtype for leaf in leaves if leaf.is_floating_point() and leaf.dtype != own]
    if own is None or not others:
        return ""
    return (
        f"its floats are {dtype_name(others[0])} and the model computes in {dtype_name(own)}: convert them, as in "
        f"x.to({own}), or the model by sim.model.to({others[0]})"
    )


def progress_over(
    data: Iterable[Any], title: str, progress: bool, *, skip_empty: bool = True
) -> Iterator[tuple[int, Any]]:
    """Yield numbered batches, with a progress bar; `skip_empty` leaves out those of no rows."""
    types: dict[str, Any] = {"one": (Tensor, Mapping), "other": (str, bytes, nn.Module)}
    return numbered_batches(data, title, progress, **types, has_no_rows=_has_no_rows if skip_empty else None)


def _has_no_rows(batch: Any) -> bool:
    """Return whether all tensors of a batch have a first axis of length 0."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    return bool(leaves) and all(leaf.shape[0] == 0 for leaf in leaves)


def require_reiterable(data: Iterable[Any], verb: str) -> None:
    """Refuse one-shot iterators where several passes are needed."""
    if isinstance(data, Iterator):
        raise DataError(f"{verb} reads the data several times, a generator gives it once; pass list(data)")


_DECODER_TOKENS = "decoder_input_ids"
_TOKENS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"


def as_step(model: nn.Module, example: Example) -> Example:
    """Return an example of tokens [batch, length] as a step: the second half of them, and the cache of the first half.

    The model is a decoder in the form of `transformers`; the example has `input_ids`, positional or by name.
    """
    called = getattr(model, "get_base_model", lambda: model)()  # peft's wrapper hands its keywords on
    taken = inspect.signature(called.forward).parameters
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
    """Refuse an example whose cache keeps a window of tokens, or has a fixed size: its file would be wrong later on."""
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
    """Return the cache after some tokens, one that keeps all of them, also for layers with a sliding window."""
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
