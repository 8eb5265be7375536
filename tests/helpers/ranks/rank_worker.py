"""One of several processes that solve layers together: `python rank_worker.py rank world_size store out`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from layer_walks import plain_walk, recorded
from rank_group import in_process_group

from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solve_layers import solve_layers
from qsdk.core.errors import DataError


def run(rank: int, mode: str) -> dict[str, Any]:
    """Walk this rank's half of the batches, in mode `bad` or `short` with something wrong on one rank."""
    walk = plain_walk(batches=8)
    walk.data = list(walk.data)[rank * 4 : rank * 4 + 4]
    if mode == "bad" and rank == 1:
        walk.data[2][0, 0] = torch.nan
    if mode == "short" and rank == 1:
        walk.stages = walk.stages[:-1]
    problems: dict[str, Any] = {}
    try:
        solve_layers(
            walk, recorded(problems), title="Solve", gathers=GatherOptions(samples=12, held_back=2), progress=False
        )
    except DataError as error:
        return {"error": str(error)}
    return {"encodings": {site: e.scale.tolist() for site, e in walk.encodings.items()}, "problems": problems}


def main() -> None:
    """Write down what was found in each mode."""
    rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    modes = ("good", "bad", "short")
    found = in_process_group(lambda: {mode: run(rank, mode) for mode in modes}, rank=rank, size=size, store=store)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
