"""Checkpoints of a training: the loss curve goes on bit for bit, and a checkpoint fits a sim in any state."""

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    schedules = [qsdk.observe_ranges(2), qsdk.anneal_bits({0: 8, 3: 6, 5: 4}), qsdk.freeze_ranges(6, "weights")]
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
    """Losses of the rest; the encodings at the end stand in the sim."""
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


@pytest.mark.parametrize("at", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_goes_on_bit_for_bit(kind: str, at: int, tmp_path: Path):
    losses, trained = whole(kind)
    first, path = sim_of(), tmp_path / "checkpoint.pt"
    with block(first):
        optimizer = optimizer_of(first, kind)
        begun = run(first, optimizer, 0, at)
        saved(first, optimizer, path)
    other = sim_of()
    qsdk.calibrate(other, [batch(55) * 7], progress=False)  # nothing of the checkpoint is known here
    assert begun + resumed(other, kind, path, at) == losses
    assert other.encodings == trained.encodings
    assert same_model(other, trained)


def test_training_resumes_from_a_checkpoint_in_a_sim_that_was_never_calibrated(tmp_path: Path):
    losses, trained = whole("adam")
    first, path = sim_of(), tmp_path / "checkpoint.pt"
    with block(first):
        optimizer = optimizer_of(first, "adam")
        run(first, optimizer, 0, 4)
        saved(first, optimizer, path)
    other = sim_of(calibrated=False)
    assert resumed(other, "adam", path, 4) == losses[4:]  # observing gives the ranges that parameters need
    assert same_model(other, trained)
    # without observing: the encodings come first, from the same file
    plain, again = sim_of(), sim_of(calibrated=False)
    with plain.training(learn_scales=True):
        optimizer = optimizer_of(plain, "adam")
        run(plain, optimizer, 0, 3)
        saved(plain, optimizer, path)
        rest = run(plain, optimizer, 3, 6)
    again.model.load_state_dict(torch.load(path)["model"])
    with again.training(learn_scales=True):
        optimizer = optimizer_of(again, "adam")
        again.model.load_state_dict(torch.load(path)["model"])
        optimizer.load_state_dict(torch.load(path)["optimizer"])
        assert run(again, optimizer, 3, 6) == rest
    assert same_model(plain, again)


def test_a_checkpoint_of_a_training_loads_into_a_sim_outside_of_one(tmp_path: Path):
    sim, path = sim_of(), tmp_path / "checkpoint.pt"
    with block(sim) as model:
        optimizer = optimizer_of(sim, "adam")
        run(sim, optimizer, 0, 6)
        saved(sim, optimizer, path)
        inside = sim.encodings
        model.eval()
        with torch.no_grad():
            wanted = model(batch(3))
    for other in (sim_of(), sim_of(calibrated=False)):
        found = other.model.load_state_dict(torch.load(path)["model"])
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        assert other.encodings == inside == sim.encodings
        assert torch.equal(other(batch(3)), wanted)


def test_the_best_weights_may_be_loaded_inside_the_block():
    sim = sim_of()
    with block(sim) as model:
        optimizer = optimizer_of(sim, "adam")
        run(sim, optimizer, 0, 1)
        best = copy.deepcopy(model.state_dict())
        encodings = sim.encodings
        run(sim, optimizer, 1, 5)
        assert sim.quantizers["0:weight"].finer_grid is None
        model.load_state_dict(best)
        assert sim.encodings == encodings
        assert sim.quantizers["0:weight"].finer_grid.dtype.bits == 8  # the steps of the checkpoint count


def test_save_and_load_after_the_block(tmp_path: Path):
    _, trained = whole("adam")
    qsdk.save(trained, tmp_path / "sim.qsdk")
    loaded = qsdk.load(tmp_path / "sim.qsdk", network())
    assert loaded.encodings == trained.encodings
    assert torch.equal(loaded(batch(1)), trained(batch(1)))
    # and training goes on from there as from the trained sim
    found = []
    for sim in (loaded, copy.deepcopy(trained)):
        with sim.training(learn_scales=True):
            found.append(run(sim, optimizer_of(sim, "momentum"), 0, 3))
    assert found[0] == found[1]


SCRIPT = """
import sys, json
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_resume as t
import torch
torch.set_num_threads(1)
sim = t.sim_of(calibrated=False)
losses = t.resumed(sim, "adam", Path(sys.argv[2]), 3)
print(json.dumps([losses, {site: [e.scale.tolist(), e.zero_point.tolist()] for site, e in sim.encodings.items()}]))
"""


@pytest.mark.nightly
def test_a_training_is_resumed_in_a_new_process(tmp_path: Path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sim, path = sim_of(), tmp_path / "checkpoint.pt"
        with block(sim):
            optimizer = optimizer_of(sim, "adam")
            run(sim, optimizer, 0, 3)
            saved(sim, optimizer, path)
            losses = run(sim, optimizer, 3, STEPS)
    finally:
        torch.set_num_threads(threads)
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, encodings = json.loads(done.stdout.splitlines()[-1])
    assert found == losses
    for site, (scale, zero_point) in encodings.items():
        assert np.array_equal(np.float32(scale), sim.encodings[site].scale)
        assert np.array_equal(zero_point, sim.encodings[site].zero_point)
