"""Decoders in onnxruntime-genai: its own Generator writes the tokens of the simulation, in its fused forms."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import transformers
from genai_folders import greedy, nodes, steps, text
from tiny_decoders import VOCABULARY, decoder, plain_sim, tokens
from torch import nn

import qsdk
from onnx_backend.genai import products
from onnx_backend.genai.products import packed_bits
from qsdk import QuantConfig, QuantSim
from qsdk.verbs.formats import decoder_facts

W4 = qsdk.weight_only("int4", block_size=32, kv_cache="float32")


def tiny(kind: str, **changes: Any) -> nn.Module:
    """Return a decoder with heads of 16, the least that the runtime's kernel turns."""
    return decoder(kind, **{"head_dim": 16, **changes})


def test_tokens_of_a_llama_are_those_of_the_simulation(tmp_path: Path):
    sim = plain_sim(tiny("Llama"), W4)
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    assert report.summary["attentions"] == 2
    assert "plain" not in report.summary
    assert report.summary["tokens_equal"] == report.summary["generated"]
    prompt = tokens(5, length=9)[0].tolist()
    assert text(tmp_path / "llama", prompt, 16) == greedy(sim.model, prompt, 16)
    found = nodes(tmp_path / "llama")
    assert found["GroupQueryAttention"] == 2
    assert found["MatMulNBits"] == 2 * 5 + 1  # queries, keys and values are one
    assert found["SkipSimplifiedLayerNormalization"] == 4
    assert not found.keys() & {"MatMul", "Softmax", "Pow", "Cos", "Concat"}


#: kind of decoder -> what of it is not the default; heads of which a part is turned have 32 numbers or more
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Cohere": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 6},
    "Glm": {"hidden_size": 128, "head_dim": 32},
    "Granite": {},
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {"hidden_size": 128, "head_dim": 32},
    "Phi3": {"hidden_size": 128, "head_dim": 32, "partial_rotary_factor": 0.5},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "StableLm": {"hidden_size": 256, "head_dim": 64},
    "Starcoder2": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_64_tokens_of_every_architecture_are_those_of_the_simulation(kind: str, tmp_path: Path):
    sim = plain_sim(tiny(kind, **{"hidden_size": 64, **ARCHITECTURES[kind]}), W4)
    report = qsdk.export(sim, tmp_path / kind, format="genai", check=False)
    assert report.summary["attentions"] == 2
    assert "plain" not in report.summary
    prompt = tokens(5, length=9)[0].tolist()
    assert text(tmp_path / kind, prompt, 64) == greedy(sim.model, prompt, 64)
    assert not nodes(tmp_path / kind).keys() & {"MatMul", "Softmax"}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_sinks_take_their_share_in_the_kernel(cache: str, tmp_path: Path):
    model = tiny("GptOss", hidden_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks, 1.0, 2.0)
    config = qsdk.weight_only("int4", block_size=32, kv_cache=cache, compute="float32").for_dialect("genai")
    sim = plain_sim(model, config)
    report = qsdk.export(sim, tmp_path / "oss", format="genai")
    assert report.summary["attentions"] == 2
    assert "plain" not in report.summary
    assert json.loads((tmp_path / "oss" / "genai_config.json").read_text())["search"]["past_present_share_buffer"]
    assert steps(tmp_path / "oss", sim, tokens(5, length=9)[0].tolist(), 24) < 1e-4
    for layer in sim.model.model.layers:  # the test sees sinks: without them it is another model
        nn.init.constant_(layer.self_attn.sinks, -100.0)
    assert steps(tmp_path / "oss", sim, tokens(5, length=9)[0].tolist(), 4) > 1e-2


@pytest.mark.slow
def test_a_rotary_embedding_has_rows_for_short_texts_and_for_long_ones(tmp_path: Path):
    # Phi-4-mini in its own proportions: of 128 numbers of a head, 96 are turned, by factors for short and long texts
    factors = {"short_factor": [1 + i / 40 for i in range(48)], "long_factor": [2 + i / 8 for i in range(48)]}
    turned = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    turned["original_max_position_embeddings"] = 64
    sizes = {"hidden_size": 512, "head_dim": 128, "num_hidden_layers": 1, "max_position_embeddings": 256}
    model = decoder("Phi3", rope_parameters=turned, original_max_position_embeddings=64, **sizes)
    sim = plain_sim(model, qsdk.weight_only("int4", block_size=32, kv_cache="float32"))
    report = qsdk.export(sim, tmp_path / "phi", format="genai")
    assert report.summary["attentions"] == 1
    assert "texts of 64 tokens and fewer" in report.summary["switch"]
    for length in (9, 60, 65, 100, 250):
        assert steps(tmp_path / "phi", sim, tokens(5, length=length)[0].tolist(), 4) < 1e-4
    graph = onnx.load(tmp_path / "phi" / "model.onnx").graph
    assert {tuple(one.dims) for one in graph.initializer if "_cache" in one.name} == {(64 + 256, 48)}


