"""Two ranks, each with half of the data, find what one finds with all of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from layer_walks import plain_walk, recorded

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solve_layers import solve_layers
from qsdk.core.errors import DataError

WORKER = Path(__file__).parents[1] / "helpers" / "ranks" / "rank_worker.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, by mode."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"{rank}.json" for rank in range(2)]
    command = [sys.executable, str(WORKER)]
    workers = [
        subprocess.Popen([*command, str(rank), "2", str(folder / "store"), str(out)], cwd=WORKER.parent)
        for rank, out in enumerate(outs)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    return [json.loads(out.read_text()) for out in outs]


def test_two_ranks_find_what_one_finds(found: list[dict[str, Any]]) -> None:
    one, other = (facts["good"] for facts in found)
    assert one == other
    walk, problems = plain_walk(batches=8), dict[str, Any]()
    solve_layers(
        walk, recorded(problems), title="Solve", gathers=GatherOptions(samples=12, held_back=2), progress=False
    )
    assert one["problems"].keys() == problems.keys()
    for site, wanted in problems.items():
        assert one["problems"][site] == pytest.approx(wanted, rel=1e-4, abs=1e-4), site
    for site, encoding in walk.encodings.items():
        assert one["encodings"][site] == pytest.approx(encoding.scale.tolist(), rel=1e-4)


def test_a_rank_that_fails_fails_all(found: list[dict[str, Any]]) -> None:
    message = "rank 1: one:weight, batch 2: the layer's input holds NaN or an infinity"
    assert [facts["bad"]["error"] for facts in found] == [message] * 2


def test_ranks_that_reach_different_layers_are_named(found: list[dict[str, Any]]) -> None:
    assert "at head:weight where another is at the end" in found[1]["short"]["error"]
    assert "at the end where another is at head:weight" in found[0]["short"]["error"]


def test_one_process_is_its_own_sum() -> None:
    assert ranks.world_size() == 1
    assert ranks.all_gather("x") == ["x"]
    with pytest.raises(DataError, match=r"^bad$"):
        ranks.require_same_layers(["a"], "bad")
