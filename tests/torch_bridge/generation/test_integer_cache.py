"""`export(cache="integer")`: a file that takes and gives the codes of keys and values, a quarter of the bytes."""

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny_decoders import DECODERS, decoder, generate, session_of, step_example, tokens
from torch import nn

import qsdk
from qsdk import ConfigError, QuantConfig, QuantSim

KEYS = "past_key_values.0.key"
INT8 = qsdk.w8a8(kv_cache="int8")


def _decoder() -> nn.Module:
    return decoder("Llama", num_hidden_layers=1)


@functools.cache
def _sim(config: QuantConfig = INT8, name: str = "") -> QuantSim:
    model = DECODERS[name]() if name else _decoder()
    sim = qsdk.quantize(model, {"input_ids": tokens(0)}, config)
    qsdk.calibrate(sim, [{"input_ids": tokens(seed)} for seed in range(1, 4)], progress=False)
    return sim


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(INT8, marks=pytest.mark.slow),
        pytest.param(qsdk.w4a16(kv_cache="uint8"), marks=pytest.mark.slow),
        qsdk.weight_only("int8", kv_cache="int8").override("*", kv_cache_scales="head"),
    ],
    ids=["int8", "uint8", "int8 per head"],
)
def test_the_tokens_are_those_of_the_file_with_floats(config: QuantConfig, tmp_path: Path) -> None:
    sim, ids = _sim(config), tokens(9, batch=2)
    qsdk.export(sim, tmp_path / "float.onnx")
    qsdk.export(sim, tmp_path / "integer.onnx", cache="integer")
    wanted = generate(session_of(str(tmp_path / "float.onnx")), ids.numpy(), 24)
    session = session_of(str(tmp_path / "integer.onnx"))
    assert np.array_equal(generate(session, ids.numpy(), 24), wanted)
    kinds = {one.type for one in (*session.get_inputs(), *session.get_outputs()) if "key" in one.name}
    assert kinds == {"tensor(uint8)" if config.kv_cache == qsdk.uint8 else "tensor(int8)"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_256_tokens_are_those_of_the_simulation(name: str, tmp_path: Path) -> None:
    sim, ids = _sim(name=name), tokens(9, batch=2)
    qsdk.export(sim, tmp_path / "model.onnx", cache="integer")
    wanted = sim.model.generate(ids, max_new_tokens=256, min_new_tokens=256, do_sample=False, pad_token_id=0)
    assert np.array_equal(generate(session_of(str(tmp_path / "model.onnx")), ids.numpy(), 256), wanted.numpy())


@pytest.mark.slow
def test_the_scales_stand_in_the_file_and_the_rules_hold(tmp_path: Path) -> None:
    sim = _sim()
    report = qsdk.export(sim, tmp_path / "model.onnx", cache="integer")
    assert report.summary["cache"] == "integer"
    assert qsdk.validate(tmp_path / "model.onnx").summary == {"errors": 0, "warnings": 0}
    graph = onnx.load(tmp_path / "model.onnx").graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    first = next(node for node in graph.node if KEYS in node.input and node.op_type != "Shape")
    last = next(node for node in graph.node if "present.0.key" in node.output)
    assert (first.op_type, last.op_type) == ("DequantizeLinear", "QuantizeLinear")
    for node in (first, last):
        assert stored[node.input[1]] == sim.encodings[f"{KEYS}:input"].scale


@pytest.mark.slow
def test_parity_reads_it_as_the_file_with_floats(tmp_path: Path) -> None:
    sim = _sim()
    qsdk.export(sim, tmp_path / "model.onnx", cache="integer")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [step_example(_decoder())], progress=False)
    assert report.summary["passed"], report
    assert {f"{KEYS}:input"} <= {row["site"] for row in report.rows}


@pytest.mark.slow
def test_a_file_that_is_opened_and_exported_comes_out_the_same(tmp_path: Path) -> None:
    qsdk.export(_sim(), tmp_path / "model.onnx", cache="integer")
    qsdk.export(_sim(), tmp_path / "float.onnx")
    again = qsdk.quantize(tmp_path / "model.onnx", None)
    assert dict(again.encodings) == dict(_sim().encodings)
    qsdk.export(again, tmp_path / "again.onnx")
    qsdk.export(again, tmp_path / "floats.onnx", cache="float")
    graphs = {name: onnx.load(tmp_path / f"{name}.onnx").graph for name in ("model", "again", "float", "floats")}
    assert graphs["again"] == graphs["model"]
    assert graphs["floats"] == graphs["float"]


def test_integers_alone_keep_the_codes_and_float_edges_are_refused(tmp_path: Path) -> None:
    qsdk.export(_sim(), path := tmp_path / "model.onnx", cache="integer")
    with pytest.raises(ConfigError, match=r"takes and gives its cache as integers.*pass edges='integer'"):
        qsdk.to_integer(path, tmp_path / "integer.onnx", progress=False)
    report = qsdk.to_integer(path, tmp_path / "integer.onnx", edges="integer", progress=False)
    assert report.summary["float_tensors"] == 0
    results = [_step(file, report.summary["fixed_shapes"]) for file in (path, tmp_path / "integer.onnx")]
    present = [{name: value for name, value in result.items() if "present" in name} for result in results]
    assert len(present[0]) == 2
    for name, codes in present[0].items():
        assert codes.dtype == np.int8
        assert np.abs(codes.astype(int) - present[1][name]).max() <= 1, name


def _step(path: Path, sizes: dict[str, list[int | None]]) -> dict[str, np.ndarray]:
    """Return the results of one step on random codes in the cache."""
    session, random = session_of(str(path)), np.random.default_rng(0)
    feeds = {}
    for one in session.get_inputs():
        shape = [2 if size is None else size for size in sizes[one.name]]
        integers = {"attention_mask": np.ones(shape), "input_ids": random.integers(3, 99, shape)}
        if one.name == "position_ids":
            integers[one.name] = np.arange(shape[1])[None] + np.full(shape, sizes[KEYS][2])
        codes = random.integers(-100, 100, shape)
        feeds[one.name] = integers[one.name].astype(np.int64) if one.name in integers else codes.astype(np.int8)
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.slow
def test_a_cache_without_codes_is_refused(tmp_path: Path) -> None:
    four = _sim(qsdk.weight_only("int8", kv_cache="int4"))
    with pytest.raises(ConfigError, match=r"has codes of int4, which NumPy does not have; choose kv_cache='int8'"):
        qsdk.export(four, tmp_path / "model.onnx", cache="integer")
    step = step_example(_decoder())
    floats = qsdk.quantize(_decoder(), step, qsdk.weight_only("int8"))
    qsdk.calibrate(floats, [], progress=False)
    with pytest.raises(ConfigError, match="has no codes of its own; choose kv_cache='int8'"):
        qsdk.export(floats, tmp_path / "model.onnx", cache="integer")
    plain = qsdk.quantize(nn.Linear(4, 4), torch.zeros(2, 4))
    qsdk.calibrate(plain, [torch.ones(2, 4)], progress=False)
    with pytest.raises(ConfigError, match="the model takes and gives back no keys and values"):
        qsdk.export(plain, tmp_path / "model.onnx", cache="integer")
    with pytest.raises(ConfigError, match="cache='int8' is unknown; choose 'float', 'integer'"):
        qsdk.export(plain, tmp_path / "model.onnx", cache="int8")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
