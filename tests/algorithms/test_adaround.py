"""AdaRound: always on the grid, never worse than nearest, better on data it has not seen."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import LAYERS, problem_of, scales_of

from qsdk import ConfigError, DType, int4, int8, uint4
from qsdk.algorithms.solvers import adaround, seq_mse
from qsdk.algorithms.solvers.rounding import (
    ErrorFeedback,
    Objective,
    WeightGrid,
    coordinate_descent,
    damp,
    order_by_diagonal,
)
from qsdk.core.layers.layer_problem import LayerProblem, WeightLayout
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, Spec

int3 = dtype_named("int3")
LINEAR, PER_CHANNEL = WeightLayout("linear", (32, 96)), PerChannel(0)
rounded = partial(adaround.solve, shift_bias=False)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYERS),
    st.sampled_from([int3, int4, int4.strict, int8, uint4]),
    st.booleans(),
    st.integers(0, 50),
    st.sampled_from([3, 50]),
    st.sampled_from([0, 3]),
    st.booleans(),
)
def test_every_weight_is_on_its_floor_or_ceil_and_no_channel_is_worse(
    layer: tuple[WeightLayout, Granularity],
    dtype: DType,
    symmetric: bool,
    seed: int,
    rows: int,
    held_back: int,
    shift_bias: bool,
) -> None:
    spec = Spec(dtype, layer[1], symmetric)
    problem = problem_of(layer[0], spec, seed=seed, weights=seed, rows=rows, held_back=held_back)
    found = adaround.solve(problem, shift_bias=shift_bias)
    assert found.weight is not None
    _assert_floor_or_ceil(problem, found.weight)
    nearest = seq_mse.fake_quantize(problem, problem.encoding)
    for told in filter(None, (problem.held_back, None if held_back else problem)):
        judged = told.centered() if shift_bias else told
        slack = 1e-5 * float(told.energy.sum())
        assert (judged.errors(found.weight) <= judged.errors(nearest) + slack).all()
    assert found.error_after <= found.error_before + 1e-6


def _assert_floor_or_ceil(problem: LayerProblem, found: torch.Tensor) -> None:
    stored = problem.layout.from_matrix(problem.weight).numpy()
    on_grid = problem.layout.from_matrix(found).numpy()
    encoding = problem.encoding
    assert np.array_equal(encoding.dequantize(encoding.quantize(on_grid)), on_grid)
    scale = problem.layout.from_matrix(scales_of(problem, encoding)).numpy()
    # one step at most, and to either side: floor or ceil (or the end of the grid, for what lies beyond)
    inside = (stored >= encoding.low.min()) & (stored <= encoding.high.max())
    assert (np.abs(on_grid - stored) < scale * (1 + 1e-5))[inside].all()


@pytest.mark.parametrize(
    ("method", "dtype", "share"),
    [
        ("coordinate_descent", int3, 0.55),
        ("coordinate_descent", int4, 0.55),
        ("coordinate_descent", int8, 1.0),
        ("relaxed", int3, 0.6),
        ("relaxed", int4, 0.6),
        ("relaxed", int8, 1.0),
    ],
)
def test_unseen_data_has_a_smaller_error_too(method: adaround.Method, dtype: DType, share: float) -> None:
    seen, unseen = (problem_of(LINEAR, Spec(dtype, PER_CHANNEL), seed=seed) for seed in (0, 1))
    found = rounded(seen, method=method)
    nearest = seq_mse.fake_quantize(seen, seen.encoding)
    assert found.error_after < share * found.error_before
    assert unseen.relative_error(found.weight) < share * unseen.relative_error(nearest)
    _assert_floor_or_ceil(seen, found.weight)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 20, 64])
def test_few_rows_do_not_mislead(rows: int) -> None:
    ratios = []
    for seed in range(4):
        spec = Spec(int4, PER_CHANNEL)
        seen = problem_of(LINEAR, spec, seed=seed, weights=seed, rows=rows)
        unseen = problem_of(LINEAR, spec, seed=seed + 100, weights=seed)
        nearest = unseen.relative_error(seq_mse.fake_quantize(seen, seen.encoding))
        ratios.append(unseen.relative_error(rounded(seen).weight) / nearest)
    assert np.mean(ratios) < 0.9  # 1.0 and more with the damping that many rows want


@pytest.mark.slow
def test_small_layers_come_near_the_best_of_all_roundings() -> None:
    layout, spec = WeightLayout("linear", (1, 8)), Spec(int4, PER_CHANNEL)
    ratios = []
    for seed in range(20):
        problem = problem_of(layout, spec, seed=seed, weights=seed)
        grid = WeightGrid.of(problem, problem.encoding).around(problem.weight.mT)
        below, above = ((codes * grid.scale).mT for codes in (grid.lowest, grid.highest))
        choices = torch.tensor(list(product([False, True], repeat=8)))
        best = min(problem.relative_error(torch.where(choice, above, below)) for choice in choices)
        ratios.append(rounded(problem, damping=1e-4).error_after / best)
    assert min(ratios) >= 1 - 1e-3
    assert np.mean(ratios) < 1.02


def _columns(k: int, rows: int) -> tuple[Objective, WeightGrid]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, k, generator=generator)
    weight = 3 * torch.randn(1, k, rows, generator=generator)
    linear = 10 * torch.randn(1, k, rows, generator=generator)
    objective = Objective.of_terms(weight, damp((x.T @ x)[None], 0.01), linear)
    scale = 0.5 + torch.rand(1, k, rows, generator=generator)
    return objective, WeightGrid(scale, torch.full_like(scale, -4), torch.full_like(scale, 3))


def _feedback(objective: Objective) -> ErrorFeedback:
    return ErrorFeedback.of(objective, order_by_diagonal(objective.h))


@pytest.mark.spread(1)
@pytest.mark.parametrize("near", [True, False], ids=["floor or ceil", "any point"])
def test_descent_never_raises_the_objective_and_ends_where_no_move_pays(near: bool) -> None:
    objective, grid = _columns(200, 5)  # more columns than one block
    grid = grid.around(objective.weight) if near else grid
    codes = _feedback(objective).round(grid)[0]
    sweeps = [coordinate_descent(objective, grid, codes, n) for n in (0, 1, 2, 100)]
    assert torch.equal(sweeps[0], codes)
    values = [objective(each * grid.scale) for each in sweeps]
    assert all((after <= before + 1e-2).all() for before, after in pairwise(values))
    assert (values[-1] < values[0] - 1).any()
    for column in range(0, 200, 7):
        for step in (-1, 1):
            moved = sweeps[-1].clone()
            moved[:, column] = (moved[:, column] + step).clamp(grid.lowest[:, column], grid.highest[:, column])
            assert (objective(moved * grid.scale) >= values[-1] - 1e-2).all()


def test_feedback_settles_diagonal_problems_at_once() -> None:
    h = torch.diag_embed(torch.tensor([[3.0, 1.0, 2.0]]))
    weight, linear = torch.tensor([[[0.2], [0.7], [1.0]]]), torch.tensor([[[0.0], [0.3], [-1.2]]])
    grid = WeightGrid(torch.ones_like(weight), torch.full_like(weight, -2), torch.full_like(weight, 1))
    # the best weights are 0.2, 0.4 and 1.6, which the grid does not reach
    assert _feedback(Objective.of_terms(weight, h, linear)).round(grid)[0].flatten().tolist() == [0, 0, 1]


def test_the_size_of_blocks_of_columns_changes_nothing() -> None:
    objective, grid = _columns(60, 4)
    small, whole = (_feedback(objective).round(grid, size)[0] for size in (7, 60))
    assert torch.equal(small, whole)


def test_feedback_gives_the_error_above_that_of_the_optimum() -> None:
    objective, grid = _columns(60, 4)
    codes, errors = _feedback(objective).round(grid)
    objective = Objective(*(x.double() for x in (objective.weight, objective.h, objective.linear, objective.optimum)))
    wanted = objective(codes * grid.scale) - objective(objective.optimum)
    torch.testing.assert_close(errors.double(), wanted, rtol=1e-4, atol=0)
    assert (objective(objective.optimum) < objective(objective.weight)).all()


@pytest.mark.slow
def test_more_iterations_and_more_starts_find_no_worse() -> None:
    problem = problem_of(LINEAR, Spec(int3, PER_CHANNEL))

    def error(**options: Any) -> float:
        return rounded(problem, damping=1e-3, **options).error_after

    swept = [error(iterations=n, starts=1) for n in (0, 1, 2, 5)]
    assert all(after <= before for before, after in pairwise(swept))
    started = [error(starts=n) for n in (1, 2, 4, 8)]
    assert all(after <= before * (1 + 1e-3) for before, after in pairwise(started))
    assert started[-1] < 0.99 * started[0]
    relaxed = [error(method="relaxed", iterations=n) for n in (20, 100, 500)]
    assert all(after < 0.99 * before for before, after in pairwise(relaxed))


def test_many_layers_side_by_side_are_each_solved_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(WeightLayout("conv", (6, 2, 3, 3), 3), Spec(int3, PER_CHANNEL))
    together = rounded(problem)
    monkeypatch.setattr(adaround, "SIDE_BY_SIDE", 1)
    assert torch.equal(rounded(problem).weight, together.weight)


def test_what_held_back_data_contradicts_is_not_done() -> None:
    problem = problem_of(LINEAR, Spec(int4, PER_CHANNEL), held_back=500)
    assert problem.held_back is not None
    free = rounded(problem).weight
    nearest = seq_mse.fake_quantize(problem, problem.encoding)
    # data for which nearest rounding of the first ten outputs is what was wanted
    wish = replace(problem.held_back, linear=problem.held_back.linear.clone())
    wish.linear[:, :10] = -((nearest - problem.weight) @ problem.held_back.h)[:, :10]
    found = rounded(replace(problem, held_back=wish)).weight
    assert torch.equal(found[:, :10], nearest[:, :10])
    assert (free[:, :10] != nearest[:, :10]).any(-1).all()
    assert (found[:, 10:] != nearest[:, 10:]).any(-1).all()


def test_the_bias_takes_up_the_mean_error() -> None:
    generator = torch.Generator().manual_seed(1)
    problem = problem_of(LINEAR, Spec(int3, PER_CHANNEL), rows=400)
    alone, shifted = adaround.solve(problem, shift_bias=False), adaround.solve(problem)
    assert alone.bias_shift is None
    assert shifted.bias_shift is not None
    assert torch.allclose(shifted.bias_shift, problem.mean_error(shifted.weight))
    assert shifted.error_after < alone.error_after
    # the error told is that of the layer with its bias shifted
    loss = problem.errors(shifted.weight) - problem.count * shifted.bias_shift**2
    assert shifted.error_after == pytest.approx(problem.relative(loss), rel=1e-3)
    assert adaround.solve(replace(problem, bias=None)).bias_shift is None
    other = shifted.bias_shift + 0.1 * torch.randn(shifted.bias_shift.shape, generator=generator)
    worse = problem.errors(shifted.weight) + problem.count * (other**2 - 2 * other * shifted.bias_shift)
    assert problem.relative(worse) > shifted.error_after


def test_blocks_are_better_than_channels_on_unseen_data() -> None:
    seen, unseen = (problem_of(LINEAR, Spec(int3, PER_CHANNEL), seed=seed) for seed in (0, 1))
    blocks = problem_of(LINEAR, Spec(int3, PerBlock(1, 16)))
    levels = problem_of(LINEAR, Spec(int3, PerBlock(1, 16), scale_dtype=uint4))
    errors = [unseen.relative_error(rounded(problem).weight) for problem in (seen, levels, blocks)]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.9 * errors[0]


def test_weights_on_the_grid_stay() -> None:
    problem = problem_of(WeightLayout("linear", (16, 64)), Spec(int4, PER_CHANNEL))
    once = rounded(problem)
    twice = rounded(replace(problem, weight=once.weight))
    assert torch.equal(once.weight, twice.weight)


def test_dead_inputs_are_rounded_to_nearest() -> None:
    problem = problem_of(WeightLayout("linear", (4, 6)), Spec(int4, PER_CHANNEL))
    zero = torch.zeros_like(problem.h)
    found = rounded(replace(problem, h=zero, linear=0 * problem.linear, drifts=0 * problem.drifts))
    assert torch.equal(found.weight, seq_mse.fake_quantize(problem, problem.encoding))


def test_ranges_and_rounding_help_each_other() -> None:
    problem = problem_of(LINEAR, Spec(int3, PER_CHANNEL))
    better = seq_mse.solve(problem, shift_bias=False)
    both = rounded(replace(problem, encoding=better.encoding))
    assert both.error_after < rounded(problem).error_after
    assert both.error_after < better.error_after


@pytest.mark.parametrize(
    "spec", [Spec(int3, PER_CHANNEL), Spec(uint4, PER_CHANNEL, symmetric=False), Spec(int3, PerBlock(1, 32))]
)
def test_searched_scales_leave_each_output_no_worse_and_on_its_encoding(spec: Spec) -> None:
    problem = problem_of(LINEAR, spec, rows=400, held_back=100)
    fixed, searched = (adaround.solve(problem, scales=scales) for scales in ("fixed", "search"))
    assert fixed.encoding == problem.encoding
    assert searched.encoding != problem.encoding
    assert searched.error_after < 0.97 * fixed.error_after
    stored = problem.layout.from_matrix(searched.weight).numpy()
    np.testing.assert_array_equal(searched.encoding.fake_quantize(stored), stored)
    assert problem.held_back is not None
    held_back = problem.held_back.centered()
    assert (held_back.errors(searched.weight) <= held_back.errors(fixed.weight) * (1 + 1e-4)).all()


def test_ranges_that_clip_too_much_are_given_up_by_a_search() -> None:
    problem = problem_of(LINEAR, Spec(int3, PER_CHANNEL), rows=400, held_back=100)
    narrow = replace(problem, encoding=replace(problem.encoding, scale=problem.encoding.scale * np.float32(0.4)))
    alone = adaround.solve(problem, scales="search").error_after
    assert adaround.solve(narrow).error_after > 1.5 * alone
    assert adaround.solve(narrow, scales="search").error_after < 1.02 * alone


def test_an_unknown_way_to_treat_scales_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown scales 'free' of adaround; choose one of search, fixed"):
        adaround.solve(problem_of(LINEAR, Spec(int3, PER_CHANNEL)), scales="free")  # type: ignore[arg-type]
