"""One of several processes that solve layers together: `python rank_worker.py rank world_size store out`."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from layer_walks import plain_walk, recorded

from qsdk.algorithms.gather import Gathers
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
        solve_layers(walk, recorded(problems), title="Solve", gathers=Gathers(samples=12, held_back=2), progress=False)
    except DataError as error:
        return {"error": str(error)}
    return {"encodings": {site: e.scale.tolist() for site, e in walk.encodings.items()}, "problems": problems}


def main() -> None:
    """Write down what was found in each mode."""
    rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    found = {mode: run(rank, mode) for mode in ("good", "bad", "short")}
    Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
