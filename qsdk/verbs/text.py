"""Texts and language models: perplexity, agreement, the error by position, and text that a model writes itself."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.errors import ConfigError, DataError
from qsdk.core.precision.advice import decibels
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Forward, SeededOptions, require_keywords, run_of
from qsdk.core.sims.stateful import StatefulSim
from qsdk.progress import over_batches
from qsdk.verbs.doors.choose import OnnxSim, QuantSim
from torch_bridge.torch_values.pytree import ARGUMENTS
from torch_bridge.training.training import eval_mode

Logits = Callable[[Tensor], Tensor]


class _WindowOptions(DataOptions, total=False):
    """How a model reads texts in windows."""

    window: int | None
    tokenizer: Any
    batch_size: int


class _StrideOptions(_WindowOptions, total=False):
    """How a model reads texts in windows that may overlap."""

    stride: int | None


class _WritingOptions(SeededOptions, total=False):
    """How a model writes text."""

    begin: Sequence[int]
    temperature: float
    batch_size: int


@dataclass(frozen=True)
class Window:
    """What a model reads at once.

    Attributes:
        ids: int64 [texts, length].
        scored: the last so many tokens of each row count; those before are context that has counted already.
    """

    ids: Tensor
    scored: int


def perplexity(model: Any, tokens: Any, **options: Unpack[_StrideOptions]) -> float:
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
        options: `window`: tokens that the model reads at once (a text as a whole). `stride`: tokens from window to
            window (`window`). `tokenizer`: of transformers or tokenizers, or a function of a string that gives ids.
            `batch_size`: windows of one length that the model reads together (1). `forward`: `(model, ids)`, to call it
            yourself; ids are int64 [texts, length]. `progress`: show a progress bar (False).

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
    require_keywords(perplexity, options)
    total, count = 0.0, 0
    with _logits_of(model, options) as logits:
        for one in _windows([model], tokens, options):
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


def next_token_agreement(one: Any, other: Any, tokens: Any, **options: Unpack[_StrideOptions]) -> float:
    """Return the share of places in texts at which two language models find the same next token the most likely.

    `mean(argmax(logits of one) == argmax(logits of other))` over every token of every text, with at least
    `window - stride` tokens before it where that many are there. It takes no labels, and may serve as a metric:
    `metric=lambda sim: qsdk.analysis.next_token_agreement(sim, model, tokens)`.

    Args:
        one: a module, a sim of either side, or a function of ids.
        other: likewise; most often the float model.
        tokens: as for `perplexity`.
        options: `window`: tokens that a model reads at once (a text as a whole). `stride`: tokens from window to window
            (`window`). `tokenizer`: of transformers or tokenizers, or a function of a string that gives ids.
            `batch_size`: windows of one length that a model reads together (1). `forward`: `(model, ids)`, to call both
            yourself; ids are int64 [texts, length]. `progress`: show a progress bar (False).

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
    require_keywords(next_token_agreement, options)
    same, count = 0, 0
    with _logits_of(one, options) as first, _logits_of(other, options) as second:
        for part in _windows([one, other], tokens, options):
            equal = first(part.ids).argmax(-1) == second(part.ids).argmax(-1)
            same, count = same + int(equal[:, -part.scored :].sum()), count + equal.shape[0] * part.scored
    return same / count


