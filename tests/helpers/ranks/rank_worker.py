"""One of several processes that solve layers together: `python rank_worker.py rank world_size store out`."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from layer_walks import plain_walk, recorded
from rank_group import in_process_group

from qsdk import ConfigError, QsdkError
from qsdk.algorithms.problems.gather import GatherOptions
from qsdk.algorithms.solve_layers import solve_layers
from qsdk.core.layers.layer_problem import LayerProblem, Solution

#: what is solved with all data on one rank and dealt out on several, with the same bits
SAME = ("good", "few", "ragged")
BROKEN = ("bad", "short", "solver", "config", "walk", "write")


class BreaksOff:
    """A walk that fails on its way to the second step."""

    def __init__(self, walk: Any) -> None:
        self._walk = walk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._walk, name)

    def __iter__(self) -> Iterator[Any]:
        yield next(iter(self._walk))
        raise MemoryError("no room for the next block")


def failing(error: Exception) -> Callable[[LayerProblem], Solution]:
    """SeqMSE that fails at the last layer, which rank 1 of two owns."""
    solver = recorded({})

    def solve(problem: LayerProblem) -> Solution:
        if problem.site == "head:weight":
            raise error
        return solver(problem)

    return solve


def walk_of(mode: str, rank: int, size: int) -> Any:
    """This rank's share of the batches; in some modes something is wrong on rank 1."""
    walk = plain_walk(batches=8)
    if mode == "few":
        walk.data = [x[:1] for x in walk.data]
    if mode == "ragged":  # fewer batches than can be held back whole
        walk.data = [x[:rows] for x, rows in zip(walk.data, (15, 3, 8), strict=False)]
    walk.data = list(walk.data)[rank::size]
    if rank == 0:
        return walk
    if mode == "bad":
        walk.data[2][0, 0] = float("nan")
    if mode == "short":
        walk.stages = walk.stages[:-1]
    if mode == "write":

        def write(*_: Any, **__: Any) -> None:
            raise OSError("the disk is full")

        walk.write = write
    return BreaksOff(walk) if mode == "walk" else walk


def run(rank: int, size: int, mode: str) -> dict[str, Any]:
    """Solve in a mode, and return what was found."""
    walk, problems = walk_of(mode, rank, size), dict[str, Any]()
    errors = {"solver": RuntimeError("out of luck"), "config": ConfigError("head:weight: an option is wrong")}
    solver = failing(errors[mode]) if mode in errors else recorded(problems)
    gathers = GatherOptions(samples=12, held_back=2)
    try:
        solve_layers(walk, solver, title="Solve", gathers=gathers, progress=False)
    except QsdkError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {"encodings": {site: e.scale.tolist() for site, e in walk.encodings.items()}, "problems": problems}


def main() -> None:
    """Write down what was found in each mode."""
    rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    modes = (*SAME, *BROKEN) if size == 2 else SAME
    found = in_process_group(lambda: {mode: run(rank, size, mode) for mode in modes}, rank=rank, size=size, store=store)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
