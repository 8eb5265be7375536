"""Perplexity and agreement of language models, against computations by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_decoders import decoder
from torch import nn

import qsdk
from qsdk.analysis import error_by_position, next_token_agreement, perplexity

VOCABULARY = 16


class Bigram(nn.Module):
    """Logits that depend on the last token alone, so that windows change nothing but what is scored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        return self.head(self.table(ids))


class Counting(nn.Module):
    """Logits that depend on how many tokens came before: what a window changes."""

    def forward(self, ids):
        place = torch.arange(ids.shape[1]).float()[None, :, None]
        return torch.sin(place + torch.arange(VOCABULARY).float()) * 3 + torch.zeros(*ids.shape, 1)


def ids(length: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def log_probability(model: nn.Module, context: torch.Tensor, token: int) -> float:
    with torch.no_grad():
        scores = model(context[None])[0, -1].double().tolist()
    return scores[token] - math.log(sum(math.exp(one) for one in scores))


@pytest.mark.parametrize("model", [Bigram(), Counting()], ids=["bigram", "counting"])
@pytest.mark.parametrize(("window", "stride"), [(None, None), (8, None), (8, 3), (8, 8), (40, 1), (5, 1)])
def test_every_token_is_scored_once_with_what_is_before_it_in_its_window(model, window, stride):
    text = ids(23)
    size = window or len(text)
    step = stride or size
    losses, done, begin = [], 0, 0
    while done < len(text):
        end = min(begin + size, len(text))
        losses += [-log_probability(model, text[begin:t], int(text[t])) for t in range(max(done, begin + 1), end)]
        done, begin = end, begin + step
    overlap = size - step > 0
    assert len(losses) == (len(text) - 1 if overlap or size >= len(text) else len(text) - math.ceil(len(text) / size))
    wanted = math.exp(sum(losses) / len(losses))
    assert perplexity(model, text, window=window, stride=stride) == pytest.approx(wanted, rel=1e-6)


def test_the_mean_is_over_tokens_and_batches_change_nothing():
    model, texts = Bigram(), [ids(9), ids(2, seed=1), ids(9, seed=2), ids(1, seed=3)]
    losses = [-log_probability(model, text[:t], int(text[t])) for text in texts for t in range(1, len(text))]
    wanted = math.exp(sum(losses) / len(losses))
    for size in (1, 2, 7):
        assert perplexity(model, texts, batch_size=size) == pytest.approx(wanted, rel=1e-6)
    matrix = torch.stack([texts[0], texts[2]])
    by_rows = perplexity(model, matrix)
    assert perplexity(model, matrix.tolist(), batch_size=2) == pytest.approx(by_rows, rel=1e-6)
    assert perplexity(model, [matrix.numpy()], batch_size=2) == pytest.approx(by_rows, rel=1e-6)
    assert perplexity(model, [{"input_ids": matrix}]) == pytest.approx(by_rows, rel=1e-6)
    assert perplexity(model, [np.int64(3), np.int64(4)]) == perplexity(model, [3, 4])


def test_the_error_of_each_position_is_that_of_its_tokens_alone():
    texts, model = [ids(6), ids(9, seed=1)], Counting()

    def other(given: torch.Tensor) -> torch.Tensor:
        logits = model(given)
        logits[:, 4:] += logits[:, 4:].roll(1, -1) * 0.1
        return logits

    report = error_by_position(other, model, texts)
    assert [(row["positions"], row["tokens"]) for row in report.rows] == [
        *(("0", 2), ("1", 2), ("2 to 3", 4)),
        *(("4 to 7", 6), ("8", 1)),
    ]
    assert [row["sqnr_db"] for row in report.rows[:3]] == [200.0] * 3
    wanted = torch.cat([model(text[None, :8])[0, 4:] for text in texts])
    noise = wanted.roll(1, -1) * 0.1
    assert report.rows[3]["sqnr_db"] == pytest.approx(
        10 * math.log10(float((wanted**2).sum() / (noise**2).sum())), 1e-4
    )
    assert report.rows[3]["agreement"] == float(((wanted + noise).argmax(-1) == wanted.argmax(-1)).double().mean())
    assert "calibrated_length" not in report.summary


def test_padding_is_left_out():
    model, text = Bigram(), ids(6)
    padded = {"input_ids": torch.stack([torch.cat([text, torch.zeros(2, dtype=torch.long)]), ids(8, seed=1)])}
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    given = perplexity(model, [{**padded, "attention_mask": mask}])
    assert given == pytest.approx(perplexity(model, [text, ids(8, seed=1)]), rel=1e-6)
    assert given != pytest.approx(perplexity(model, [padded]), rel=1e-6)


class Words:
    """What tokenizers of transformers give."""

    def __call__(self, text: str) -> dict:
        return {"input_ids": [int(word) for word in text.split()]}


class Encoder:
    """What the package tokenizers gives."""

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[int(word) for word in text.split()])


