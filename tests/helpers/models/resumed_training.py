"""A small QAT run that is saved and resumed; as a script: `resumed_training.py checkpoint step`, in a new process."""

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qsdk

STEPS = 8
KINDS = ("adam", "momentum")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, 3)).eval()


def batch(seed: int) -> Tensor:
    return torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 3)


@functools.cache
def made() -> Any:
    return qsdk.quantize(network(), batch(0), qsdk.w4a8())


def sim_of(*, calibrated: bool = True) -> Any:
    sim = copy.deepcopy(made())
    if calibrated:
        qsdk.calibrate(sim, [batch(100)], progress=False)
    return sim


def block(sim: Any) -> Any:
    schedules = [qsdk.train.freeze_ranges(0, "activations", until=2), qsdk.train.freeze_ranges(6, "weights")]
    return sim.training(learn_scales=True, learn_zero_points=True, schedules=schedules)


def optimizer_of(sim: Any, kind: str) -> torch.optim.Optimizer:
    groups = sim.parameter_groups(lr=0.01, scale_lr=0.02)
    return torch.optim.Adam(groups) if kind == "adam" else torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-3)


def run(sim: Any, optimizer: torch.optim.Optimizer, start: int, end: int) -> list[float]:
    losses = []
    for number in range(start, end):
        optimizer.zero_grad()
        loss = sim.model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def saved(sim: Any, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": sim.model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def resumed(sim: Any, kind: str, path: Path, start: int) -> list[float]:
    """Return the losses of the remaining steps; the sim then has the encodings of the end."""
    with block(sim):
        optimizer = optimizer_of(sim, kind)
        found = torch.load(path)
        sim.model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return run(sim, optimizer, start, STEPS)


@functools.cache
def whole(kind: str) -> tuple[list[float], Any]:
    sim = sim_of()
    with block(sim):
        losses = run(sim, optimizer_of(sim, kind), 0, STEPS)
    return losses, sim


def same_model(one: Any, other: Any) -> bool:
    first, second = one.model.state_dict(), other.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def main(path: Path, start: int) -> None:
    """Resume a training in a sim that was never calibrated, and print its losses and encodings as JSON."""
    torch.set_num_threads(1)
    sim = sim_of(calibrated=False)
    losses = resumed(sim, "adam", path, start)
    print(json.dumps([losses, {site: [e.scale.tolist(), e.zero_point.tolist()] for site, e in sim.encodings.items()}]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
