"""Every kind of sim in onnxruntime-genai: what verbs and training made of the weights is what its Generator reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from genai_folders import greedy, nodes, text
from tiny_decoders import decoder, plain_sim, tokens

import qsdk
from qsdk import QuantConfig, QuantSim

FLOAT = qsdk.weight_only("int4", block_size=32, kv_cache="float32", compute="float32")
MIXED = (
    FLOAT.override("*.0.mlp.*", weight="int8").override("down_proj", weight="int2").override("lm_head", weight="uint8")
)
DATA = [{"input_ids": tokens(seed, length=16)} for seed in range(20, 24)]
PROMPT = tokens(5, length=9)[0].tolist()


def trained(sim: QuantSim) -> QuantSim:
    """Train a few steps, with the scales."""
    with sim.training(learn_scales=True):
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.05))
        for batch in DATA:
            optimizer.zero_grad()
            logits = sim.model(**batch).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:]).backward()
            optimizer.step()
    return sim


def by(verb: Callable[..., Any], **options: Any) -> Callable[[QuantSim], QuantSim]:
    """Return what runs a verb on a sim."""

    def change(sim: QuantSim) -> QuantSim:
        verb(sim, DATA, progress=False, **options)
        return sim

    return change


def rotated(sim: QuantSim) -> QuantSim:
    """Rotate a sim, and find its ranges again."""
    qsdk.rotate(sim, DATA, progress=False)
    qsdk.calibrate(sim, DATA, progress=False)
    return sim


#: kind of sim -> its config, and what changes it
KINDS: dict[str, tuple[QuantConfig, Callable[[QuantSim], QuantSim]]] = {
    "gptq": (FLOAT, by(qsdk.gptq)),
    "awq": (FLOAT, by(qsdk.awq)),
    "adaround": (FLOAT, by(qsdk.adaround, iterations=20)),
    "rotate": (FLOAT, rotated),
    "training": (FLOAT, trained),
    "zero points": (FLOAT.override("*_proj", weight="uint4"), by(qsdk.gptq)),
    "2 bits": (FLOAT.override("*_proj", weight="int2"), by(qsdk.gptq)),
    "mixed bits": (MIXED.override("v_proj", weight="uint8"), by(qsdk.gptq)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_reads_what_a_verb_has_made(kind: str, tmp_path: Path):
    config, change = KINDS[kind]
    torch.manual_seed(0)
    # a mask is made for a step with a cache alone, and without one sdpa repeats heads on another line
    attention = "eager" if kind == "training" else "sdpa"
    sim = plain_sim(decoder("Llama", head_dim=16, hidden_size=64, attn_implementation=attention), config)
    before = {name: value.clone() for name, value in sim.model.state_dict().items() if name.endswith("proj.weight")}
    scales = {site: encoding.scale.copy() for site, encoding in sim.encodings.items()}
    change(sim)
    changed = [name for name, value in before.items() if not torch.equal(value, sim.model.state_dict()[name])]
    moved = [site for site, scale in scales.items() if not (scale == sim.encodings[site].scale).all()]
    assert changed or moved
    report = qsdk.export(sim, tmp_path / "llama", format="genai")
    assert report.summary["logits_sqnr_db"] > 90  # nothing rounds while it runs
    assert "plain" not in report.summary
    assert text(tmp_path / "llama", PROMPT, 32) == greedy(sim.model, PROMPT, 32)
    assert nodes(tmp_path / "llama")["MatMulNBits"] >= 7
