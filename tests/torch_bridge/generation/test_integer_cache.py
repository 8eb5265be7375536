"""`export(cache="integer")`: a file that takes and gives the codes of keys and values, a quarter of the bytes."""

import functools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from tiny_decoders import DECODERS, decoder, generate, session_of, step_example, tokens
from torch import nn

import qsdk
from onnx_backend.passes.integer_cache import pack_edges, unpack_edges
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


@pytest.mark.slow
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
    eight = _sim(qsdk.weight_only("int8", kv_cache="float8e4m3fn"))
    with pytest.raises(
        ConfigError, match=r"has codes of float8e4m3fn, which NumPy does not have; choose kv_cache='int8'"
    ):
        qsdk.export(eight, tmp_path / "model.onnx", cache="integer")
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


TOKENS = qsdk.weight_only("int8").override("*", kv_cache="int8", kv_cache_scales="token")
KIVI = qsdk.weight_only("int8", kv_cache="int4").override("*.value", kv_cache_scales="token")
KIVI = KIVI.override("*.key", kv_cache_scales="channel")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(
            qsdk.w8a8(kv_cache="int4"), {"key": (np.uint8, 4), "value": (np.uint8, 4)}, marks=pytest.mark.slow
        ),
        pytest.param(
            TOKENS,
            {"key": (np.int8, 8), "key_scale": (np.float32, 1), "value": (np.int8, 8), "value_scale": (np.float32, 1)},
            marks=pytest.mark.slow,
        ),
        (KIVI, {"key": (np.uint8, 4), "value": (np.uint8, 4), "value_scale": (np.float32, 1)}),
    ],
    ids=["int4", "int8 per token", "int4, keys per channel, values per token"],
)
def test_two_codes_of_4_bits_fill_a_byte_and_tokens_have_scales(
    config: QuantConfig, sizes: dict[str, tuple[type, int]], tmp_path: Path
) -> None:
    sim, ids = _sim(config), tokens(9, batch=2)
    qsdk.export(sim, tmp_path / "float.onnx")
    qsdk.export(sim, tmp_path / "model.onnx", cache="integer")
    session = session_of(str(tmp_path / "model.onnx"))
    kinds = {"tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(float)": np.float32}
    edges = [(one.name.rpartition(".")[2], kinds[one.type], one.shape[3]) for one in session.get_inputs()[3:]]
    assert {name: (kind, size) for name, kind, size in edges} == sizes
    wanted = sim.model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0).numpy()
    assert np.array_equal(generate(session, ids.numpy(), 16), wanted)
    assert np.array_equal(generate(session_of(str(tmp_path / "float.onnx")), ids.numpy(), 16), wanted)
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [step_example(_decoder())], progress=False)
    assert report.summary["passed"], report
    again = qsdk.quantize(tmp_path / "model.onnx", None)
    qsdk.export(again, tmp_path / "again.onnx", check=False)
    qsdk.export(again, tmp_path / "floats.onnx", cache="float", check=False)
    graphs = {name: onnx.load(tmp_path / f"{name}.onnx").graph for name in ("model", "again", "float", "floats")}
    assert graphs["again"] == graphs["model"]
    assert graphs["floats"] == graphs["float"]


def test_codes_of_4_bits_lie_in_a_byte_as_in_group_query_attention() -> None:
    random = np.random.default_rng(0)
    step = helper.make_node("Identity", ["past"], ["present"])
    values = [helper.make_tensor_value_info(name, TensorProto.INT8, ["b", 2, "p", 8]) for name in ("past", "present")]
    graph = helper.make_graph([step], "graph", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    plain = model.SerializeToString()
    pack_edges(model, dict.fromkeys(("past", "present"), int(TensorProto.INT8)))
    packed = random.integers(0, 256, (1, 2, 5, 4)).astype(np.uint8)
    for count in (5, 0):
        (result,) = _run(model, past=packed[:, :, :count])
        assert np.array_equal(result, packed[:, :, :count])
    scale = np.float32(0.5)
    keys = (np.stack([packed & 15, packed >> 4], -1).reshape(1, 2, 5, 8) - 8.0) * scale
    query = random.standard_normal((1, 1, 16)).astype(np.float32)
    attention, new = _group_query_attention(query, packed, scale), query.reshape(1, 1, 2, 8).transpose(0, 2, 1, 3)
    rounded = np.clip(np.rint(new / scale), -8, 7) * scale
    both = np.concatenate([keys, rounded], 2)
    scores = np.exp(new @ both.transpose(0, 1, 3, 2) / np.sqrt(8))
    wanted = (scores / scores.sum(-1, keepdims=True)) @ both
    np.testing.assert_allclose(attention, wanted.reshape(1, 1, 16), rtol=1e-5, atol=1e-6)
    unpack_edges(model)
    before = onnx.ModelProto.FromString(plain).graph
    assert (model.graph.node, model.graph.input, model.graph.output) == (before.node, before.input, before.output)


def _run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, feeds)
    return results


def _group_query_attention(query: np.ndarray, packed: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return what ONNX Runtime's own operator computes with a cache of 4 bits as keys and as values."""
    inputs = ["x", "x", "x", "past", "past", "lengths", "total", "", "", "", "", "", "scale", "scale"]
    facts = {"num_heads": 2, "kv_num_heads": 2, "kv_cache_bit_width": 4}
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    node = helper.make_node("GroupQueryAttention", inputs, ["y", "k", "v"], domain="com.microsoft", **facts, **kinds)
    types = {"x": TensorProto.FLOAT, "past": TensorProto.UINT8, "lengths": TensorProto.INT32}
    types |= {"total": TensorProto.INT32, "scale": TensorProto.FLOAT}
    shapes = {"x": [1, 1, 16], "past": [1, 2, 5, 4], "lengths": [1], "total": [], "scale": [1]}
    edges = [helper.make_tensor_value_info(name, kind, shapes[name]) for name, kind in types.items()]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    results += [helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in ("k", "v")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", edges, results), opset_imports=opsets, ir_version=10)
    sizes = {"lengths": np.array([5], np.int32), "total": np.array(6, np.int32), "scale": scale.reshape(1)}
    return _run(model, x=query, past=packed, **sizes)[0]


def test_rows_of_an_odd_length_are_refused_with_4_bits(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("past", TensorProto.INT4, ["b", 2, "p", 7])
    model = helper.make_model(helper.make_graph([], "graph", [value], []))
    with pytest.raises(ConfigError, match="'past' has rows of 7 codes of 4 bits, which do not fill bytes"):
        pack_edges(model, {"past": int(TensorProto.INT4)})
