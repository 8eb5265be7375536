"""Low-rank adapters in a folder for onnxruntime-genai: its Generator goes on as the sim does with each of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from genai_folders import greedy, nodes, text
from peft import LoraConfig, get_peft_model
from tiny_decoders import decoder, plain_sim, tokens

import qsdk

FLOAT = qsdk.weight_only("int4", block_size=32, kv_cache="float32", compute="float32")
# peft asks it of transformers
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
PROMPT = tokens(5, length=9)[0].tolist()
EVERYTHING, SOME = "all-linear", ["q_proj", "v_proj", "down_proj"]


def adapted(red: Any, blue: Any, kind: str = "Llama", **facts: Any) -> Any:
    """Return a decoder with two adapters of different ranks and scalings, in the middle of their training."""
    torch.manual_seed(0)
    sizes = {"init_lora_weights": False, **facts}
    base = decoder(kind, head_dim=16, hidden_size=64)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=red, **sizes), adapter_name="red")
    model.add_adapter("blue", LoraConfig(r=2, lora_alpha=6, target_modules=blue, **sizes))
    return model.eval()


LAYERS = [pytest.param(EVERYTHING, SOME, marks=pytest.mark.slow, id="all"), pytest.param(SOME, ["q_proj"], id="some")]


@pytest.mark.parametrize(("red", "blue"), LAYERS)
def test_the_generator_goes_on_as_the_sim_does_with_each_adapter(red: Any, blue: Any, tmp_path: Path):
    sim = plain_sim(adapted(red, blue, task_type="CAUSAL_LM"), FLOAT)
    report = qsdk.export(sim, tmp_path, format="genai", adapters="inputs")
    assert {Path(path).name for path in report.summary["paths"]} >= {"red.onnx_adapter", "blue.onnx_adapter"}
    assert report.summary["logits_sqnr_db"] > 90
    assert "plain" not in report.summary
    assert (nodes(tmp_path)["GroupQueryAttention"], nodes(tmp_path)["Transpose"]) == (2, 0)
    texts = {}
    for name in ("red", "blue"):
        sim.model.set_adapter(name)
        texts[name] = text(tmp_path, PROMPT, 16, name)
        assert texts[name] == greedy(sim.model, PROMPT, 16)
    assert texts["red"] != texts["blue"]
    assert text(tmp_path, PROMPT, 16) == texts["red"]  # the active one is the default


def test_queries_keys_and_values_stay_one_product_with_one_adapter(tmp_path: Path):
    sim = plain_sim(adapted(SOME, SOME), FLOAT)
    qsdk.export(sim, tmp_path, format="genai", adapters="inputs", check=False)
    found = nodes(tmp_path)
    assert found["MatMulNBits"] == 2 * 5 + 1  # one of queries, keys and values, four more in a layer, the head
    assert found["MatMul"] == 2 * 2 * 2  # two layers, two adapters in each, two matrices
    assert found["Mul"] == 2 * 2  # of the activation: scalings are in the matrices