def error_by_position(one: Any, other: Any, tokens: Any, **options: Unpack[_WindowOptions]) -> Report:
    """Compare the logits of two language models by the position of the token: does an error grow with the text?

    Ranges come from texts of some length. Beyond it, keys have been turned further than any that were seen, and sums
    run over more tokens; `calibrate` notes that length as `calibrated_length`, and here the rows part at it.

    Args:
        one: a sim of either side, a module, or a function of ids.
        other: likewise; most often the float model.
        tokens: as for `perplexity`.
        options: `window`: tokens that a model reads at once, from position 0 on (a text as a whole). `tokenizer`,
            `batch_size`, `forward`, `progress`: as for `perplexity`.

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
    require_keywords(error_by_position, options)
    longest = one.methods.longest if isinstance(one, StatefulSim) else 0
    sums = torch.zeros(4, 0, dtype=torch.float64)  # by position: noise, signal, equal ones, tokens
    with _logits_of(one, options) as first, _logits_of(other, options) as second:
        for part in _windows([], tokens, options):
            got, wanted = first(part.ids).double(), second(part.ids).double()
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


def generate_text(model: Any, texts: int, length: int, **options: Unpack[_WritingOptions]) -> list[Any]:
    """Return texts that a language model writes itself, as data to calibrate, to round, and above all to train with.

    Each token is drawn from the model's own probabilities, so that no data of yours is needed and there is as much of
    it as you have time for. It knows nothing that the model does not: measure on texts of your own. Texts go on behind
    a token that ends one, as in packed training data.

    Args:
        model: the float model, a module that gives logits; with a cache where it takes one, as those of transformers
            do, else it reads the whole text for each token. Or a sim, or a function of ids.
        texts: how many.
        length: tokens of each, those in `begin` included.
        options: `begin`: ids that every text begins with; by default the `bos_token_id` in the model's `config`, and
            where there is none, a token drawn from the whole vocabulary and the three most likely behind it (LLM-QAT).
            `temperature`: divides the logits (1.0). `batch_size`: texts written together, the rows of a batch (32).
            `seed`: of the draws (0). `forward`: `(model, ids)`, to call the model yourself, without a cache.
            `progress`: show a bar (True).

    Returns:
        Batches for `calibrate`, other verbs, and `distill_loss`: int64 [batch_size, length], as `{"input_ids": ids}`
        where the model's forward has an argument of that name.

    Raises:
        ConfigError: sizes or a temperature that make no sense, or something that is no model.
        DataError: a model that does not give logits, or gives NaN.

    Source: Liu et al. 2023, LLM-QAT, section 2.1.

    Examples:
        >>> import torch, qsdk
        >>> table = 99 * torch.eye(5).roll(1, 1)  # behind each token comes the next
        >>> qsdk.train.generate_text(lambda ids: table[ids], 1, 4, begin=[2], progress=False)
        [tensor([[2, 3, 4, 0]])]
    """
    run, temperature, size = (run_of(generate_text, options), *_sizes(texts, length, options))
    module = model.model if isinstance(model, QuantSim) else model
    takes = set(inspect.signature(module.forward).parameters if isinstance(module, nn.Module) else ())
    facts = getattr(module, "config", None)
    first, longest = (getattr(facts, name, None) for name in ("bos_token_id", "max_position_embeddings"))
    begin = list(options.get("begin", [] if first is None else [int(first)]))
    if len(begin) >= length or length > (longest or length):
        raise ConfigError(f"length={length} is not beyond begin={begin}, or beyond the model's {longest} positions")
    cache = next((name for name in ARGUMENTS if name in takes), None) if isinstance(model, nn.Module) else None
    generator, written = torch.Generator().manual_seed(run.seed), []
    with _logits_of(model, options) as whole:
        for at in over_batches(range(0, texts, size), "texts", run.progress):
            rows = min(size, texts - at)
            logits = whole if cache is None or "forward" in options else _Reader(model, cache)
            ids, likeliest = torch.tensor(begin, dtype=torch.long).expand(rows, -1), 0
            if not begin:
                known = whole(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
                ids, likeliest = torch.randint(known, (rows, 1), generator=generator), 1 + _LIKELIEST
            while ids.shape[1] < length:
                last = logits(ids)[:, -1]
                drawn = last.argmax(-1) if ids.shape[1] < likeliest else _drawn(last / temperature, generator)
                ids = torch.cat([ids, drawn[:, None]], 1)
            written.append({"input_ids": ids} if "input_ids" in takes else ids)
    return written


#: tokens behind one drawn from the vocabulary that are not drawn, so that the text finds into the language
_LIKELIEST = 3


def _sizes(texts: int, length: int, options: Mapping[str, Any]) -> tuple[float, int]:
    """Return the temperature and the texts of a batch."""
    temperature, size = options.get("temperature", 1.0), options.get("batch_size", 32)
    if texts < 1 or size < 1 or length < 2:
        raise ConfigError(f"texts={texts} and batch_size={size} must be 1 at least, and length={length} 2")
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be positive; a small one takes the likeliest tokens")
    return float(temperature), int(size)


class _Reader:
    """A model that reads one batch of texts as they grow, and of each no token twice, by the cache that it keeps."""

    def __init__(self, model: nn.Module, cache: str) -> None:
        self._model, self._cache, self._device = model, cache, _device(model)
        self._past, self._read = None, 0

    def __call__(self, ids: Tensor) -> Tensor:
        new = ids[:, self._read :]
        with torch.no_grad():
            result = self._model(input_ids=new.to(self._device), use_cache=True, **{self._cache: self._past})
        self._past = getattr(result, self._cache, None)
        self._read = 0 if self._past is None else ids.shape[1]
        return _checked(_found(result), new)


def _drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token of each row [texts, vocabulary], drawn by its probabilities: one random number a row."""
    sums = logits.double().softmax(-1).cumsum(-1)
    place = torch.rand(len(sums), 1, dtype=torch.float64, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, place, right=True)[:, 0].clamp(max=sums.shape[1] - 1)


def _facts_of(sums: torch.Tensor) -> dict[str, Any]:
    """Return the facts about some positions from their sums [4, positions]."""
    noise, signal, equal, count = sums.sum(1).tolist()
    sqnr = decibels(noise / signal) if signal else 0.0
    return {"tokens": int(count), "sqnr_db": sqnr, "agreement": equal / count}


