"""Solving the layers of a sim one after the other, in the order they run: the loop behind all layer solvers."""

import math
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.checkpoint import Checkpoint
from qsdk.algorithms.problems.gather import GatherOptions, problems_of
from qsdk.algorithms.solvers.on_torch import scales_of_weights
from qsdk.core.freed_memory import give_back
from qsdk.core.layers.layer_problem import Layer, LayerProblem, Solution, Solver, Walk, WalkStep
from qsdk.core.numerics.exact_sums import on_exact_sums
from qsdk.core.numerics.stored_codes import reason_codes_get_lost
from qsdk.core.report import Report
from qsdk.progress import progress_of

#: weights of a layer whose solution takes so much memory that what was freed before is worth giving back
_LARGE = 1 << 22


class Owners:
    """The owners of layers: the next one goes to the rank with the least work so far, the same on every rank."""

    def __init__(self, count: int) -> None:
        """Start with so many ranks without work."""
        self._work = [0.0] * count

    def assign(self, layers: Sequence[Layer]) -> dict[str, int]:
        """Return the owners of a step's layers by site, the most expensive ones first."""
        result = {}
        for layer in sorted(layers, key=lambda layer: (-cost_of(layer), layer.site)):
            owner = min(range(len(self._work)), key=self._work.__getitem__)
            self._work[owner] += cost_of(layer)
            result[layer.site] = owner
        return result


def cost_of(layer: Layer) -> float:
    """Return about how many multiplications solving a layer takes: a matrix is factored, and each output rounded."""
    groups, outputs, k = layer.layout.matrix_shape
    return float(groups * k * k * (k + 4 * outputs))


def solve_together(
    problems: Sequence[LayerProblem], solver: Solver, owners: Mapping[str, int]
) -> list[tuple[Solution, float]]:
    """Return the solutions of a step's problems, and the seconds that each took, from the ranks that own them."""
    own: dict[str, tuple[Solution, float]] = {}
    failure, rank, several = None, ranks.rank(), ranks.world_size() > 1
    for problem in problems:
        if math.prod(problem.weight.shape) >= _LARGE:
            give_back()
        if owners[problem.site] == rank and failure is None:
            begun = perf_counter()
            try:
                solution = _solved(problem, solver)
                packed = _packed(problem, solution) if several else solution
            except Exception as error:  # whatever it is, the other ranks wait
                if not several:
                    raise
                kind, reason = ranks.failure_of(error)
                failure = kind, reason if problem.site in reason else f"{problem.site}: {reason}"
                continue
            own[problem.site] = packed, perf_counter() - begun
    every = sorted({owners[problem.site] for problem in problems})
    sent = {owner: ranks.broadcast((failure, own), owner) for owner in every}
    for owner, (failed, _) in sent.items():
        ranks.raise_failure(owner, failed)
    result = []
    for problem in problems:
        solution, seconds = sent[owners[problem.site]][1][problem.site]
        result.append((_unpacked(problem, solution) if several else solution, seconds))
    return result


def _solved(problem: LayerProblem, solver: Solver) -> Solution:
    if not problem.rows:
        return Solution(problem.encoding, None, 0.0, 0.0, "no batch reaches it")
    solution = solver(problem)
    # codes have no -0, and every rank is to store the same bits
    return solution if solution.weight is None else replace(solution, weight=solution.weight + 0.0)


def _packed(problem: LayerProblem, solution: Solution) -> Solution:
    """Return a solution in as few bytes as it can be sent in: codes of the weight, if these say all, on the host."""
    weight: Tensor | None = solution.weight
    if weight is not None and solution.encoding.dtype.is_integer:
        scale = scales_of_weights(problem, solution.encoding)[0].to(weight)
        codes = (weight / scale).round_()
        small = codes.abs().max() < 128 if codes.numel() else True
        stored = codes.to(torch.int8 if small else torch.int32)
        if torch.equal(stored.to(weight) * scale, weight):
            weight = stored
    return replace(solution, weight=_on_host(weight), bias_shift=_on_host(solution.bias_shift))


