"""Files with a cache of keys and values: one file for the prompt and every step after it, in ONNX Runtime alone."""

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny_decoders import CACHE, DECODERS, decoder, generate, session_of, step_example, tokens
from transformers.cache_utils import DynamicCache, StaticCache

import qsdk
from qsdk import ConfigError, ExportError, QuantSim


@functools.cache
def _sim(name: str = "llama") -> QuantSim:
    model = DECODERS[name]()
    sim = qsdk.quantize(model, step_example(model), qsdk.w8a8())
    qsdk.calibrate(sim, [{"input_ids": tokens(seed)} for seed in range(1, 4)], progress=False)
    return sim


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_256_tokens_of_the_file_are_those_of_the_simulation(name: str, tmp_path: Path) -> None:
    sim = _sim(name)
    qsdk.export(sim, tmp_path / "model.onnx")
    ids = tokens(9, batch=2)
    wanted = sim.model.generate(ids, max_new_tokens=256, min_new_tokens=256, do_sample=False, pad_token_id=0)
    assert np.array_equal(generate(session_of(str(tmp_path / "model.onnx")), ids.numpy(), 256), wanted.numpy())


@pytest.mark.slow
def test_inputs_and_outputs_have_the_names_and_lengths_of_the_field(tmp_path: Path) -> None:
    qsdk.export(_sim(), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    axes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert axes["input_ids"] == ["batch", "sequence_length"]
    assert axes["attention_mask"] == ["batch", "total_sequence_length"]
    assert axes["past_key_values.1.value"] == ["batch", 2, "past_sequence_length", 8]
    parts = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert [v.name for v in graph.output] == ["logits", *(f"present.{part}" for part in parts)]


@pytest.mark.slow
def test_parity_of_a_step_and_of_a_prompt(tmp_path: Path) -> None:
    sim = _sim()
    qsdk.export(sim, tmp_path / "model.onnx")
    other = step_example(DECODERS["llama"](), batch=1, past=7, step=1)
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [step_example(DECODERS["llama"]()), other], progress=False)
    assert report.summary["passed"], report
    assert report.summary["weights_max_lsb"] == 0
    assert {"past_key_values.0.key:input"} <= {row["site"] for row in report.rows}


@pytest.mark.slow
def test_the_example_and_the_batches_keep_their_caches() -> None:
    model = DECODERS["llama"]()
    example = step_example(model)
    keys = example[CACHE].layers[0].keys.clone()
    sim = qsdk.quantize(model, example, qsdk.w8a8())
    qsdk.calibrate(sim, [example, example], progress=False)
    assert torch.equal(example[CACHE].layers[0].keys, keys)


@pytest.mark.slow
def test_a_file_of_a_plain_example_has_no_cache(tmp_path: Path) -> None:
    sim = qsdk.quantize(decoder("Llama"), {"input_ids": tokens(0)}, qsdk.w8a8())
    qsdk.calibrate(sim, [{"input_ids": tokens(1)}], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert [v.name for v in onnx.load(tmp_path / "model.onnx").graph.output] == ["logits"]


@pytest.mark.slow
def test_a_saved_sim_with_a_cache_opens_again(tmp_path: Path) -> None:
    sim = _sim()
    qsdk.save(sim, tmp_path / "sim.qsdk")
    again = qsdk.load(tmp_path / "sim.qsdk", DECODERS["llama"]())
    ids = tokens(9)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(sim.model.generate(ids, **options), again.model.generate(ids, **options))


@pytest.mark.slow
def test_a_file_goes_on_past_a_sliding_window(tmp_path: Path) -> None:
    sim = qsdk.quantize(DECODERS["mistral, sliding window"](), {"input_ids": tokens(0)}, qsdk.w8a8(kv_cache="int8"))
    qsdk.calibrate(sim, [{"input_ids": tokens(1)}], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    ids = tokens(9)
    wanted = sim.model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    assert np.array_equal(generate(session_of(str(tmp_path / "model.onnx")), ids.numpy(), 20), wanted.numpy())


def test_a_cache_that_keeps_a_window_alone_is_refused() -> None:
    model, ids = DECODERS["mistral, sliding window"](), tokens(0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :4], **{CACHE: cache}, use_cache=True)
    with pytest.raises(ConfigError, match=r"keeps a sliding window alone.*DynamicCache\(\) without the model's config"):
        qsdk.quantize(model, {"input_ids": ids[:, 4:], CACHE: cache})


@pytest.mark.slow
def test_a_cache_of_fixed_size_is_refused_as_the_example_and_serves_the_sim() -> None:
    sim, ids = _sim(), tokens(9)
    cache = StaticCache(config=sim.model.config, max_cache_len=16)
    with pytest.raises(ConfigError, match=r"StaticCache, has a fixed size.*give a cache that grows, DynamicCache\(\)"):
        qsdk.quantize(sim.unwrap(), {"input_ids": ids[:, :4], CACHE: cache})
    with torch.no_grad():
        whole = sim.model(input_ids=ids).logits
        parts = [sim.model(input_ids=part, **{CACHE: cache}).logits for part in (ids[:, :4], ids[:, 4:])]
    assert (torch.cat(parts, 1) - whole).abs().max() < 0.02 * whole.abs().max()
    assert [int(layer.cumulative_length) for layer in cache.layers] == [10, 10]


@pytest.mark.slow
def test_data_with_a_cache_of_fixed_size_stays_as_it_was() -> None:
    model, ids = DECODERS["llama"](), tokens(9)
    sim = qsdk.quantize(model, step_example(model), qsdk.w8a8())
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(input_ids=ids[:, :8], **{CACHE: cache})
    keys = cache.layers[0].keys.clone()
    qsdk.calibrate(sim, [{"input_ids": ids[:, 8:], CACHE: cache}], method="mse", progress=False)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [8, 8]
    assert torch.equal(cache.layers[0].keys, keys)


@pytest.mark.slow
def test_a_step_of_one_token_gives_no_file_of_one_length_without_a_word() -> None:
    model = DECODERS["llama"]()
    with pytest.raises(ExportError, match="give quantize an example of two new tokens at least"):
        qsdk.quantize(model, step_example(model, batch=1, past=5, step=1))