TABLES: list[dict[str, Any]] = [{}, {"weight": "int8", "block_size": 32}, {"weight": "int4", "block_size": 32}]


def tied_sim(table: dict[str, Any], config: QuantConfig = W4) -> QuantSim:
    """Return a sim of a decoder whose output layer is its embedding."""
    config = config.override("embed_tokens", **table) if table else config
    return plain_sim(tiny("Llama", hidden_size=64, tie_word_embeddings=True), config)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "int8"])
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_an_output_layer_that_is_the_embedding_is_stored_once(table: dict[str, Any], compute: str, tmp_path: Path):
    sim = tied_sim(table, qsdk.weight_only("int4", block_size=32, kv_cache="float32", compute=compute))
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    # a code of an input of the layers may be its neighbour in the kernel
    assert report.summary["logits_sqnr_db"] > (40 if compute == "int8" else 100)
    in_8_bits = table.get("weight") != "int4"
    assert ("slow" in report.summary) == (compute == "float32" and in_8_bits)
    prompt = tokens(5, length=9)[0].tolist()
    assert text(tmp_path / "llama", prompt, 32) == greedy(sim.model, prompt, 32)
    found = nodes(tmp_path / "llama")
    assert found["MatMulNBits"] == 2 * 5 + 1
    assert found["GatherBlockQuantized"] == 1
    assert not found.keys() & {"MatMul", "DequantizeLinear", "Round"}
    forms = {row["site"]: row["form"] for row in report.rows}
    assert forms["model.embed_tokens:weight"].endswith("the codes of lm_head:weight")


