"""Checkpoints in bfloat16 and float16, as nearly all are, as folders of the same fused forms as those in float32."""

from pathlib import Path

import onnx
import pytest
import torch
from genai_folders import nodes
from tiny_decoders import decoder, plain_sim

import qsdk
from onnx_backend.genai.fuse import _Named
from onnx_backend.proto.nodes import attributes

CONFIG = qsdk.weight_only("int4", block_size=32).override("lm_head", weight="float32").for_dialect("genai")


#: kind of decoder -> what of it is not the default
KINDS = {
    "Gemma2": {"sliding_window": 6},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_decoders_in_bfloat16_have_all_their_forms(kind: str, tmp_path: Path):
    config = qsdk.weight_only("int4", block_size=32, kv_cache="float32", compute="float32")
    sim = plain_sim(decoder(kind, head_dim=16, hidden_size=64, **KINDS[kind]).to(torch.bfloat16), config)
    facts = qsdk.export(sim, tmp_path / kind, format="genai").summary
    assert (facts["attentions"], facts.get("plain")) == (2, None)
    assert facts["logits_sqnr_db"] > 35
    assert facts["forms_sqnr_db"] > 75  # experts in one kernel add up otherwise
    assert not nodes(tmp_path / kind).keys() & {"IsNaN", "Cos", "Where"}  # a router has a Softmax


def levels(folder: Path) -> set[int]:
    """Return the levels of accuracy of the products in a folder."""
    found = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    return {attributes(node)["accuracy_level"] for node in found if node.op_type == "MatMulNBits"}


def written(folder: Path, dtype: torch.dtype) -> qsdk.Report:
    """Write a checkpoint of the same numbers in a dtype as a folder; its head is large and stays float."""
    model = decoder("Llama", head_dim=16, hidden_size=64, vocab_size=2048).to(torch.bfloat16).to(dtype)
    model.save_pretrained(folder / "checkpoint")
    sim = qsdk.quantize(folder / "checkpoint", None, CONFIG)
    qsdk.calibrate(sim, [], progress=False)
    return qsdk.export(sim, folder / "genai", format="genai")


@pytest.mark.parametrize("name", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_checkpoint_of_another_float_type_gets_the_forms_of_float32(name: str, tmp_path: Path):
    facts = written(tmp_path / name, getattr(torch, name)).summary
    assert facts["computes"] == f"float32, where the simulation rounds each result to {name}"
    assert (facts["attentions"], facts.get("plain")) == (2, None)
    assert facts["logits_sqnr_db"] > 35  # with inputs of layers rounded to int8, on both sides
    assert facts["forms_sqnr_db"] > 100  # the simulation in float32, and no inputs rounded
    assert levels(tmp_path / name / "genai") == {4}  # the kernel of int8, as in a folder of float32
    assert "computes" not in written(tmp_path / "float32", torch.float32).summary
    assert nodes(tmp_path / name / "genai") == nodes(tmp_path / "float32" / "genai")


def test_a_form_that_is_wrong_by_a_little_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sim = plain_sim(decoder("Llama", num_hidden_layers=1).to(torch.bfloat16), CONFIG)
    monkeypatch.setattr(_Named, "_epsilon", lambda self, group: 5e-6)  # for 1e-6, beside a variance of 4e-4
    with pytest.raises(qsdk.ExportError, match=r"with the inputs of all layers in floats, its logits are \d\d\.\d dB"):
        qsdk.export(sim, tmp_path / "wrong", format="genai")
    assert not (tmp_path / "wrong" / "model.onnx").exists()
    assert next(sim.model.parameters()).dtype == torch.bfloat16
