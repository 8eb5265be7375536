"""Two ranks train a sim with trainable BatchNorms under DistributedDataParallel and FSDP2."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainable_norm_models import fresh, same
from trainable_norms_worker import BATCHES, result, stepped

pytestmark = pytest.mark.nightly
WORKER = Path(__file__).parents[2] / "helpers" / "ranks" / "trainable_norms_worker.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has trained, by mode."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"{rank}.pt" for rank in range(2)]
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(folder / "store"), str(out)], cwd=WORKER.parent)
        for rank, out in enumerate(outs)
    ]
    assert [worker.wait(timeout=180) for worker in workers] == [0, 0]
    return [torch.load(out) for out in outs]


@pytest.mark.parametrize("mode", ["frozen", "half", "estimated"])
def test_all_ranks_have_trained_the_same(found: list[dict[str, Any]], mode: str):
    one, other = (facts[mode] for facts in found)
    assert same(one["state"], other["state"])
    assert torch.equal(one["output"], other["output"])


def test_sharded_layers_are_folded_whole(found: list[dict[str, Any]]):
    for facts in found:
        # learned scales are computed from parts inside and as one outside
        torch.testing.assert_close(facts["sharded"]["output"], facts["sharded"]["inside"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(facts["sharded"]["output"], facts["frozen"]["output"], rtol=0.02, atol=0.02)


def test_frozen_statistics_make_two_halves_of_a_batch_one(found: list[dict[str, Any]]):
    sim = fresh()
    with sim.training(learn_scales=True, freeze_bn_after=0) as live:
        stepped(live, sim, BATCHES)
    expected = result(sim)
    for name, value in expected["state"].items():
        if "scale" not in name and "zero" not in name:
            torch.testing.assert_close(found[0]["frozen"]["state"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(found[0]["frozen"]["output"], expected["output"], rtol=0.02, atol=0.02)
