"""Large layers are solved a chunk of outputs at a time, with the solution of the whole."""

from functools import partial

import numpy as np
import pytest
import torch
from random_problems import problem_of

from qsdk import int4, uint4
from qsdk.algorithms.solvers import adaround, gptq
from qsdk.algorithms.solvers.output_chunks import solve_in_chunks
from qsdk.core.layers.layer_problem import LayerProblem, Solution, WeightLayout
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec

LAYERS: list[tuple[WeightLayout, Granularity]] = [
    (WeightLayout("linear", (100, 12)), PerChannel(0)),
    (WeightLayout("linear", (100, 12)), PerBlock(1, 5)),
    (WeightLayout("linear", (12, 100), 1, 1, 0), PerBlock(0, 4)),
    (WeightLayout("conv", (90, 2, 2, 2)), PerChannel(0)),
    (WeightLayout("conv_transpose", (4, 60, 2, 2), 1, 1, 0), PerChannel(1)),
]
WHOLE = [
    (WeightLayout("linear", (100, 12)), Spec(int4, PerTensor())),
    (WeightLayout("linear", (100, 12)), Spec(int4, PerBlock(0, 10))),  # a block is some outputs
    (WeightLayout("linear", (100, 12)), Spec(int4, PerBlock(1, 4), scale_dtype=uint4)),  # levels of one scale for all
    (WeightLayout("conv", (100, 1, 3), 50), Spec(int4, PerChannel(0))),
]


@pytest.mark.parametrize("solver", [gptq, adaround], ids=["gptq", "adaround"])
@pytest.mark.parametrize(("layout", "granularity"), LAYERS)
@pytest.mark.parametrize("held_back", [0, 500])
def test_chunks_give_the_solution_of_the_whole(solver, layout, granularity, held_back, monkeypatch):
    # without drift of the inputs nothing is due to chance
    problem = problem_of(layout, Spec(int4, granularity), held_back=held_back, noise=0.0)
    whole = solver.solve(problem)
    parts: list[int] = []
    check_of = solver.HeldoutCheck.of

    def counted(part: LayerProblem, **options: bool) -> object:
        parts.append(part.weight.shape[1])
        return check_of(part, **options)

    monkeypatch.setattr(solver, "solve_in_chunks", partial(solve_in_chunks, weights=12))
    monkeypatch.setattr(solver.HeldoutCheck, "of", counted)
    found = solver.solve(problem)
    assert len(parts) >= 2
    assert sum(parts) == layout.matrix_shape[1]
    assert found.encoding == whole.encoding
    assert found.weight.shape == whole.weight.shape
    different = (found.weight != whole.weight).any(-1).float().mean()
    assert different < 0.02  # a near-tie may go the other way, since products of other sizes round otherwise
    torch.testing.assert_close(found.bias_shift, whole.bias_shift, rtol=0.02, atol=1e-5)
    assert np.isclose(found.error_before, whole.error_before, rtol=1e-4)
    assert np.isclose(found.error_after, whole.error_after, rtol=0.01)


@pytest.mark.parametrize(("layout", "spec"), WHOLE)
def test_outputs_that_depend_on_one_another_are_solved_together(layout, spec):
    problem = problem_of(layout, spec)
    sizes: list[int] = []

    def solver(part: LayerProblem) -> Solution:
        sizes.append(part.weight.shape[1])
        return gptq.solve(part)

    solve_in_chunks(problem, solver, weights=1)
    assert sizes == [problem.weight.shape[1]]


def test_a_chunk_is_no_smaller_than_half_of_the_others():
    for outputs in range(25, 140, 7):
        problem = problem_of(WeightLayout("linear", (outputs, 12)), Spec(int4, PerChannel(0)))
        sizes: list[int] = []

        def solver(part: LayerProblem, sizes: list[int] = sizes) -> Solution:
            sizes.append(part.weight.shape[1])
            return partial(gptq.solve, scales="fixed", sweeps=0)(part)

        solve_in_chunks(problem, solver, weights=1)
        assert sum(sizes) == outputs
        assert min(sizes) >= 6
        assert len(sizes) > 1
