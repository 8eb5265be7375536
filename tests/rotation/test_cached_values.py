"""`qsdk.rotate` of a decoder with a cache: its values are turned where they enter, so the cache holds them turned."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from qdq_models import make_model
from rotated_models import off
from tiny_decoders import CACHE, DECODERS, decoder, generate, session_of, step_example, tokens
from torch import nn
from transformers.cache_utils import DynamicCache

import qsdk
from qsdk import DataError
from qsdk.core.channel_maps.rotation_groups import find_rotation_groups

HEADS = "attention values"
_VALUE = "past_key_values.0.value:input"


def turned(report: Any) -> list[dict[str, Any]]:
    return [row for row in report.rows if row["kind"] == HEADS and not row["reason"]]


def in_steps(model: nn.Module, ids: torch.Tensor) -> tuple[np.ndarray, DynamicCache]:
    """The logits of a prompt of 6 tokens and of one token after the other, and the cache behind them."""
    cache, found = DynamicCache(), []
    with torch.no_grad():
        for step in (ids[:, :6], *ids[:, 6:].split(1, dim=1)):
            found.append(model(input_ids=step, **{CACHE: cache}, use_cache=True).logits)
    return torch.cat(found, dim=1).numpy(), cache


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_a_prompt_and_of_steps_stay_and_the_cache_holds_turned_values(name: str) -> None:
    model, ids = DECODERS[name](), tokens(9, batch=2)
    sim = qsdk.quantize(model, {"input_ids": tokens(0)}, qsdk.w8a8(kv_cache="int8"))
    report = qsdk.rotate(sim, progress=False)
    assert len(turned(report)) == 2
    assert report.summary["in_caches"].startswith("2: ")
    before, after = model.double(), sim.unwrap().double()
    wanted, cache = in_steps(before, ids)
    found, other = in_steps(after, ids)
    assert off(found, wanted) < 1e-5
    with torch.no_grad():
        assert off(after(input_ids=ids).logits.numpy(), wanted) < 1e-5
    values, turned_values = cache.layers[0].values.numpy(), other.layers[0].values.numpy()
    assert off(cache.layers[0].keys.numpy(), other.layers[0].keys.numpy()) < 1e-5
    assert off(turned_values, values) > 0.1
    np.testing.assert_allclose(np.linalg.norm(turned_values, axis=-1), np.linalg.norm(values, axis=-1), rtol=1e-5)
    with torch.no_grad():  # one cache in the other model is what the report warns of
        mixed = after(input_ids=ids[:, -1:], **{CACHE: copy.deepcopy(cache)}).logits.numpy()
        same = after(input_ids=ids[:, -1:], **{CACHE: copy.deepcopy(other)}).logits.numpy()
    assert off(mixed, same) > 1e-3


def outliers(**changes: Any) -> nn.Module:
    """A Llama with one large channel in each head's values, and 4 heads that share 2 heads of keys and values."""
    model = decoder("Llama", **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[3::8] *= 40
    return model


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_quantizers_of_the_cache_sit_on_turned_values_in_both_paths(tied: bool, tmp_path: Path) -> None:
    model, data = outliers(tie_word_embeddings=tied), [{"input_ids": tokens(seed)} for seed in range(1, 4)]
    sim = qsdk.quantize(model, data[0], qsdk.w8a8(kv_cache="int8"))
    qsdk.calibrate(sim, data, progress=False)
    before = sim.encodings[_VALUE].scale
    assert len(turned(qsdk.rotate(sim, data, progress=False))) == 2
    encoding = sim.encodings[_VALUE]
    assert encoding.scale < 0.75 * before
    with torch.no_grad():
        float_values = sim.unwrap()(**data[0])[CACHE].layers[0].values.numpy()
        cache = sim.model(input_ids=data[0]["input_ids"][:, :6])[CACHE]
        sim.model(input_ids=data[0]["input_ids"][:, 6:7], **{CACHE: cache})
    values = cache.layers[0].values.numpy()
    assert np.array_equal(encoding.dequantize(encoding.quantize(values)), values)
    assert np.abs(values - float_values[:, :, :7]).max() < 4 * encoding.scale.max()
    qsdk.export(sim, tmp_path / "model.onnx")
    step = step_example(sim.unwrap())
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [data[1], step], progress=False)
    assert report.summary["passed"], report
    ids = tokens(9, batch=2)
    wanted = sim.model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
    assert np.array_equal(generate(session_of(str(tmp_path / "model.onnx")), ids.numpy(), 24), wanted.numpy())


@pytest.mark.slow
def test_sensitivity_takes_turned_values_for_no_noise() -> None:
    model, data = outliers(), [{"input_ids": tokens(seed, batch=4)} for seed in range(1, 4)]
    sim = qsdk.quantize(model, data[0], qsdk.w8a16(kv_cache="int16"))
    qsdk.calibrate(sim, data, progress=False)
    before = qsdk.sensitivity(sim, data, progress=False).summary["sqnr_db"]
    assert len(turned(qsdk.rotate(sim, data, progress=False))) == 2
    for exact in (False, True):
        assert qsdk.sensitivity(sim, data, exact=exact, progress=False).summary["sqnr_db"] > before - 6


