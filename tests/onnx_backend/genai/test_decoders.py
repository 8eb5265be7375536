"""Decoders in onnxruntime-genai: its own Generator writes the tokens of the simulation, in its fused forms."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import torch
from tiny_decoders import decoder, plain_sim, tokens
from torch import nn

import qsdk
from onnx_backend.genai.check import generate

W4 = qsdk.weight_only("int4", block_size=32, kv_cache="float32")


def tiny(kind: str, **changes: Any) -> nn.Module:
    """Return a decoder with heads of 16, the least that the runtime's kernel turns."""
    return decoder(kind, **{"head_dim": 16, **changes})


def nodes(folder: Path) -> Counter[str]:
    """Return how many nodes of each type the model of a folder has."""
    return Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)


def text(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that onnxruntime-genai goes on with, from the files of a folder alone."""
    config = json.loads((folder / "genai_config.json").read_text())
    return generate(folder / "model.onnx", config, prompt, count)[0].tolist()


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that `generate` of transformers goes on with."""
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()


def test_64_tokens_of_a_llama_are_those_of_the_simulation(tmp_path: Path):
    sim = plain_sim(tiny("Llama"), W4)
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    assert report.summary["attentions"] == 2
    assert "plain" not in report.summary
    assert report.summary["tokens_equal"] == report.summary["generated"]
    prompt = tokens(5, length=9)[0].tolist()
    assert text(tmp_path / "llama", prompt, 64) == greedy(sim.model, prompt, 64)
    found = nodes(tmp_path / "llama")
    assert found["GroupQueryAttention"] == 2
    assert found["MatMulNBits"] == 2 * 5 + 1  # queries, keys and values are one
    assert found["SkipSimplifiedLayerNormalization"] == 4
    assert not found.keys() & {"MatMul", "Softmax", "Pow", "Cos", "Concat"}