def _unpacked(problem: LayerProblem, solution: Solution) -> Solution:
    device = problem.weight.device
    weight: Tensor | None = solution.weight
    if weight is not None:
        weight = weight.to(device)
        if not weight.is_floating_point():
            weight = weight.float() * scales_of_weights(problem, solution.encoding)[0]
    shift: Any = solution.bias_shift
    return replace(solution, weight=weight, bias_shift=None if shift is None else shift.to(device))


def _on_host(values: Any) -> Any:
    return values.cpu() if isinstance(values, Tensor) else values


_ALL = GatherOptions()
_UNROUTED = "no token is routed to it; with all_experts=True every token runs through all experts"


def solve_layers(
    walk: Walk,
    solver: Solver,
    *,
    title: str,
    verb: str | None = None,
    gathers: GatherOptions = _ALL,
    options: Mapping[str, Any] | None = None,
    progress: bool = True,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    rounded: MutableMapping[str, Any] | None = None,
) -> Report:
    """Solve each layer of a walk and write its solution before going on to the next.

    Under `torch.distributed` each rank walks its own batches, and a layer is solved by the rank that owns it. If rank r
    of N has the batches r, r + N, ... and as many threads, the solutions have the bits of those of one process.

    Args:
        walk: of either side.
        solver: of `qsdk.algorithms`.
        title: of the report.
        verb: the name that the bar and the logged errors have; None for the title.
        gathers: the statistics that the solver needs.
        options: of the solver; a checkpoint belongs to one choice of them.
        progress: shows a bar.
        seed: of whatever is sampled.
        checkpoint: a folder for the solutions; a second run of the same model, options and data continues from them.
        rounded: receives, by site of the bias, the shift of the float model's bias where a rounded weight replaces the
            float one and the bias has absorbed its error.

    Returns:
        Rows `site`, `error_before`, `error_after` (relative to the float output), `seconds` and `note`: why
        a layer is unchanged; summary `layers`, `left`, `seconds`, and `passes`: the same in float passes.
    """
    start = time.perf_counter()
    identity = {"verb": title, "seed": seed, **(options or {})}
    store = None if checkpoint is None else Checkpoint(checkpoint, walk, identity)
    rows: dict[str, dict[str, Any]] = {}
    owners = Owners(ranks.world_size())
    with progress_of(verb or title, len(walk.layers), show=progress) as bar, torch.no_grad():
        for step in _steps(walk):
            bar.now(", ".join(layer.site for layer in step.layers))
            results = _solve_step(step, walk, solver, gathers, seed, owners.assign(step.layers), store)
            with ranks.telling_others():
                for layer, problem, solved, seconds in results:
                    solution = _with_exact_sums(layer, _unless_codes_get_lost(layer, problem, solved))
                    _write(walk, layer, problem, solution, rounded)
                    if layer.expert is not None and not problem.rows:
                        solution = replace(solution, note=_UNROUTED)
                    rows[layer.site] = _row(layer.site, solution, seconds)
                    bar.log(error_before=solution.error_before, error_after=solution.error_after)
            bar.done(len(step.layers))
    ranks.require_same_layers([])
    return _report(title, walk, rows, time.perf_counter() - start)


def _steps(walk: Walk) -> Iterator[WalkStep]:
    """Yield the steps of a walk; an error on the way to the next one reaches all ranks."""
    steps = iter(walk)
    while True:
        with ranks.telling_others():
            step = next(steps, None)
        if step is None:
            return
        yield step


def _report(title: str, walk: Walk, rows: Mapping[str, dict[str, Any]], spent: float) -> Report:
    unreached = [layer.site for layer in walk.layers if layer.site not in rows]
    left = [*((site, "no batch reaches it") for site in unreached), *walk.left.items()]
    done = [row for row in rows.values() if not row["note"]]
    summary = {
        "layers": len(done),
        "left": len(rows) - len(done) + len(left),
        "seconds": spent,
        "passes": spent / walk.float_seconds if walk.float_seconds else None,
    }
    return Report(title, [*rows.values(), *(_row(site, note=note) for site, note in left)], summary)


