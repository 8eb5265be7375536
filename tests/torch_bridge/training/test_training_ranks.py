"""Two processes that train together, with DDP and with FSDP2, find what one finds on all of the data."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # minutes of two processes; ranks that observe and learn: test_schedules.py

WORKER = Path(__file__).parents[2] / "helpers" / "ranks" / "training_rank_worker.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, str(WORKER), str(folder)], cwd=WORKER.parent, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(out.read_text()) for out in (folder / f"{rank}.json" for rank in range(2))]


def furthest(one: dict[str, list[float]], other: dict[str, list[float]], *, logarithms: bool = False) -> float:
    """The largest difference between values of the same name, or between their logarithms to base 2."""
    assert one.keys() == other.keys()
    pairs = [pair for name, values in one.items() for pair in zip(values, other[name], strict=True)]
    return max(abs(math.log2(a / b)) if logarithms else abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("way", ["ddp", "static", "fsdp"])
def test_two_ranks_train_the_same_values_as_one_on_the_joined_batches(found: list[dict[str, Any]], way: str):
    one, other, alone, before = found[0][way], found[1][way], found[0]["alone"], found[0]["before"]
    assert one["scales"] == other["scales"]
    assert one["zero_points"] == other["zero_points"]
    assert one["weights"] == other["weights"]
    assert furthest(alone["scales"], before["scales"], logarithms=True) > 0.01
    assert alone["zero_points"] != before["zero_points"]
    assert furthest(one["scales"], alone["scales"], logarithms=True) < 1e-5
    assert furthest(one["weights"], alone["weights"]) < 1e-5
    assert one["zero_points"] == alone["zero_points"]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_rank_0_exports_the_trained_model(found: list[dict[str, Any]], way: str):
    parity = found[0][way]["parity"]
    assert parity["passed"]
    assert parity["weights_max_lsb"] == 0
    assert parity["activations_max_lsb"] <= 1


def test_a_sharded_sim_has_plain_encodings_after_training_and_simulates_with_them(found: list[dict[str, Any]]):
    assert [facts["fsdp"]["buffers"] for facts in found] == [True, True]
    assert [facts["fsdp"]["off"] for facts in found] == [0.0, 0.0]


def test_a_sharded_sim_says_how_to_export_it(found: list[dict[str, Any]]):
    for facts in found:
        for message, what in zip(facts["fsdp"]["refused"], ("unwrap", "export"), strict=True):
            assert message.startswith(f"{what} needs whole weights, and FSDP has sharded ")
            assert "full_state_dict=True" in message


def test_sites_that_a_step_skips_are_unused_parameters(found: list[dict[str, Any]]):
    one, other, alone = found[0]["skipping"], found[1]["skipping"], found[0]["skipping alone"]
    assert one == other
    assert furthest(one["scales"], alone["scales"], logarithms=True) < 1e-5


def test_ddp_that_was_made_before_the_block_is_refused(found: list[dict[str, Any]]):
    for facts in found:
        assert "made before sim.training and does not know qsdk_input_x_scale_log2" in facts["early"]
        assert facts["early"].endswith("make it inside the block")
