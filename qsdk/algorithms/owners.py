"""Each layer has one rank that solves it, its owner, and sends the solution to the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.solvers.on_torch import scales_of_weights
from qsdk.core.freed_memory import give_back
from qsdk.core.layers.layer_problem import LayerProblem, Solution, Solver
from qsdk.core.layers.layer_walk import Layer

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
    """Return the solutions of problems, and the seconds that each took, from the ranks that own them.

    Args:
        problems: of a step; a rank has the second moments of those that it owns.
        solver: for one problem.
        owners: by site.

    Raises:
        QsdkError: the solver failed on a rank: it is named on all of them, of the class of the solver's error.
    """
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
