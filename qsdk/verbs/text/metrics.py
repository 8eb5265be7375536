"""The metrics `perplexity` and `next_token_agreement` of language models."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from qsdk.core.errors import DataError
from qsdk.progress import over_batches
from qsdk.verbs.doors.door import Forward
from qsdk.verbs.text.logits import reading
from qsdk.verbs.text.windows import Window, texts_of, windows_of


def perplexity(
    model: Any,
    tokens: Any,
    *,
    window: int | None = None,
    stride: int | None = None,
    tokenizer: Any = None,
    batch_size: int = 1,
    forward: Forward | None = None,
    progress: bool = False,
) -> float:
    """Return how surprised a language model is by texts: `exp(mean(-log p(token | tokens before it)))`.

    The mean is over all tokens of all texts that have one before them in their window. Windows begin every `stride`
    tokens; each token counts once, in the first window that holds it, with at least `window - stride` tokens before it
    (Hugging Face's "Perplexity of fixed-length models"). Without a stride, windows follow one another, as papers on
    quantization have it, and the first token of each does not count. It may serve as a metric, where larger is better,
    with its sign changed: `metric=lambda sim: -qsdk.perplexity(sim, tokens)`.

    Args:
        model: a module that gives logits, one of transformers among them; a sim of either side; or a function of ids.
        tokens: ids in a vector (one text), a matrix (a text per row), a list of these, or mappings with `input_ids` and
            perhaps `attention_mask`, such as a tokenizer gives; with `tokenizer=`, a string or a list of strings.
        window: tokens that the model reads at once; None for a text as a whole, which must not be too long for it.
        stride: tokens from window to window; None for `window`.
        tokenizer: of transformers or tokenizers, or a function of a string that gives ids.
        batch_size: windows of one length that the model reads together.
        forward: `(model, ids)`, to call it yourself; ids are int64 [texts, length].
        progress: show a progress bar.

    Raises:
        ConfigError: sizes that make no sense, strings without a tokenizer, or something that is no model.
        DataError: ids that are none, no token to score, or a model that does not give logits, or gives NaN.

    Examples:
        >>> import torch, qsdk
        >>> def fair_coin(ids):
        ...     return torch.zeros(*ids.shape, 2)
        >>> round(qsdk.perplexity(fair_coin, [[0, 1, 1, 0], [1, 0]]), 6)
        2.0
    """
    total, count = 0.0, 0
    with reading(model, forward) as logits:
        for one in _windows(tokens, tokenizer, window, stride, batch_size, progress):
            scored = min(one.scored, one.ids.shape[1] - 1)  # the first token of a window has none before it
            if scored < 1:
                continue
            given, wanted = logits(one.ids)[:, -1 - scored : -1], one.ids[:, -scored:]
            losses = torch.nn.functional.cross_entropy(given.flatten(0, 1), wanted.flatten(), reduction="none")
            total, count = total + float(losses.double().sum()), count + losses.numel()
    if count == 0:
        raise DataError("no token has one before it, so there is nothing to score; give texts of two tokens or more")
    mean = total / count
    return math.exp(mean) if mean < 700 else math.inf


def next_token_agreement(
    one: Any,
    other: Any,
    tokens: Any,
    *,
    window: int | None = None,
    stride: int | None = None,
    tokenizer: Any = None,
    batch_size: int = 1,
    forward: Forward | None = None,
    progress: bool = False,
) -> float:
    """Return the share of places in texts at which two language models find the same next token the most likely.

    `mean(argmax(logits of one) == argmax(logits of other))` over every token of every text, with at least
    `window - stride` tokens before it where that many are there. It takes no labels, and may serve as a metric:
    `metric=lambda sim: qsdk.next_token_agreement(sim, model, tokens)`.

    Args:
        one: a module, a sim of either side, or a function of ids.
        other: likewise; most often the float model.
        tokens: as for `perplexity`.
        window: tokens that a model reads at once; None for a text as a whole.
        stride: tokens from window to window; None for `window`.
        tokenizer: for strings.
        batch_size: windows of one length that a model reads together.
        forward: `(model, ids)`, to call both yourself.
        progress: show a progress bar.

    Raises:
        ConfigError: sizes that make no sense, strings without a tokenizer, or something that is no model.
        DataError: ids that are none, or a model that does not give logits, or gives NaN.

    Examples:
        >>> import torch, qsdk
        >>> table = torch.eye(4)
        >>> qsdk.next_token_agreement(lambda ids: table[ids], lambda ids: table[ids.clamp(max=2)], [0, 1, 2, 3])
        0.75
    """
    same, count = 0, 0
    with reading(one, forward) as first, reading(other, forward) as second:
        for found in _windows(tokens, tokenizer, window, stride, batch_size, progress):
            equal = first(found.ids).argmax(-1) == second(found.ids).argmax(-1)
            same, count = same + int(equal[:, -found.scored :].sum()), count + equal.shape[0] * found.scored
    return same / count


def _windows(
    tokens: Any, tokenizer: Any, window: int | None, stride: int | None, batch_size: int, progress: bool
) -> Iterator[Window]:
    found = list(windows_of(texts_of(tokens, tokenizer), window, stride, batch_size))
    return iter(over_batches(found, "tokens", progress))
