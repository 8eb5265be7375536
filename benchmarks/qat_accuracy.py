"""Quantization-aware training of the demo network at few bits against post-training quantization, on its test images.

`python benchmarks/qat_accuracy.py [w4a4] [w2a8] [--seeds=N] [--steps=N]`: one JSON line. Post-training: the best of
`mse` and `tf_enhanced`, without and with AdaRound, all on 512 images. Training: on the official training set, from the
best of these on, with learned scales, on labels and on what the float network says. `least` is the mean over the seeds
less two standard deviations.
"""

import copy
import json
import statistics
import sys
from typing import Any

import torch
import torch.nn.functional as F
from ptq_networks import accuracy, calibration, training_set
from torch import Tensor, nn

import qsdk
from qsdk.demo.model import load_pretrained
from torch_bridge.sim import QuantSim

CONFIGS = {
    "w4a4": qsdk.QuantConfig(weight=qsdk.int4, activation=qsdk.uint4),
    "w2a8": qsdk.QuantConfig(weight=qsdk.int2, activation=qsdk.uint8),
}
METHODS = ("mse", "tf_enhanced")
STEPS, BATCH, RATE, SCALE_RATE = 1000, 64, 1e-3, 5e-3


def post_training(network: nn.Module, config: qsdk.QuantConfig) -> tuple[dict[str, float], QuantSim]:
    """Method -> accuracy in percent; and the sim of the best."""
    found, best = {}, None
    for method in METHODS:
        sim = qsdk.quantize(network, calibration(8)[0], config)
        qsdk.calibrate(sim, calibration(), method=method, weight_method=method, progress=False)
        found[method] = accuracy(sim)
        qsdk.adaround(sim, calibration(), progress=False)
        found[f"{method}+adaround"] = accuracy(sim)
        best = sim if found[f"{method}+adaround"] == max(found.values()) else best
    assert best is not None  # AdaRound is better than the calibration that it starts from
    return found, best


def batches(images: Tensor, labels: Tensor, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches in a random order, every second one mirrored."""
    generator = torch.Generator().manual_seed(seed)
    epochs = steps * BATCH // len(images) + 1
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(epochs)])
    picked = order[: steps * BATCH].view(steps, BATCH)
    return [(images[i].flip(3) if n % 2 else images[i], labels[i]) for n, i in enumerate(picked)]


def train(
    sim: QuantSim,
    network: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    rate: float,
    scale_rate: float,
    limits: dict[str, Any],
) -> None:
    """Train a sim on labels and on the outputs of its float network, `limits` its options."""
    with sim.training(learn_scales=True, **limits):
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=rate, scale_lr=scale_rate))
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(data))
        for x, y in data:
            found = qsdk.distill_loss(sim, network, x, temperature=2.0)
            loss = found.loss + F.cross_entropy(found.outputs, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()


def trained(start: QuantSim, network: nn.Module, steps: int, seed: int, data: tuple[Tensor, Tensor]) -> float:
    """The accuracy in percent after training a copy of the sim."""
    sim = copy.deepcopy(start)
    train(sim, network, batches(*data, steps, seed), RATE, SCALE_RATE, {})
    return accuracy(sim)


def main() -> None:
    options = dict(argument[2:].split("=") for argument in sys.argv[1:] if argument.startswith("--"))
    names = [argument for argument in sys.argv[1:] if argument in CONFIGS] or list(CONFIGS)
    seeds, steps = int(options.get("seeds", 3)), int(options.get("steps", STEPS))
    torch.set_num_threads(1)
    network, data = load_pretrained(), training_set()
    result: dict[str, object] = {"benchmark": "qat_accuracy, percent", "float": accuracy(network), "steps": steps}
    for name in names:
        config = CONFIGS[name]
        ptq, start = post_training(network, config)
        qat = []
        for seed in range(seeds):
            qat.append(trained(start, network, steps, seed, data))
            print(f"{name}, seed {seed}: {qat[-1]:.2f}", file=sys.stderr, flush=True)
        spread = statistics.stdev(qat) if len(qat) > 1 else 0.0
        least = statistics.mean(qat) - 2 * spread
        margins = {
            "over_calibration": round(least - max(ptq[method] for method in METHODS), 2),
            "over_adaround": round(least - max(ptq.values()), 2),
        }
        rounded = {key: round(value, 2) for key, value in ptq.items()}
        result[name] = {"ptq": rounded, "qat": [round(value, 2) for value in qat], "least": round(least, 2), **margins}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
