"""Training at few bits on a real task: the loss goes down, and the network beats post-training quantization.

Margins are the mean over three seeds less two standard deviations, rounded down: here of the short training below on
1,000 test images, in the slow test of `benchmarks/qat_accuracy.py` on all of them.
"""

import copy
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

W2A8 = qsdk.QuantConfig(weight=qsdk.int2, activation=qsdk.uint8)
#: points over `tf_enhanced`, the better of the calibrations here
SHORT_MARGIN = 25.0
#: of the slow test: name -> points over the best calibration, and over the best of AdaRound too
MARGINS = {"w4a4": (0.9, 0.15), "w2a8": (26.9, 0.15)}
STEPS, BATCH = 40, 64


@functools.cache
def images() -> dict[str, tuple[Tensor, Tensor]]:
    data = load()
    test = torch.from_numpy(data.test_images[:1000]), torch.from_numpy(data.test_labels[:1000])
    return {
        "train": (torch.from_numpy(data.calibration_images), torch.from_numpy(data.calibration_labels)),
        "test": test,
    }


def accuracy(sim: Any) -> float:
    x, y = images()["test"]
    right = sum(
        int((sim(part).argmax(1) == labels).sum()) for part, labels in zip(x.split(500), y.split(500), strict=True)
    )
    return 100 * right / len(y)


@functools.cache
def calibrated() -> tuple[Any, float]:
    """The sim that `tf_enhanced` has calibrated, and its accuracy."""
    sim = qsdk.quantize(load_pretrained(), images()["train"][0][:8], W2A8)
    batches = list(images()["train"][0][:256].split(128))
    qsdk.calibrate(sim, batches, method="tf_enhanced", weight_method="tf_enhanced", progress=False)
    return sim, accuracy(sim)


def shortly_trained(seed: int) -> tuple[float, list[float]]:
    """Accuracy and losses of a training on 1,024 images, without their labels."""
    sim, teacher = copy.deepcopy(calibrated()[0]), load_pretrained()
    x, losses = images()["train"][0], []
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(STEPS * BATCH // len(x) + 1)])
    with sim.training(learn_scales=True):
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=1e-3, scale_lr=1e-2))
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for picked in order[: STEPS * BATCH].split(BATCH):
            loss = qsdk.distill_loss(sim, teacher, x[picked], temperature=2.0).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            losses.append(float(loss.detach()))
    return accuracy(sim), losses


@pytest.mark.slow
def test_a_short_training_at_two_bits_lowers_the_loss_and_beats_calibration():
    after, losses = shortly_trained(seed=0)
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    assert after >= calibrated()[1] + SHORT_MARGIN


@pytest.mark.nightly
@pytest.mark.network
@pytest.mark.parametrize("name", MARGINS)
def test_training_beats_post_training_quantization(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    benchmark = importlib.import_module("qat_accuracy")
    network = load_pretrained()
    ptq, start = benchmark.post_training(network, benchmark.CONFIGS[name])
    found = benchmark.trained(start, network, benchmark.STEPS, 0, benchmark.training_set())
    over_calibration, over_adaround = MARGINS[name]
    assert found >= max(ptq[method] for method in benchmark.METHODS) + over_calibration
    assert found >= max(ptq.values()) + over_adaround
