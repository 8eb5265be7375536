"""Verbs that look at their own rank's data alone: the ranks end with one sim, or with an error on all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from rank_group import in_process_group

import qsdk
from qsdk.verbs.doors.same_on_ranks import same_on_ranks


def on_rank(rank: int, store: str, out: str) -> None:
    def work() -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        )
        same = [torch.randn(16, 8) * torch.logspace(-2, 2, 8) for _ in range(2)]
        own = [torch.randn(16, 8, generator=torch.Generator().manual_seed(rank)) * (1 + rank) for _ in range(2)]
        sim = qsdk.quantize(model, same[0], "w8a8")
        qsdk.calibrate(sim, same, progress=False)
        before = [x.clone() for x in sim.model.state_dict().values()]
        found: dict[str, Any] = {}
        try:
            qsdk.train.tune_ranges(sim, own, steps=2, lr=0.5, progress=False)
        except qsdk.DataError as error:
            found["error"] = str(error)
        found["kept"] = all(map(torch.equal, before, sim.model.state_dict().values()))
        qsdk.smooth_quant(sim, same, progress=False)
        found["scale"] = sorted(float(e.scale.sum()) for e in sim.encodings.values())
        return found

    found = in_process_group(work, rank=rank, size=2, store=store)
    Path(f"{out}-{rank}").write_text(json.dumps(found))


def test_one_process_alone_asks_nothing_of_its_sim():
    given = object()
    assert same_on_ranks(lambda sim: sim)(given) is given


@pytest.mark.slow
def test_ranks_with_other_data_are_told_and_keep_their_sims(tmp_path: Path):
    out = str(tmp_path / "out")
    torch.multiprocessing.spawn(on_rank, args=(str(tmp_path / "store"), out), nprocs=2)
    first, second = (json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(2))
    for found in (first, second):
        assert "after tune_ranges the ranks would hold different sims" in found["error"]
        assert "give every rank the same data for tune_ranges" in found["error"]
        assert found["kept"]
    assert first["scale"] == second["scale"]