def kernel_of(folder: Path, reads: tuple[str, int], width: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return what runs the one node of a type in a folder's model alone, by its input at a place."""
    model = onnx.load(folder / "model.onnx")
    kind, place = reads
    found = [node for node in model.graph.node if node.op_type == kind]
    node = next((node for node in found if node.output[0] == "logits"), found[-1])
    behind = [one for one in model.graph.node if one.output[0] in node.input and one.op_type == "Reshape"]
    element = onnx.TensorProto.FLOAT if kind == "MatMulNBits" else onnx.TensorProto.INT64
    sizes = ["batch", "step", width] if kind == "MatMulNBits" else ["batch", "step"]
    edge = onnx.helper.make_tensor_value_info(node.input[place], element, sizes)
    result = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
    read = {name for one in (*behind, node) for name in one.input}
    stored = [tensor for tensor in model.graph.initializer if tensor.name in read]
    graph = onnx.helper.make_graph([*behind, node], kind, [edge], [result], stored)
    alone = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    session = ort.InferenceSession(alone.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda values: session.run(None, {edge.name: values})[0]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_an_output_layer_that_is_the_embedding_rounds_its_input_as_its_kernel_does(
    table: dict[str, Any], tmp_path: Path
):
    sim = tied_sim(table, W4.for_dialect("genai"))
    qsdk.export(sim, tmp_path / "llama", format="genai", check=False)
    seen: dict[str, np.ndarray] = {}
    for name, module in (("rows", sim.model.model.embed_tokens), ("last", sim.model.model.norm)):
        module.register_forward_hook(lambda *call, name=name: seen.update({name: call[-1].numpy()}))
    ids = tokens(5, batch=4, length=40)
    with torch.no_grad():
        wanted = sim.model(input_ids=ids).logits.numpy()
        exact = seen["last"] @ sim.model.lm_head.weight.detach().numpy().T
    rows = kernel_of(tmp_path / "llama", ("GatherBlockQuantized", 1), 64)(ids.numpy())
    np.testing.assert_array_equal(rows, seen["rows"])
    logits = kernel_of(tmp_path / "llama", ("MatMulNBits", 0), 64)(seen["last"])
    # a code that is its neighbour would be a step of 1/127 of the largest of a block
    np.testing.assert_allclose(logits, wanted, atol=2e-6 * np.abs(wanted).max())
    assert np.abs(exact - wanted).max() > 1e-4 * np.abs(wanted).max()
    site = {row["site"]: row["reason"] for row in sim.coverage().rows}["lm_head:weight"]
    assert "its layer rounds its input to int8, per block of 32" in site


@pytest.mark.slow
def test_layers_with_rotary_embeddings_and_windows_of_their_own(tmp_path: Path):
    kinds = ["sliding_attention", "full_attention"]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": kinds, "sliding_window": 6}
    torch.manual_seed(0)
    ends = {"eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 128}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **heads, **ends)).eval()
    sim = plain_sim(model, W4)
    qsdk.export(sim, tmp_path / "gemma", format="genai", check=False)
    prompt = tokens(5, length=9)[0].tolist()
    assert text(tmp_path / "gemma", prompt, 64) == greedy(sim.model, prompt, 64)
    graph = onnx.load(tmp_path / "gemma" / "model.onnx", load_external_data=False).graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    windows = [onnx.helper.get_node_attr_value(node, "local_window_size") for node in attentions]
    assert windows == [6, -1]
    assert len({node.input[7] for node in attentions}) == 2  # tables of two bases


@pytest.mark.slow
def test_heads_that_the_kernel_does_not_turn_stay_plain_and_are_named(tmp_path: Path):
    sim = plain_sim(decoder("Llama"), W4)  # heads of 8
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    assert report.summary["attentions"] == 0
    assert "does not turn a multiple of 8 pairs" in report.summary["plain"][0]
    assert report.summary["tokens_equal"] == report.summary["generated"]


def test_what_is_no_decoder_with_a_cache_is_refused(tmp_path: Path):
    sim = plain_sim(tiny("Llama"), qsdk.weight_only("int4", block_size=32))
    with pytest.raises(qsdk.ExportError, match="choose kv_cache='float32'"):
        qsdk.export(sim, tmp_path / "llama", format="genai")
    layer = qsdk.quantize(nn.Linear(32, 8), torch.ones(1, 32), qsdk.weight_only("int4"))
    qsdk.calibrate(layer, [], progress=False)
    with pytest.raises(qsdk.ExportError, match="for causal models of transformers"):
        qsdk.export(layer, tmp_path / "layer", format="genai")
    with pytest.raises(qsdk.ConfigError, match="tokenizer= is for format='genai'"):
        qsdk.export(layer, tmp_path / "layer.onnx", tokenizer=object())
    assert not [*tmp_path.rglob("*.onnx")]


def test_a_model_of_an_encoder_and_a_decoder_is_refused_by_its_name():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32}
    tokens_of_it = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **tokens_of_it)
    with pytest.raises(qsdk.ExportError, match="whisper has an encoder beside its decoder: export the two as ONNX"):
        decoder_facts(transformers.WhisperForConditionalGeneration(config))


@pytest.mark.slow
def test_a_folder_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sim = plain_sim(tiny("Llama"), W4)
    monkeypatch.setattr(products, "packed_bits", lambda codes, bits: np.zeros_like(packed_bits(codes, bits)))
    with pytest.raises(qsdk.ExportError, match="dB from the simulation's"):
        qsdk.export(sim, tmp_path / "llama", format="genai")
    assert [*(tmp_path / "llama").iterdir()] == []


def test_the_dialect_chooses_a_cache_and_the_fast_kernel():
    config = qsdk.w4a16(block_size=32).for_dialect("genai")
    assert str(config.kv_cache) == str(config.activation) == "float32"
    assert config.compute == "int8"
    assert str(qsdk.weight_only("int4", kv_cache="int8").for_dialect("genai").kv_cache) == "int8"
    with pytest.raises(qsdk.ConfigError, match="weight=int16 cannot be had in the dialect genai"):
        qsdk.weight_only("int16").for_dialect("genai")


@pytest.mark.slow
def test_a_cache_of_int8_holds_the_codes_of_the_simulation(tmp_path: Path):
    config = qsdk.weight_only("int4", block_size=32, kv_cache="int8", compute="float32").for_dialect("genai")
    sim = plain_sim(tiny("Llama"), config)
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    assert report.summary["logits_sqnr_db"] > 80  # no code is another one
    graph = onnx.load(tmp_path / "llama" / "model.onnx", load_external_data=False).graph
    edges = [one for one in (*graph.input, *graph.output) if "past" in one.name or "present" in one.name]
    assert {one.type.tensor_type.elem_type for one in edges} == {onnx.TensorProto.INT8}
    prompt = tokens(5, length=9)[0].tolist()
    assert text(tmp_path / "llama", prompt, 64) == greedy(sim.model, prompt, 64)


@pytest.mark.slow
def test_a_cache_with_zero_points_stays_plain_and_says_the_remedy(tmp_path: Path):
    sim = plain_sim(tiny("Llama"), qsdk.weight_only("int4", block_size=32, kv_cache="uint8"))
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    assert "for_dialect('genai') chooses one without" in report.summary["plain"][0]
    assert report.summary["tokens_equal"] == report.summary["generated"]