@pytest.mark.parametrize("tokenizer", [Words(), Encoder(), lambda text: [int(word) for word in text.split()]])
def test_any_tokenizer(tokenizer):
    model = Bigram()
    wanted = perplexity(model, [[3, 1, 4, 1, 5], [9, 2, 6]])
    assert perplexity(model, ["3 1 4 1 5", "9 2 6"], tokenizer=tokenizer) == wanted
    assert perplexity(model, "9 2 6", tokenizer=tokenizer) == perplexity(model, [9, 2, 6])


def test_agreement_by_hand():
    one, other, text = Bigram(), Counting(), ids(30)
    with torch.no_grad():
        first = [int(one(text[t : t + 1][None])[0, -1].argmax()) for t in range(30)]
        second = [int(other(text[None, :1].expand(1, t % 10 + 1))[0, -1].argmax()) for t in range(30)]
    wanted = sum(a == b for a, b in zip(first, second, strict=True)) / 30
    assert next_token_agreement(one, other, text, window=10) == wanted
    assert next_token_agreement(one, one, text) == 1.0
    assert next_token_agreement(one, other, [text[:10], text[10:20], text[20:]], batch_size=3) == wanted
    noisy = Bigram()
    with torch.no_grad():
        noisy.head.bias[int(first[0])] += 100
    assert next_token_agreement(one, noisy, text) == first.count(first[0]) / 30


def test_modules_sims_and_files_of_both_sides(tmp_path: Path):
    model, texts = Bigram().eval(), torch.stack([ids(12, seed=seed) for seed in range(4)])
    sim = qsdk.quantize(model, texts, qsdk.w8a8(), dynamic_shapes={"ids": {0: "texts", 1: "length"}})
    qsdk.calibrate(sim, [texts], progress=False)
    model.train()
    exact = perplexity(model, texts)
    assert model.training
    quantized = perplexity(sim, texts)
    assert quantized != exact
    assert quantized == pytest.approx(exact, rel=0.05)
    with torch.no_grad():
        logits = sim(texts)
    wanted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).exp()
    assert quantized == pytest.approx(float(wanted), rel=1e-6)
    qsdk.export(sim, tmp_path / "model.onnx")
    file = qsdk.quantize(tmp_path / "model.onnx")
    assert perplexity(file, texts) == pytest.approx(quantized, rel=1e-5)
    assert next_token_agreement(file, sim, texts) == 1.0
    assert perplexity(lambda given: sim.model(given), texts) == quantized
    assert perplexity(sim, texts, forward=lambda one, given: {"logits": one(given)}) == quantized


def test_padding_may_be_a_mask_of_truth_values_and_a_batch_a_list_of_one_tensor():
    torch.manual_seed(0)
    model, texts = Bigram().eval(), torch.stack([ids(6), ids(6, seed=1)])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    wanted = perplexity(model, [texts[0, :4], texts[1, 2:]])
    for kind in (torch.int64, torch.bool):
        assert perplexity(model, [{"input_ids": texts, "attention_mask": mask.to(kind)}]) == wanted
    assert perplexity(model, [[texts]]) == perplexity(model, texts)


def test_decoders_of_transformers():
    model, text = decoder("Llama", num_hidden_layers=1), ids(20)
    with torch.no_grad():
        wanted = model(text[None], labels=text[None]).loss.exp()
    assert perplexity(model, text) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.slow