def _windows(models: list[Any], tokens: Any, options: Mapping[str, Any]) -> Iterator[Window]:
    """Yield the windows of texts, and warn where one is longer than what a sim was calibrated on."""
    texts = texts_of(tokens, options.get("tokenizer"))
    sizes = options.get("window"), options.get("stride"), options.get("batch_size", 1)
    windows = list(windows_of(texts, *sizes))
    longest = max(one.ids.shape[1] for one in windows)
    known = [model.methods.longest for model in models if isinstance(model, StatefulSim) and model.methods.longest]
    if known and longest > min(known):
        warnings.warn(
            f"the sim was calibrated on texts of up to {min(known)} tokens and reads {longest} here: what it makes of "
            "later ones may be further off (qsdk.analysis.error_by_position shows it); "
            "calibrate with texts of that length",
            stacklevel=3,
        )
    return iter(over_batches(windows, "tokens", options.get("progress", False)))


@contextmanager
def _logits_of(model: Any, options: Mapping[str, Any]) -> Iterator[Logits]:
    """Yield a function of token ids [texts, length] whose value is the logits [texts, length, vocabulary], float32.

    A module is in eval mode inside the block.
    """
    forward: Forward | None = options.get("forward")
    module = model.model if isinstance(model, QuantSim) else model
    if not (callable(model) or isinstance(model, OnnxSim) or forward is not None):
        raise ConfigError(f"{type(model).__name__} is no model; give a module, a sim, or a function of token ids")

    def logits(ids: Tensor) -> Tensor:
        placed = ids.to(_device(module)) if isinstance(module, nn.Module) else ids
        with torch.no_grad():
            if forward is not None:
                result = forward(model, placed)
            else:
                result = model.run(_feeds(model, ids)) if isinstance(model, OnnxSim) else model(placed)
        return _checked(_found(result), ids)

    if isinstance(module, nn.Module):
        with eval_mode(module):
            yield logits
    else:
        yield logits


def _device(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _feeds(sim: OnnxSim, ids: Tensor) -> dict[str, Any]:
    """Return the inputs of an ONNX decoder for whole texts: ids, and what follows from them."""
    names = [sim.graph.tensors[tensor].name for tensor in sim.graph.inputs]
    texts, length = ids.shape
    known = {"attention_mask": np.ones((texts, length), np.int64)}
    known["position_ids"] = np.tile(np.arange(length), (texts, 1))
    own = names[0] if len(names) == 1 else "input_ids"
    given = {own: ids.numpy(), **{name: known[name] for name in names if name in known}}
    if missing := [name for name in names if name not in given]:
        raise ConfigError(f"the model takes {', '.join(missing)} besides token ids; call it yourself with forward=")
    return given


def _found(result: Any) -> Any:
    """Return the logits in what a model returns: by that name, or the first tensor of three dimensions."""
    if isinstance(result, Mapping) and "logits" in result:
        return result["logits"]
    if hasattr(result, "logits"):
        return result.logits
    if isinstance(result, tuple | list):
        return next((one for one in result if getattr(one, "ndim", 0) == 3), result)
    return result


def _checked(found: Any, ids: Tensor) -> Tensor:
    shape = tuple(getattr(found, "shape", ()))
    if len(shape) != 3 or shape[:2] != tuple(ids.shape):
        what = f"values of shape {shape}" if shape else f"a {type(found).__name__}"
        raise DataError(
            f"the model gives {what} for token ids {tuple(ids.shape)}, not logits [texts, length, vocabulary]; give "
            "forward=lambda model, ids: ... that returns them"
        )
    if int(ids.max()) >= shape[2]:
        raise DataError(
            f"token {int(ids.max())} is beyond the {shape[2]} that the model knows; give its own tokenizer's"
        )
    result = torch.as_tensor(found).detach().float().cpu()
    if not bool(torch.isfinite(result).any(-1).all()) or bool(result.isnan().any()):
        raise DataError(f"the logits for tokens {ids[0, :4].tolist()}... are NaN, or all infinite")
    return result


def texts_of(tokens: Any, tokenizer: Any = None) -> list[Tensor]:
    """Return the texts in `tokens` as int64 vectors.

    Args:
        tokens: ids in a vector (one text), a matrix (a text per row), a list of these, or a mapping with `input_ids`
            and perhaps an `attention_mask` that is 0 at padding; with a tokenizer, a string or several.
        tokenizer: gives ids of a string: one of transformers or tokenizers, or a function.
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
    """
    _require_sizes(window, stride, batch_size)
    held: list[Tensor] = []
    last: tuple[int, int] | None = None
    for text in texts:
        for ids, scored in _windows_of_text(text, window, stride):
            if held and (last != (len(ids), scored) or len(held) == batch_size):
                yield Window(torch.stack(held), last[1] if last else 0)
                held = []
            held.append(ids)
            last = (len(ids), scored)
    if held and last is not None:
        yield Window(torch.stack(held), last[1])


def _windows_of_text(text: Tensor, window: int | None, stride: int | None) -> Iterator[tuple[Tensor, int]]:
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
    """Return what a tokenizer makes of a string."""
    if tokenizer is None:
        raise ConfigError("the tokens are text; give the tokenizer= of the model, or token ids")
    result = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    ids = result["input_ids"] if isinstance(result, Mapping) else getattr(result, "ids", result)
    if isinstance(ids, str):
        raise ConfigError(f"the tokenizer gives text, {ids[:40]!r}, where token ids are wanted")
    return ids
