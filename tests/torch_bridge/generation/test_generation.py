"""`sim.model.generate` with a cache of keys and values: the same tokens as without one, from one set of encodings."""

import functools

import pytest
import torch
from tiny_decoders import CACHE, DECODERS, plain_sim, t5, tokens
from transformers.cache_utils import DynamicCache

import qsdk
from qsdk import ModelError, QuantSim

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@functools.cache
def _sim(name: str) -> QuantSim:
    return plain_sim(DECODERS[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache_gives_the_tokens_of_generation_without_one(name: str) -> None:
    sim = _sim(name)
    ids = tokens(9)
    wanted = sim.model.generate(ids, use_cache=False, **OPTIONS)
    assert torch.equal(sim.model.generate(ids, **OPTIONS), wanted)
    assert len(wanted[0].unique()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_padded_row_generates_what_it_does_alone(name: str) -> None:
    sim = _sim(name)
    ids, mask = tokens(9, batch=2), torch.ones(2, 10, dtype=torch.int64)
    ids[1, :3], mask[1, :3] = 0, 0
    both = sim.model.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(both[0], sim.model.generate(ids[:1], **OPTIONS)[0])
    assert torch.equal(both[1, 3:], sim.model.generate(ids[1:, 3:], **OPTIONS)[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True}])
def test_beams_samples_and_a_cache_of_fixed_length(options: dict[str, object]) -> None:
    sim = _sim("llama")
    given = {**OPTIONS, **options}
    torch.manual_seed(1)
    result = sim.model.generate(tokens(9), **given)
    torch.manual_seed(1)
    without = {name: value for name, value in given.items() if name != "cache_implementation"}
    assert torch.equal(result, sim.model.generate(tokens(9), use_cache=False, **without))


@pytest.mark.slow
def test_an_encoder_and_its_decoder_generate() -> None:
    pair = {"input_ids": tokens(0), "decoder_input_ids": tokens(1, length=5)}
    sim = qsdk.quantize(t5(), pair, qsdk.w8a8())
    qsdk.calibrate(sim, [pair], progress=False)
    result = sim.model.generate(tokens(9), **OPTIONS)
    with torch.no_grad():
        whole = sim.model(input_ids=tokens(9), decoder_input_ids=result).logits
    assert torch.equal(whole.argmax(-1)[:, :-1], result[:, 1:])


@pytest.mark.slow
def test_steps_read_each_site_with_its_own_encoding() -> None:
    """Each site of a step is compared with the same place of a whole pass, so that no call takes another's encoding."""
    sim, ids = _sim("llama"), tokens(9)
    with torch.no_grad():
        whole = sim.model(input_ids=ids).logits
        cache = DynamicCache(config=sim.model.config)
        first = sim.model(input_ids=ids[:, :6], **{CACHE: cache}, use_cache=True).logits
        rest = sim.model(input_ids=ids[:, 6:], **{CACHE: cache}, use_cache=True).logits
    # products of matrices of other shapes round otherwise in their last bit, which may turn a rounding
    assert (torch.cat([first, rest], 1) - whole).abs().max() < 0.02 * whole.abs().max()
    assert cache.get_seq_length() == 10


def test_positions_and_a_mask_that_the_example_did_not_have() -> None:
    sim, ids = _sim("llama"), tokens(9)
    with torch.no_grad():
        whole = sim.model(input_ids=ids).logits
        given = sim.model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(10)[None])
        spread = sim.model(input_ids=ids, position_ids=torch.arange(0, 30, 3)[None]).logits
    assert torch.equal(given.logits, whole)
    assert not torch.equal(spread, whole)


def test_embeddings_in_the_place_of_tokens_are_refused_with_a_cache() -> None:
    sim = _sim("llama")
    with pytest.raises(ModelError, match=r"depends on inputs_embeds, which the example did not have"):
        sim.model(inputs_embeds=torch.zeros(1, 4, 32), **{CACHE: DynamicCache()})


def test_labels_are_no_part_of_the_quantized_model() -> None:
    sim, ids = _sim("llama"), tokens(9)
    with torch.no_grad():
        result = sim.model(input_ids=ids, labels=ids)
        assert torch.equal(result.logits, sim.model(input_ids=ids).logits)
    assert result.loss > 1
