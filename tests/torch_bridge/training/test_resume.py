"""Checkpoints of a training: the loss curve goes on bit for bit, and a checkpoint fits a sim in any state."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import resumed_training
import torch
from resumed_training import (
    KINDS,
    STEPS,
    batch,
    block,
    network,
    optimizer_of,
    resumed,
    run,
    same_model,
    saved,
    sim_of,
    whole,
)

import qsdk


@pytest.mark.spread(3)
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


@pytest.mark.slow
def test_training_resumes_from_a_checkpoint_in_a_sim_that_was_never_calibrated(tmp_path: Path):
    losses, trained = whole("adam")
    first, path = sim_of(), tmp_path / "checkpoint.pt"
    with block(first):
        optimizer = optimizer_of(first, "adam")
        run(first, optimizer, 0, 4)
        saved(first, optimizer, path)
    other = sim_of(calibrated=False)
    other.model.load_state_dict(torch.load(path)["model"])  # the encodings come first
    assert resumed(other, "adam", path, 4) == losses[4:]
    assert same_model(other, trained)


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
        assert not sim.runtime.schedule_state.holds("2:output")
        model.load_state_dict(best)
        assert sim.encodings == encodings
        assert sim.runtime.schedule_state.holds("2:output")  # the steps of the checkpoint count


@pytest.mark.slow
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
    command = [sys.executable, str(Path(resumed_training.__file__)), str(path), "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, encodings = json.loads(done.stdout.splitlines()[-1])
    assert found == losses
    for site, (scale, zero_point) in encodings.items():
        assert np.array_equal(np.float32(scale), sim.encodings[site].scale)
        assert np.array_equal(zero_point, sim.encodings[site].zero_point)