def test_as_metrics():
    torch.manual_seed(1)
    model, texts = Bigram().eval(), torch.stack([ids(12, seed=seed) for seed in range(4)])
    sim = qsdk.quantize(model, texts, qsdk.w8a8().override("head", weight="int2"))
    qsdk.calibrate(sim, [texts], progress=False)

    def metric(current) -> float:
        return -perplexity(current, texts)

    def agreement(current) -> float:
        return next_token_agreement(current, model, texts)

    report = qsdk.mixed_precision(sim, [texts], metric, max_drop=0.2, progress=False)
    assert report.summary["met"]
    assert report.summary["reference"] == pytest.approx(-perplexity(model, texts), rel=1e-6)
    assert metric(sim) >= report.summary["reference"] - 0.2
    assert qsdk.sensitivity(sim, [texts], metric=agreement, progress=False).rows
    found = qsdk.autoquant(model, texts, [texts], agreement, max_drop=0.1, progress=False)
    assert found.summary["met"]
    assert agreement(found.sim) >= 0.9


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: perplexity(m, "some text"), qsdk.ConfigError, "the tokens are text; give the tokenizer="),
        (
            lambda m: perplexity(m, "a", tokenizer=str),
            qsdk.ConfigError,
            "the tokenizer gives text, 'a', where",
        ),
        (lambda m: perplexity(m, [1, [2, 3]]), qsdk.DataError, "ids and texts are mixed in one list"),
        (lambda m: perplexity(m, [(ids(4)[None], ids(1))]), qsdk.DataError, "a batch holds several tensors"),
        (
            lambda m: perplexity(m, {"input_ids": torch.stack([ids(4)] * 2), "attention_mask": torch.ones(1, 4).int()}),
            qsdk.DataError,
            "the attention_mask has another shape than the input_ids",
        ),
        (lambda m: perplexity(m, []), qsdk.DataError, "there are no tokens; give ids as a tensor"),
        (lambda m: perplexity(m, 3), qsdk.DataError, "a list of integers or a list of these, not int"),
        (
            lambda m: perplexity(m, [[1], [2]]),
            qsdk.DataError,
            "no token has one before it, so there is nothing",
        ),
        (
            lambda m: next_token_agreement(m, m, [torch.zeros(0).long()]),
            qsdk.DataError,
            "there are no tokens; give",
        ),
        (
            lambda m: perplexity(m, torch.zeros(4)),
            qsdk.DataError,
            r"token ids are integers .* not torch.float32",
        ),
        (lambda m: perplexity(m, [1, -100]), qsdk.DataError, "-100 is no token id; give the ids of the texts"),
        (lambda m: perplexity(m, {"ids": [1]}), qsdk.DataError, "a batch has no input_ids, but ids; name"),
        (
            lambda m: perplexity(m, [1, 2], window=1),
            qsdk.ConfigError,
            "window=1 holds no token with one before it",
        ),
        (
            lambda m: perplexity(m, [1, 2], stride=4),
            qsdk.ConfigError,
            "stride=4 with window=None: give a stride",
        ),
        (lambda m: perplexity(m, [1, 2], window=4, stride=5), qsdk.ConfigError, "stride=5 with window=4"),
        (lambda m: perplexity(m, [1, 2], batch_size=0), qsdk.ConfigError, "batch_size=0; give 1 or more"),
        (
            lambda m: perplexity("model.onnx", [1, 2]),
            qsdk.ConfigError,
            "str is no model; give a module, a sim",
        ),
        (
            lambda m: perplexity(lambda i: m(i)[..., :4], [1, 9]),
            qsdk.DataError,
            "token 9 is beyond the 4 that the",
        ),
        (
            lambda m: perplexity(lambda i: i, [1, 2]),
            qsdk.DataError,
            r"values of shape \(1, 2\) for token ids \(1, 2",
        ),
        (
            lambda m: perplexity(lambda i: "no", [1, 2]),
            qsdk.DataError,
            r"gives a str for token ids \(1, 2\), not",
        ),
        (
            lambda m: perplexity(lambda i: m(i) * torch.nan, [1, 2]),
            qsdk.DataError,
            r"for tokens \[1, 2\]... are NaN",
        ),
    ],
)
def test_errors_say_what_and_the_remedy(call, error, message):
    with pytest.raises(error, match=message):
        call(Bigram())


def test_an_onnx_model_with_other_inputs_is_named(tmp_path: Path):
    class TwoInputs(Bigram):
        def forward(self, input_ids, attention_mask, shift):
            return super().forward(input_ids) * attention_mask[..., None] + shift

    batch = {"input_ids": ids(6)[None], "attention_mask": torch.ones(1, 6), "shift": torch.zeros(1)}
    sim = qsdk.quantize(TwoInputs(), batch)
    qsdk.calibrate(sim, [batch], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    with pytest.raises(qsdk.ConfigError, match="takes shift besides token ids; call it yourself with forward="):
        perplexity(qsdk.quantize(tmp_path / "model.onnx"), [1, 2, 3, 4, 5, 6])


def test_a_model_that_is_certain_and_wrong():
    def wrong(given):
        return torch.full((*given.shape, 2), -1e30).index_fill(-1, torch.tensor([0]), 1e30)

    assert perplexity(wrong, [1, 1, 1]) == math.inf