def _solve_step(
    step: WalkStep,
    walk: Walk,
    solver: Solver,
    gathers: GatherOptions,
    seed: int,
    owners: Mapping[str, int],
    store: Checkpoint | None,
) -> list[tuple[Layer, LayerProblem, Solution, float]]:
    """Return the layers of a step with problems and solutions, from the checkpoint if it has them, and the seconds."""
    start = time.perf_counter()
    if store is not None:
        ranks.require_same_layers([layer.site for layer in step.layers])
        if store.has_next():
            few = replace(gathers, second_moments=False, samples=0, every_patch=False)
            means = problems_of(step, walk, few, seed, owners)
            return [(*result, 0.0) for result in zip(step.layers, means, store.replay(means), strict=True)]
    problems = problems_of(step, walk, gathers, seed, owners)
    shared = (time.perf_counter() - start) / len(problems)
    solutions = solve_together(problems, solver, owners)
    if store is not None:
        with ranks.telling_others():
            store.keep(problems, [solution for solution, _ in solutions])
    return [
        (layer, problem, solution, seconds + shared)
        for layer, problem, (solution, seconds) in zip(step.layers, problems, solutions, strict=True)
    ]


def _unless_codes_get_lost(layer: Layer, problem: LayerProblem, solution: Solution) -> Solution:
    """Return a solution, or why none is written: its rounded weight would become another one where it is stored."""
    reason = "" if solution.weight is None else reason_codes_get_lost(layer.spec, layer.dtype)
    if not reason:
        return solution
    return Solution(problem.encoding, None, solution.error_before, solution.error_before, reason)


def _with_exact_sums(layer: Layer, solution: Solution) -> Solution:
    """Return a solution in which codes of `int8_exact` add up to no more than its kernels can."""
    if solution.weight is None or not layer.spec.dtype.exact_sums:
        return solution
    exact = on_exact_sums(solution.encoding, layer.layout.from_matrix(solution.weight).cpu().numpy())
    return replace(solution, weight=layer.layout.to_matrix(torch.from_numpy(exact).to(solution.weight)))


def _mean_shift(problem: LayerProblem, weight: Tensor) -> Any:
    """Return `(W - W~) E[x]` per output channel: how far rounding a weight lowers the mean of the layer's output."""
    mean: Any = problem.mean
    lost = (problem.weight - weight.to(problem.weight)) @ mean.to(problem.weight)[..., None]
    return lost.reshape(-1).cpu().numpy()


def _write(
    walk: Walk, layer: Layer, problem: LayerProblem, solution: Solution, rounded: MutableMapping[str, Any] | None
) -> None:
    if rounded is not None and solution.weight is not None and solution.bias_shift is not None:
        rounded[layer.bias] = _mean_shift(problem, solution.weight)
    if solution.note:
        return
    same = solution.encoding == walk.encoding(layer.site)
    if same and solution.weight is None and solution.bias_shift is None:
        return
    like_numpy = isinstance(walk.weight(layer.site), np.ndarray)

    def given(values: Any) -> Any:
        return values.cpu().numpy() if like_numpy and isinstance(values, Tensor) else values

    walk.write(
        layer.site,
        encoding=solution.encoding,
        weight=None if solution.weight is None else given(layer.layout.from_matrix(solution.weight)),
        bias_shift=None if solution.bias_shift is None else given(solution.bias_shift.reshape(-1)),
    )


def _row(site: str, solution: Solution | None = None, seconds: float | None = None, note: str = "") -> dict[str, Any]:
    return {
        "site": site,
        "error_before": solution and solution.error_before,
        "error_after": solution and solution.error_after,
        "seconds": seconds,
        "note": solution.note if solution else note,
    }
