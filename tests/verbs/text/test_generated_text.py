"""Texts that a language model writes itself, against its own probabilities and transformers' `generate`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoders import decoder
from torch import nn

import qsdk
from qsdk.train import generate_text


def table(*, size: int = 6) -> torch.Tensor:
    """Return logits [size, size] of the token behind each token; some are never drawn."""
    torch.manual_seed(0)
    logits = torch.randn(size, size) * 1.5
    return logits.masked_fill(torch.eye(size).bool(), -torch.inf)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_by_the_probabilities_of_the_model(temperature: float):
    logits = table()
    (ids,) = generate_text(
        lambda ids: logits[ids], 400, 40, begin=[2], batch_size=400, temperature=temperature, progress=False
    )
    assert ids.shape == (400, 40)
    assert (ids[:, 0] == 2).all()
    counts = torch.zeros(6, 6).index_put_((ids[:, :-1].flatten(), ids[:, 1:].flatten()), torch.ones(1), accumulate=True)
    wanted = (logits / temperature).softmax(-1)
    deviation = (wanted * (1 - wanted) / counts.sum(1, keepdim=True)).sqrt()
    assert ((counts / counts.sum(1, keepdim=True) - wanted).abs() <= 4.5 * deviation).all()
    assert counts.diagonal().sum() == 0


def without_cache(model: nn.Module, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, use_cache=False)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2"])
def test_a_cache_gives_the_texts_of_reading_everything_again(kind: str):
    model = decoder(kind, bos_token_id=7)
    read: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    batches = generate_text(model, 5, 12, batch_size=3, seed=3, progress=False)
    assert read == [1] * 22
    again = generate_text(model, 5, 12, batch_size=3, seed=3, forward=without_cache, progress=False)
    other = generate_text(model, 5, 12, batch_size=3, seed=4, progress=False)
    assert [batch["input_ids"].shape for batch in batches] == [(3, 12), (2, 12)]
    for one, two, three in zip(batches, again, other, strict=True):
        assert torch.equal(one["input_ids"], two["input_ids"])
        assert not torch.equal(one["input_ids"], three["input_ids"])
        assert (one["input_ids"][:, 0] == 7).all()


def test_cold_text_is_what_greedy_generation_gives():
    model = decoder("Llama")
    (batch,) = generate_text(model, 1, 16, begin=[5, 9], temperature=1e-6, progress=False)
    wanted = model.generate(torch.tensor([[5, 9]]), max_new_tokens=14, do_sample=False)
    assert torch.equal(batch["input_ids"], wanted)


def test_without_a_first_token_texts_begin_anywhere_and_go_on_with_what_is_likeliest():
    model = decoder("Llama")
    (batch,) = generate_text(model, 16, 9, progress=False)
    ids = batch["input_ids"]
    assert len(ids[:, 0].unique()) > 8
    with torch.no_grad():
        likeliest = model(input_ids=ids).logits.argmax(-1)
    assert torch.equal(ids[:, 1:4], likeliest[:, :3])
    assert not torch.equal(ids[:, 4:], likeliest[:, 3:-1])


def test_the_texts_go_into_every_verb_and_leave_the_model_as_it_was():
    model = decoder("Llama", bos_token_id=1).train()
    batches = generate_text(model, 8, 16, batch_size=4, progress=False)
    assert model.training
    sim = qsdk.quantize(model.eval(), batches[0], qsdk.w4a8())
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.gptq(sim, batches, progress=False)
    with sim.training():
        assert qsdk.distill_loss(sim, model, batches[1]).loss > 0


def test_a_plain_module_and_a_sim_write_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    texts = generate_text(model, 3, 6, begin=[1], progress=False)
    sim = qsdk.quantize(model, texts[0], qsdk.w8a8())
    qsdk.calibrate(sim, texts, progress=False)
    assert generate_text(sim, 3, 6, begin=[1], progress=False)[0].shape == (3, 6)


@pytest.mark.parametrize(
    ("texts", "length", "options", "says"),
    [
        (0, 8, {}, "texts=0"),
        (1, 1, {}, "length=1"),
        (1, 8, {"batch_size": 0}, "batch_size=0"),
        (1, 8, {"temperature": 0.0}, "temperature=0.0 must be positive"),
        (1, 3, {"begin": [1, 2, 3]}, r"length=3 is not beyond begin=\[1, 2, 3\]"),
        (1, 513, {}, "beyond the model's 512 positions"),
    ],
)
def test_what_makes_no_text_is_refused(texts: int, length: int, options: dict[str, Any], says: str):
    with pytest.raises(qsdk.ConfigError, match=says):
        generate_text(decoder("Llama"), texts, length, progress=False, **options)
    with pytest.raises(qsdk.ConfigError, match="is no model"):
        generate_text(SimpleNamespace(), 1, 8, progress=False)
