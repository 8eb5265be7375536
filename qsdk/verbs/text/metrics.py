"""The metrics `perplexity` and `next_token_agreement` of language models, and the error by the position of tokens."""

import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from qsdk.core.errors import DataError
from qsdk.core.precision.advice import decibels
from qsdk.core.report import Report
from qsdk.core.sims.stateful import StatefulSim
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
    with its sign changed: `metric=lambda sim: -qsdk.analysis.perplexity(sim, tokens)`.

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
        >>> round(qsdk.analysis.perplexity(fair_coin, [[0, 1, 1, 0], [1, 0]]), 6)
        2.0
    """
    total, count = 0.0, 0
    with reading(model, forward) as logits:
        for one in _windows([model], tokens, tokenizer, window, stride, batch_size, progress):
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
    `metric=lambda sim: qsdk.analysis.next_token_agreement(sim, model, tokens)`.

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
        >>> clamped = lambda ids: table[ids.clamp(max=2)]
        >>> qsdk.analysis.next_token_agreement(lambda ids: table[ids], clamped, [0, 1, 2, 3])
        0.75
    """
    same, count = 0, 0
    with reading(one, forward) as first, reading(other, forward) as second:
        for found in _windows([one, other], tokens, tokenizer, window, stride, batch_size, progress):
            equal = first(found.ids).argmax(-1) == second(found.ids).argmax(-1)
            same, count = same + int(equal[:, -found.scored :].sum()), count + equal.shape[0] * found.scored
    return same / count


def error_by_position(
    one: Any,
    other: Any,
    tokens: Any,
    *,
    window: int | None = None,
    tokenizer: Any = None,
    batch_size: int = 1,
    forward: Forward | None = None,
    progress: bool = False,
) -> Report:
    """Compare the logits of two language models by the position of the token: does an error grow with the text?

    Ranges come from texts of some length. Beyond it, keys have been turned further than any that were seen, and sums
    run over more tokens; `calibrate` notes that length as `calibrated_length`, and here the rows part at it.

    Args:
        one: a sim of either side, a module, or a function of ids.
        other: likewise; most often the float model.
        tokens: as for `perplexity`.
        window: tokens that a model reads at once, from position 0 on; None for a text as a whole.
        tokenizer: for strings.
        batch_size: windows of one length that a model reads together.
        forward: `(model, ids)`, to call both yourself.
        progress: show a progress bar.

    Returns:
        Rows `positions` (twice as many in each as before it), `tokens`, `sqnr_db` (of the logits), `agreement` (see
        `next_token_agreement`) and, where `one` is a sim that knows, `calibrated`; summary `calibrated_length`,
        `sqnr_db`, `agreement`.

    Raises:
        ConfigError: a window below 2, strings without a tokenizer, or something that is no model.
        DataError: ids that are none, or a model that does not give logits, or gives NaN.

    Examples:
        >>> import torch, qsdk
        >>> table = torch.eye(8)
        >>> late = lambda ids: table[ids] * torch.linspace(1.0, 1.5, 6)[:, None]
        >>> report = qsdk.analysis.error_by_position(late, lambda ids: table[ids], [1, 2, 3, 4, 5, 6])
        >>> [row["positions"] for row in report.rows]
        ['0', '1', '2 to 3', '4 to 5']
    """
    longest = one.methods.longest if isinstance(one, StatefulSim) else 0
    sums = torch.zeros(4, 0, dtype=torch.float64)  # by position: noise, signal, equal ones, tokens
    with reading(one, forward) as first, reading(other, forward) as second:
        for found in _windows([], tokens, tokenizer, window, None, batch_size, progress):
            got, wanted = first(found.ids).double(), second(found.ids).double()
            equal = (got.argmax(-1) == wanted.argmax(-1)).double()
            parts = [((got - wanted) ** 2).sum(-1), (wanted**2).sum(-1), equal, torch.ones_like(equal)]
            new = torch.stack([part.sum(0) for part in parts])
            size = max(sums.shape[1], new.shape[1])
            before, now = (torch.nn.functional.pad(each, (0, size - each.shape[1])) for each in (sums, new))
            sums = before + now
    size = sums.shape[1]
    edges = sorted({0, *(2**n for n in range((size - 1).bit_length())), min(longest, size), size})
    rows = []
    for begin, end in pairwise(edges):
        place = f"{begin} to {end - 1}" if end > begin + 1 else str(begin)
        known = {"calibrated": end <= longest} if longest else {}
        rows.append({"positions": place, **_facts_of(sums[:, begin:end]), **known})
    facts = _facts_of(sums)
    known = {"calibrated_length": longest} if longest else {}
    return Report("Error by position", rows, {**known, "sqnr_db": facts["sqnr_db"], "agreement": facts["agreement"]})


def _facts_of(sums: torch.Tensor) -> dict[str, Any]:
    """Return the facts about some positions from their sums [4, positions]."""
    noise, signal, equal, count = sums.sum(1).tolist()
    sqnr = decibels(noise / signal) if signal else 0.0
    return {"tokens": int(count), "sqnr_db": sqnr, "agreement": equal / count}


def _windows(
    models: list[Any],
    tokens: Any,
    tokenizer: Any,
    window: int | None,
    stride: int | None,
    batch_size: int,
    progress: bool,
) -> Iterator[Window]:
    """Yield the windows of texts, and warn where one is longer than what a sim was calibrated on."""
    found = list(windows_of(texts_of(tokens, tokenizer), window, stride, batch_size))
    longest = max(one.ids.shape[1] for one in found)
    known = [model.methods.longest for model in models if isinstance(model, StatefulSim) and model.methods.longest]
    if known and longest > min(known):
        warnings.warn(
            f"the sim was calibrated on texts of up to {min(known)} tokens and reads {longest} here: what it makes of "
            "later ones may be further off (qsdk.analysis.error_by_position shows it); "
            "calibrate with texts of that length",
            stacklevel=3,
        )
    return iter(over_batches(found, "tokens", progress))
