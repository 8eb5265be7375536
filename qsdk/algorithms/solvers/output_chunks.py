"""Large layers, such as the head of a language model, a few thousand outputs at a time: memory for one chunk only.

Outputs do not depend on one another unless they share scales.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from qsdk.algorithms.solvers.on_torch import on_torch
from qsdk.core.freed_memory import give_back
from qsdk.core.layers.layer_problem import LayerProblem, Solution, Solver
from qsdk.core.numerics.encoding import Encoding

#: Weights of a chunk, at least. It has no fewer outputs than inputs: the factors of the second moments, which each
#: chunk computes again, would cost as much as the rest.
WEIGHTS = 1 << 22


def solve_in_chunks(problem: LayerProblem, solver: Solver, *, weights: int = WEIGHTS) -> Solution:
    """Solve a layer whose outputs have scales of their own some outputs at a time; another layer as a whole.

    What a solver estimates over all outputs (the part of their gain that is due to chance) is then the chunk's own.
    """
    chunks = _chunks(problem, weights)
    if len(chunks) == 1:
        return solver(on_torch(problem))
    return _solve_each(problem, chunks, solver)


def _chunks(problem: LayerProblem, weights: int) -> list[slice]:
    """Return ranges of outputs; one where outputs share scales, or are in groups of inputs of their own."""
    groups, outputs, inputs = problem.layout.matrix_shape
    step = max(inputs, weights // inputs)
    if groups > 1 or problem.spec.scale_dtype is not None or _axis_of_outputs(problem) is None:
        return [slice(0, outputs)]
    bounds = [*range(0, max(outputs - step // 2, 1), step), outputs]  # no chunk is smaller than half of the others
    return [slice(*pair) for pair in pairwise(bounds)]


def _axis_of_outputs(problem: LayerProblem) -> int | None:
    """Return the axis of the scales along which each output has its own; None where outputs share scales."""
    encoding, axis = problem.encoding, problem.layout.channel_axis
    if encoding.axis is None:
        return None
    along = encoding.axis % len(problem.layout.shape)
    if encoding.block_size is None:
        return 0 if along == axis else None
    return axis if along != axis else None


def _solve_each(problem: LayerProblem, chunks: list[slice], solver: Solver) -> Solution:
    """Solve each chunk, and join the solutions; relative errors are weighted by the energies of the chunks' outputs."""
    weight, shift = None, None
    encodings: list[Encoding] = []
    errors, energies = np.zeros(2), 0.0
    for rows in chunks:
        give_back()
        part = on_torch(_part(problem, rows))
        found = solver(part)
        energy = _energy(part)
        errors += np.array([found.error_before, found.error_after]) * energy
        energies += energy
        encodings.append(found.encoding)
        if found.weight is not None:
            if weight is None:
                weight = torch.as_tensor(problem.weight).to(found.weight, copy=True)
            weight[:, rows] = found.weight
        if found.bias_shift is not None:
            shift = found.bias_shift.new_zeros(problem.weight.shape[:2]) if shift is None else shift
            shift[:, rows] = found.bias_shift
    axis = _axis_of_outputs(problem)
    assert axis is not None
    scale, zero_point = (
        np.concatenate([getattr(e, name) for e in encodings], axis) for name in ("scale", "zero_point")
    )
    encoding = replace(problem.encoding, scale=scale, zero_point=zero_point)
    before, after = errors / (energies or 1.0)
    return Solution(encoding, weight, float(before), float(after), note=found.note, bias_shift=shift)


def _energy(part: LayerProblem) -> float:
    """Return what the relative errors of a chunk are relative to: that of all data."""
    held_back = part.held_back
    others = 0.0 if held_back is None or not held_back.rows else float(held_back.energy.sum())
    return float(part.energy.sum()) + others


def _part(problem: LayerProblem, rows: slice) -> LayerProblem:
    """Return the problem of some outputs."""

    def of(values: Any, axis: int = 1) -> Any:
        return None if values is None else values[(slice(None),) * axis + (rows,)]

    layout, axis = problem.layout, _axis_of_outputs(problem)
    assert axis is not None
    shape = list(layout.shape)
    shape[layout.channel_axis] = rows.stop - rows.start
    encoding: Encoding = replace(
        problem.encoding, scale=of(problem.encoding.scale, axis), zero_point=of(problem.encoding.zero_point, axis)
    )
    return replace(
        problem,
        layout=replace(layout, shape=tuple(shape)),
        encoding=encoding,
        weight=of(problem.weight),
        linear=of(problem.linear),
        drifts=of(problem.drifts),
        drifted=of(problem.drifted, 2),
        bias=of(problem.bias),
        held_back=problem.held_back and _part(problem.held_back, rows),
    )
