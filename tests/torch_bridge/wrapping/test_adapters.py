"""LoRA adapters of PEFT: on a quantized base, and in a model that is quantized with them."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch_models import calibrated, seeded
from training_models import loss_of

import qsdk
from qsdk import ExportError, QuantSim, w4a8, w8a8


class Tower(nn.Module):
    """Two Linears that adapters go around, and functions between: [N, 6] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.relu(self.up(x)) + 1)) * 2)


X = seeded(8, 6)
LORA = {"r": 2, "target_modules": ["up", "down"], "init_lora_weights": False}


def base() -> nn.Module:
    torch.manual_seed(0)
    return Tower()


def train(sim: QuantSim, model: Any) -> list[float]:
    """A few steps with all that has a gradient."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(8):
        loss = loss_of(model(X))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_adapters_train_on_a_quantized_base_that_does_not_change():
    sim = calibrated(base(), X, w4a8())
    kept = {name: tensor.clone() for name, tensor in sim.model.state_dict().items()}
    with sim.training():
        adapted = peft.get_peft_model(sim.model, peft.LoraConfig(**LORA))
        layer = sim.model.up
        losses = train(sim, adapted)
        inside: list[Tensor] = []
        layer.base_layer.register_forward_hook(lambda module, args, out: inside.extend([args[0], out]))
        whole: list[Tensor] = []
        layer.register_forward_hook(lambda module, args, out: whole.append(out))
        adapted(X)
    assert losses[-1] < losses[0]
    # the base computes with its weight on the grid, the adapter in float
    weight = torch.from_numpy(sim.encodings["up:weight"].fake_quantize(kept["up.weight"].numpy()))
    bias = torch.from_numpy(sim.encodings["up:bias"].fake_quantize(kept["up.bias"].numpy()))
    expected = nn.functional.linear(inside[0], weight, bias)
    torch.testing.assert_close(inside[1], expected, rtol=1e-6, atol=1e-6)
    added = layer.lora_B["default"](layer.lora_A["default"](inside[0])) * layer.scaling["default"]
    torch.testing.assert_close(whole[0], inside[1] + added, rtol=1e-6, atol=1e-6)
    state = {name.replace(".base_layer", ""): tensor for name, tensor in sim.model.state_dict().items()}
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items()), "the base has moved"
    assert "came into the model" in sim.coverage().summary["up (Linear)"]
    with pytest.raises(ExportError, match=r"came into the model after that was quantized.*merge_and_unload"):
        sim.traced()

    merged = adapted.merge_and_unload()
    assert merged is sim.model
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    torch.testing.assert_close(merged.up.weight, kept["up.weight"] + delta, rtol=1e-6, atol=1e-6)
    qsdk.calibrate(sim, [X], progress=False)  # the merged weights have ranges of their own
    assert not any("came into the model" in str(note) for note in sim.coverage().summary.values())
    assert sim.traced()[0]


@pytest.mark.slow
def test_a_model_with_adapters_is_quantized_with_them_and_merges_after():
    config = w8a8().override("*.lora_*", weight="int8", activation="uint8")
    sim = calibrated(peft.get_peft_model(base(), peft.LoraConfig(**LORA)), X, config)
    assert sim.plan.decisions["base_model.model.up.lora_A.default:weight"].quantized
    frozen = {name: p.detach().clone() for name, p in sim.model.named_parameters() if not p.requires_grad}
    with sim.training(learn_scales=True) as model:
        losses = train(sim, model)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in sim.model.named_parameters() if n in frozen)
    plain = sim.unwrap()
    expected = plain(X)
    merged = plain.merge_and_unload()
    assert type(merged) is Tower
    torch.testing.assert_close(merged(X), expected, rtol=1e-4, atol=1e-5)