@pytest.mark.slow
def test_caches_from_outside_keep_their_values(tmp_path: Path) -> None:
    model = DECODERS["llama"]()
    example = step_example(model)
    sim = qsdk.quantize(model, example, qsdk.w8a8())
    report = qsdk.rotate(sim, progress=False)
    reasons = [row["reason"] for row in report.rows if row["kind"] == HEADS]
    assert len(reasons) == 2
    assert all("choose kv_cache= and give tokens alone" in reason for reason in reasons)
    assert "in_caches" not in report.summary
    qsdk.export(sim, tmp_path / "float.onnx", uncalibrated="float")
    opened = qsdk.quantize(tmp_path / "float.onnx", None, qsdk.w8a8(kv_cache="int8"))
    reasons = [row["reason"] for row in qsdk.rotate(opened, progress=False).rows if row["kind"] == HEADS]
    assert len(reasons) == 2
    assert all("one that the float file has filled would not fit" in reason for reason in reasons)
    wanted = model(**copy.deepcopy(example)).logits.detach().numpy()
    assert off(sim.unwrap()(**copy.deepcopy(example)).logits.detach().numpy(), wanted) < 1e-5


@pytest.mark.slow
def test_data_with_a_cache_from_before_is_refused_and_nothing_has_changed() -> None:
    model = DECODERS["llama"]()
    sim = qsdk.quantize(model, {"input_ids": tokens(0)}, qsdk.w8a8(kv_cache="int8"))
    qsdk.calibrate(sim, [{"input_ids": tokens(1)}], progress=False)
    encodings, before = sim.encodings, {name: x.clone() for name, x in sim.model.state_dict().items()}
    with pytest.raises(DataError, match="batch 1 brings a cache that was filled before the rotation"):
        qsdk.rotate(sim, [{"input_ids": tokens(1)}, step_example(model)], progress=False)
    assert sim.encodings == encodings
    assert all(torch.equal(x, before[name]) for name, x in sim.model.state_dict().items())
    empty = {"input_ids": tokens(2), CACHE: DynamicCache()}
    assert len(turned(qsdk.rotate(sim, iter([empty]), progress=False))) == 2


@pytest.mark.parametrize(
    ("leaves", "reason"),
    [
        ("whole", ""),
        ("across", "other channels than what goes into it"),
        ("as a window", "leaves the model"),
    ],
)
def test_a_cache_holds_turned_values_if_it_gives_them_as_it_takes_them(leaves: str, reason: str) -> None:
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=(8, 8)).astype("f") for name in ("wv", "wo")}
    nodes = [
        helper.make_node("MatMul", ["x", "wv"], ["v"], "v"),
        helper.make_node("Concat", ["past", "v"], ["values"], "join", axis=1),
        helper.make_node("Softmax", ["scores"], ["weights"], "softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "values"], ["sum"], "sum"),
        helper.make_node("MatMul", ["sum", "wo"], ["y"], "o"),
    ]
    present, shape = "values", [1, "p + t", 8]
    if leaves == "across":
        nodes.append(helper.make_node("Transpose", ["values"], ["present"], "across", perm=[0, 2, 1]))
        present, shape = "present", [1, 8, "p + t"]
    elif leaves == "as a window":
        stored |= {"start": np.array([-4]), "end": np.array([2**62]), "axes": np.array([1])}
        nodes.append(helper.make_node("Slice", ["values", "start", "end", "axes"], ["present"], "window"))
        present, shape = "present", [1, 4, 8]
    inputs = {"x": [1, "t", 8], "past": [1, "p", 8], "scores": [1, "t", "p + t"]}
    model = make_model(nodes, inputs, {"y": [1, "t", 8], present: shape}, stored)
    graph = qsdk.quantize(model, None, qsdk.w8a8()).graph
    (stream,) = find_rotation_groups(graph, lambda norm: None)
    assert reason in stream.blocked
    assert bool(stream.blocked) is bool(reason)
    assert stream.cached is (leaves != "as a window")
    (stays,) = find_rotation_groups(graph, lambda norm: None, caches_stay="it stays")
    assert stays.blocked == ("it stays" if not reason else stream.blocked)


def test_a_residual_stream_that_comes_in_and_leaves_is_no_cache() -> None:
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=(8, 8)).astype("f") for name in ("w1", "w2")}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("Concat", ["prefix", "h"], ["stream"], "join", axis=1),
        helper.make_node("LayerNormalization", ["stream", "gain"], ["normed"], "norm", axis=-1),
        helper.make_node("MatMul", ["normed", "w2"], ["y"], "second"),
    ]
    stored["gain"] = np.ones(8, np.float32)
    inputs = {"x": [1, "t", 8], "prefix": [1, "p", 8]}
    model = make_model(nodes, inputs, {"y": [1, "p + t", 8], "stream": [1, "p + t", 8]}, stored)
    (stream,) = find_rotation_groups(qsdk.quantize(model, None, qsdk.w8a8()).graph, lambda norm: None)
    assert "leaves the model" in stream.blocked
    assert not stream.cached
