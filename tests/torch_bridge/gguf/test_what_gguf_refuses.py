"""What `qsdk.export(format="gguf")` refuses, and what it says."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny_decoders import decoder, gpt2, plain_sim
from torch import nn

import qsdk
from torch_bridge.gguf import write
from torch_bridge.gguf.architectures import architecture_of

W4 = qsdk.weight_only("int4", block_size=32)
WIDE = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def sim():
    return plain_sim(decoder("Llama", **WIDE, intermediate_size=40), W4.override("*up_proj", weight="int8"))


def refusal(sim, folder: Path, **options) -> str:
    with pytest.raises((qsdk.ExportError, qsdk.ConfigError)) as error:
        qsdk.export(sim, folder / "model.gguf", format="gguf", **options)
    assert list(folder.iterdir()) == []
    return str(error.value)


@pytest.mark.slow
def test_a_weight_that_no_type_holds_is_named(sim, tmp_path: Path):
    said = refusal(sim, tmp_path)
    assert "no type of GGUF holds the weight" in said
    assert "is no float16" in said
    assert '.for_dialect("gguf")' in said


def test_options_of_onnx(sim, tmp_path: Path):
    assert refusal(sim, tmp_path, opset=20, prefer="size").startswith("opset, prefer: for ONNX alone")
    assert refusal(sim, tmp_path, max_shard_bytes=9).startswith("max_shard_bytes= is for format='compressed-tensors'")


@pytest.mark.slow
def test_activations_have_no_place(tmp_path: Path):
    sim = plain_sim(decoder("Llama", **WIDE), qsdk.w8a8())
    assert "GGUF holds weights alone, and has no place for model.embed_tokens:output (uint8)" in refusal(sim, tmp_path)


def test_models_that_llama_cpp_has_no_form_of(tmp_path: Path):
    model = nn.Sequential(nn.Linear(32, 32))
    sim = qsdk.quantize(model, torch.ones(1, 32), W4)
    qsdk.calibrate(sim, [], progress=False)
    assert "Sequential is none; export it as ONNX" in refusal(sim, tmp_path)
    with pytest.raises(qsdk.ExportError, match="no form of a gpt2 model in GGUF is known; llama, mistral"):
        architecture_of(gpt2().config.to_dict())


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Llama", {"hidden_act": "gelu"}, "the activation silu, and this one has gelu"),
        ("Gemma2", {}, "query_pre_attn_scalar 8, and this one has 256"),
        ("Gemma2", {"query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 2}, "layers of types"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no rotation in every layer of 4"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "a rotary embedding of type default or linear or llama3, and this one has dynamic",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise(kind, changes, said):
    with pytest.raises(qsdk.ExportError, match=said):
        architecture_of(decoder(kind, **changes).config.to_dict())


def test_a_window_ends_the_context(tmp_path: Path):
    config = decoder("Mistral", sliding_window=100).config.to_dict()
    assert write.facts_of(config, architecture_of(config))["context_length"] == 100


def test_an_onnx_file_and_a_missing_package(sim, tmp_path: Path, monkeypatch):
    def missing(name: str):
        if name == "gguf":
            raise ModuleNotFoundError(name)
        return import_module(name)

    monkeypatch.setattr(write, "import_module", missing)
    assert "pip install 'qsdk[gguf]'" in refusal(sim, tmp_path)
    model = nn.Sequential(nn.Linear(32, 32))
    small = qsdk.quantize(model, torch.ones(1, 32), W4)
    qsdk.calibrate(small, [], progress=False)
    qsdk.export(small, tmp_path / "model.onnx")
    with pytest.raises(qsdk.ExportError, match="gguf holds modules of PyTorch, not ONNX models"):
        qsdk.export(qsdk.quantize(tmp_path / "model.onnx"), tmp_path / "model.gguf", format="gguf")


@pytest.mark.slow
def test_a_head_beside_tokens_is_not_written_twice(tmp_path: Path):
    sim = plain_sim(decoder("Llama", **WIDE, tie_word_embeddings=True), W4.for_dialect("gguf"))
    report = qsdk.export(sim, tmp_path / "model.gguf", format="gguf")
    assert [row["form"] for row in report.rows if "embed" in row["site"] or "head" in row["site"]] == [
        "Q8_0, token_embd.weight"
    ]
