"""Texts as token ids, from whatever holds them, and the windows in which a model reads a long text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.errors import ConfigError, DataError


@dataclass(frozen=True)
class Window:
    """What a model reads at once.

    Attributes:
        ids: int64 [texts, length].
        scored: the last so many tokens of each row count; those before are context that has counted already.
    """

    ids: Tensor
    scored: int


def texts_of(tokens: Any, tokenizer: Any = None) -> list[Tensor]:
    """Return the texts in `tokens` as int64 vectors.

    Args:
        tokens: ids in a vector (one text), a matrix (a text per row), a list of these, or a mapping with `input_ids`
            and perhaps an `attention_mask` that is 0 at padding; with a tokenizer, a string or several.
        tokenizer: gives ids of a string: one of transformers or tokenizers, or a function.

    Raises:
        ConfigError: strings without a tokenizer, or a tokenizer that gives no ids.
        DataError: no ids, or something else.
    """
    texts = [text for text in _texts(tokens, tokenizer) if len(text)]
    if not texts:
        raise DataError("there are no tokens; give ids as a tensor, or as a list of texts")
    return texts


def windows_of(texts: Sequence[Tensor], window: int | None, stride: int | None, batch_size: int) -> Iterator[Window]:
    """Yield the windows of texts, as in the documentation of transformers on perplexity.

    Args:
        texts: int64 vectors.
        window: tokens that the model reads at once; None for a whole text.
        stride: tokens from the beginning of a window to that of the next one; None for `window`.
        batch_size: texts or windows of one length that the model reads together.

    Raises:
        ConfigError: a size below 1 (2 for a window), or a stride beyond the window.
    """
    _require_sizes(window, stride, batch_size)
    held: list[Tensor] = []
    last: tuple[int, int] | None = None
    for text in texts:
        for ids, scored in _windows(text, window, stride):
            if held and (last != (len(ids), scored) or len(held) == batch_size):
                yield Window(torch.stack(held), last[1] if last else 0)
                held = []
            held.append(ids)
            last = (len(ids), scored)
    if held and last is not None:
        yield Window(torch.stack(held), last[1])


def _windows(text: Tensor, window: int | None, stride: int | None) -> Iterator[tuple[Tensor, int]]:
    """Yield windows of a text, and how many of the last tokens of each are new."""
    size = len(text) if window is None else window
    step, done = stride or size, 0
    for begin in range(0, len(text), step):
        end = min(begin + size, len(text))
        yield text[begin:end], end - done
        done = end
        if end == len(text):
            return


def _require_sizes(window: int | None, stride: int | None, batch_size: int) -> None:
    if window is not None and window < 2:
        raise ConfigError(f"window={window} holds no token with one before it; give 2 or more")
    if stride is not None and (stride < 1 or window is None or stride > window):
        raise ConfigError(f"stride={stride} with window={window}: give a stride from 1 to the window, and a window")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; give 1 or more")


def _texts(tokens: Any, tokenizer: Any) -> Iterator[Tensor]:
    if isinstance(tokens, str):
        yield from _texts(_encoded(tokens, tokenizer), None)
    elif isinstance(tokens, Mapping):
        yield from _unpadded(tokens)
    elif isinstance(tokens, Tensor | np.ndarray):
        yield from _rows(torch.as_tensor(tokens))
    elif isinstance(tokens, Sequence) and tokens and all(isinstance(one, int | np.integer) for one in tokens):
        yield from _rows(torch.tensor([int(one) for one in tokens]))
    elif isinstance(tokens, Iterable):
        for one in tokens:
            if isinstance(one, int | np.integer):
                raise DataError("ids and texts are mixed in one list; give a list of ids, or a list of such lists")
            if isinstance(one, tuple | list) and sum(isinstance(part, Tensor | np.ndarray) for part in one) > 1:
                raise DataError(
                    "a batch holds several tensors, all of which would count as texts; give its token ids alone, "
                    "[batch[0] for batch in data], or mappings with input_ids"
                )
            yield from _texts(one, tokenizer)
    else:
        raise DataError(f"token ids are a tensor, a list of integers or a list of these, not {type(tokens).__name__}")


def _rows(ids: Tensor) -> Iterator[Tensor]:
    if ids.ndim not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"token ids are integers [length] or [texts, length], not {ids.dtype} {tuple(ids.shape)}")
    if ids.numel() and int(ids.min()) < 0:
        raise DataError(f"{int(ids.min())} is no token id; give the ids of the texts, not labels")
    yield from ids.detach().cpu().long()[None] if ids.ndim == 1 else ids.detach().cpu().long()


def _unpadded(batch: Mapping[Any, Any]) -> Iterator[Tensor]:
    if "input_ids" not in batch:
        raise DataError(f"a batch has no input_ids, but {', '.join(map(str, batch))}; name the token ids so")
    texts, mask = list(_texts(batch["input_ids"], None)), batch.get("attention_mask")
    if isinstance(mask, Tensor | np.ndarray) and torch.as_tensor(mask).dtype == torch.bool:
        mask = torch.as_tensor(mask).long()
    masks = [] if mask is None else list(_texts(mask, None))
    if masks and [len(one) for one in masks] != [len(text) for text in texts]:
        raise DataError("the attention_mask has another shape than the input_ids; give one value for each token")
    for index, text in enumerate(texts):
        yield text[masks[index].bool()] if masks else text


def _encoded(text: str, tokenizer: Any) -> Any:
    """Return what a tokenizer makes of a string.

    Raises:
        ConfigError: there is none, or it gives no ids.
    """
    if tokenizer is None:
        raise ConfigError("the tokens are text; give the tokenizer= of the model, or token ids")
    result = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    ids = result["input_ids"] if isinstance(result, Mapping) else getattr(result, "ids", result)
    if isinstance(ids, str):
        raise ConfigError(f"the tokenizer gives text, {ids[:40]!r}, where token ids are wanted")
    return ids
