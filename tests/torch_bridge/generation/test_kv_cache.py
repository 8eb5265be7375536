"""`kv_cache=` in a config: the dtype and the scales of keys and values that cross from step to step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_decoders import CACHE, DECODERS, decoder, generate, session_of, step_example, t5, tokens
from torch import nn
from torch_models import ConvNet

import qsdk
from qsdk import ConfigError, QuantConfig, QuantSim

_KEY, _VALUE = "past_key_values.0.key:input", "past_key_values.1.value:input"


def _sim(config: QuantConfig, model: nn.Module | None = None) -> QuantSim:
    sim = qsdk.quantize(model or DECODERS["llama"](), {"input_ids": tokens(0)}, config)
    qsdk.calibrate(sim, [{"input_ids": tokens(seed)} for seed in range(1, 4)], progress=False)
    return sim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "granularity"),
    [
        (qsdk.w8a8(kv_cache="int8"), "per tensor"),
        (qsdk.w8a8().override("*", kv_cache="int4", kv_cache_scales="head"), "per channel (axis 1)"),
        (qsdk.weight_only("int8", kv_cache="int4").override("*", kv_cache_scales="channel"), "per channel (axis 3)"),
        (qsdk.w8a8(kv_cache="int8").for_dialect("onnxruntime"), "per tensor"),
    ],
    ids=["int8", "int4 per head", "weights and int4 per channel", "int8 where kernels alone are quantized"],
)
def test_the_file_generates_what_the_simulation_does(config: QuantConfig, granularity: str, tmp_path: Path) -> None:
    sim, ids = _sim(config), tokens(9, batch=2)
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert rows[_KEY]["granularity"] == rows[_VALUE]["granularity"] == granularity
    qsdk.export(sim, tmp_path / "model.onnx")
    wanted = sim.model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
    assert np.array_equal(generate(session_of(str(tmp_path / "model.onnx")), ids.numpy(), 32), wanted.numpy())
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [step_example(DECODERS["llama"]())], progress=False)
    assert report.summary["passed"], report


@pytest.mark.slow
def test_parity_takes_the_batches_that_calibration_took(tmp_path: Path) -> None:
    sim = _sim(qsdk.w8a8(kv_cache="int8"))
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [{"input_ids": tokens(5)}], progress=False)
    assert report.summary["passed"], report
    assert {row["site"] for row in report.rows} >= {_KEY, _VALUE, "past_key_values.0.key:input"}
    short = [{"input_ids": tokens(5)[:, :2]}]
    with pytest.raises(qsdk.ConfigError, match="three tokens at least"):
        qsdk.check_parity(sim, tmp_path / "model.onnx", short, progress=False)


@pytest.mark.slow
def test_keys_and_values_are_quantized_once() -> None:
    sim = _sim(qsdk.w8a8(kv_cache="int8"))
    rows = {row["site"]: row for row in sim.coverage().rows}
    moved = [
        "self_attn.v_proj:output",
        "self_attn/add.1:output",
        "self_attn/cat.2:output",
        "self_attn/reshape.1:output",
    ]
    assert {rows[f"model.layers.0.{site}"]["dtype"] for site in moved} == {"int8"}
    assert rows["model.layers.0.self_attn.k_proj:output"]["dtype"] == "uint8"  # RoPE computes between the two
    cache = sim.model(input_ids=tokens(9))[CACHE]
    encoding = sim.encodings[_KEY]
    keys = cache.layers[0].keys.detach().numpy()
    assert np.array_equal(encoding.dequantize(encoding.quantize(keys)), keys)
    assert len(np.unique(keys)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("config", [qsdk.w8a8(kv_cache="int8"), qsdk.weight_only("int8", kv_cache="int8")])
def test_a_cache_has_one_grid_from_edge_to_edge_where_no_kernel_reads_it(config: QuantConfig) -> None:
    sim = _sim(config.for_dialect("onnxruntime"))
    decisions = sim.plan.decisions
    for moved in ("add.1", "cat.2", "getitem.4", "reshape.0"):  # keys, behind their rotation
        assert decisions[f"model.layers.0.self_attn/{moved}:output"].encoding_site == _KEY
    assert {one.encoding_site for one in decisions.values() if one.quantized} <= sim.encodings.keys()


@pytest.mark.slow
def test_a_rule_chooses_the_layers() -> None:
    sim = _sim(qsdk.w8a8().override("model.layers.1.*", kv_cache="float8e4m3fn"))
    rows = {row["site"]: row["dtype"] for row in sim.coverage().rows}
    assert (rows[_KEY], rows[_VALUE]) == ("uint8", "float8e4m3fn")


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache is chosen, and the example has no cache that ConvNet could go on"):
        qsdk.quantize(ConvNet(), torch.randn(2, 3, 8, 8), qsdk.w8a8(kv_cache="int8"))


def test_unknown_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_scales='row' .* is none of tensor, head, channel, token"):
        qsdk.w8a8().override("*", kv_cache="int8", kv_cache_scales="row")  # type: ignore[arg-type]


def test_a_config_file_keeps_the_choice(tmp_path: Path) -> None:
    config = qsdk.w8a8(kv_cache="int4").override("layers.0.*", kv_cache_scales="head")
    config.save(tmp_path / "config.json")
    assert qsdk.load_config(tmp_path / "config.json") == config


@pytest.mark.slow
def test_a_rule_that_matches_no_keys_and_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lm_head' -> kv_cache=int8 matches no keys and values .*self_attn/cat\.2"):
        _sim(qsdk.w8a8().override("lm_head", kv_cache="int8"))


@pytest.mark.slow
def test_scales_without_a_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_scales is chosen without kv_cache"):
        _sim(qsdk.w8a8().override("*", kv_cache_scales="head"))


def test_an_encoder_needs_an_example_of_a_step() -> None:
    pair = {"input_ids": tokens(0), "decoder_input_ids": tokens(1, length=5)}
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration has an encoder beside its decoder"):
        qsdk.quantize(t5(), pair, qsdk.w8a8(kv_cache="int8"))


def test_a_rule_tells_keys_from_values_and_each_token_has_its_own_scale() -> None:
    config = qsdk.weight_only("int8", kv_cache="int4").override("*.value", kv_cache_scales="token")
    sim = qsdk.quantize(decoder("Llama", num_hidden_layers=1), {"input_ids": tokens(0)}, config)
    qsdk.calibrate(sim, [{"input_ids": tokens(seed)} for seed in range(1, 4)], progress=False)
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert rows[_KEY]["granularity"] == "per tensor"
    new = rows["model.layers.0.self_attn/transpose.2:output"]
    assert (new["dtype"], new["granularity"]) == ("int4", "per token, dynamic")
    assert rows["past_key_values.0.value:input"]["state"] == "tied"
    with torch.no_grad():
        values = sim.model(input_ids=tokens(9))[CACHE].layers[0].values.numpy()
    peaks = np.abs(values).max(-1, keepdims=True)
    off = [np.abs(codes - np.rint(codes)).max(-1) for codes in (values / peaks * 7, values / peaks * 8)]
    assert np.minimum(*off).max() < 1e-5  # the largest value of a token has the code 7, or -8 where it is negative
    assert len(np.unique(peaks)) > 15


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", ["uint8", "float8e4m3fn"])
def test_scales_of_tokens_are_for_signed_integers(dtype: str) -> None:
    config = qsdk.weight_only("int8").override("*", kv_cache=dtype, kv_cache_scales="token")
    with pytest.raises(ConfigError, match=f"kv_cache_scales='token' is for int8 or int4, .* not for {dtype} at"):
        qsdk.quantize(decoder("Llama", num_hidden_layers=1), {"input_ids": tokens(0)}, config)
