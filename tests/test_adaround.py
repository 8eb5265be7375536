"""AdaRound: always on the grid, never worse than nearest, better on data it has not seen."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk.algorithms import adaround, seq_mse
from qsdk.algorithms.moments import Moments
from qsdk.core.dtypes import DType, dtype_named, float8e4m3fn, int4, int8, uint4
from qsdk.core.errors import ConfigError
from qsdk.core.layer_problem import LayerProblem, WeightLayout
from qsdk.core.ranges import encoding_from_range, range_of
from qsdk.core.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec

int3 = dtype_named("int3")
LAYERS: list[tuple[WeightLayout, Granularity]] = [
    (WeightLayout("linear", (4, 12)), PerChannel(0)),
    (WeightLayout("linear", (12, 4), 1, 1, 0), PerBlock(0, 5)),
    (WeightLayout("conv", (6, 2, 3), 2), PerTensor()),
    (WeightLayout("conv", (4, 1, 3, 3), 4), PerChannel(0)),
    (WeightLayout("conv_transpose", (4, 3, 2, 2), 2, 1, 0), PerChannel(1)),
    (WeightLayout("conv_transpose", (6, 2, 3), 2, 1, 0), PerBlock(0, 2)),
]


def problem_of(
    layout: WeightLayout, spec: Spec, *, seed: int = 0, noise: float = 0.05, rows: int = 2000, weights: int = 0
) -> LayerProblem:
    """Correlated inputs: `seed` draws the data, `weights` the layer and the mixing."""
    groups, _, k = layout.matrix_shape
    fixed, fresh = torch.Generator().manual_seed(weights), torch.Generator().manual_seed(seed + 1000)
    weight = torch.randn(layout.shape, generator=fixed)
    sums = []
    for _ in range(groups):
        mix = torch.randn(k, k, generator=fixed) * torch.logspace(0, -1.5, k)
        moments = Moments(WeightLayout("linear", (1, k)))
        x = (torch.randn(rows, k, generator=fresh) @ mix.T).relu()
        moments.update(x, x + noise * x.std() * torch.randn(x.shape, generator=fresh))
        sums.append((moments.g[0], moments.c[0], moments.g_quantized[0]))
    g, c, h = (torch.stack(each) for each in zip(*sums, strict=True))
    encoding = encoding_from_range(range_of(weight.numpy(), spec), spec)
    return LayerProblem("fc:weight", spec, encoding, layout, layout.to_matrix(weight), g, c, h, rows)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYERS),
    st.sampled_from([int3, int4, int8, uint4]),
    st.booleans(),
    st.integers(0, 50),
    st.sampled_from([3, 50]),
)
def test_every_weight_is_on_its_floor_or_ceil_and_no_channel_is_worse(
    layer: tuple[WeightLayout, Granularity], dtype: DType, symmetric: bool, seed: int, rows: int
) -> None:
    problem = problem_of(layer[0], Spec(dtype, layer[1], symmetric), seed=seed, weights=seed, rows=rows)
    found = adaround.solve(problem)
    assert found.weight is not None
    stored = problem.layout.from_matrix(problem.weight).numpy()
    rounded = problem.layout.from_matrix(found.weight).numpy()
    encoding = problem.encoding
    q = encoding.quantize(rounded)
    assert np.array_equal(encoding.dequantize(q), rounded)
    scale = problem.layout.from_matrix(torch.from_numpy(encoding.scale.reshape(-1)[problem.layout.cells(encoding)]))
    # one step at most, and to either side: floor or ceil (or the end of the grid, for what lies beyond)
    inside = (stored >= encoding.low.min()) & (stored <= encoding.high.max())
    assert (np.abs(rounded - stored) < scale.numpy() * (1 + 1e-5))[inside].all()
    nearest = seq_mse.fake_quantize(problem, encoding)
    slack = 1e-6 * float(problem.energy().sum())
    assert (problem.errors(found.weight) <= problem.errors(nearest) + slack).all()
    assert found.error_after <= found.error_before


@pytest.mark.parametrize(("dtype", "share"), [(int3, 0.6), (int4, 0.6), (int8, 1.0)])
def test_unseen_data_has_a_smaller_error_too(dtype: DType, share: float) -> None:
    layout, spec = WeightLayout("linear", (32, 96)), Spec(dtype, PerChannel(0))
    seen, unseen = (problem_of(layout, spec, seed=seed) for seed in (0, 1))
    found = adaround.solve(seen)
    nearest = seq_mse.fake_quantize(seen, seen.encoding)
    assert found.error_after < share * found.error_before
    assert unseen.relative_error(found.weight) < share * unseen.relative_error(nearest)


def test_small_layers_come_near_the_best_of_all_roundings() -> None:
    layout, spec = WeightLayout("linear", (1, 8)), Spec(int4, PerChannel(0))
    ratios = []
    for seed in range(20):
        problem = problem_of(layout, spec, seed=seed, weights=seed)
        scale, zero = torch.full((1, 1, 8), float(problem.encoding.scale[0])), torch.zeros(1, 1, 8)
        below, above, _ = adaround.neighbours(problem, scale, zero)
        choices = torch.tensor(list(product([False, True], repeat=8)))
        best = min(problem.relative_error(torch.where(choice, above, below) * scale) for choice in choices)
        ratios.append(adaround.solve(problem, damping=1e-4).error_after / best)
    assert min(ratios) >= 1 - 1e-3
    assert np.mean(ratios) < 1.1


def test_descent_never_raises_the_objective_and_ends_where_no_flip_pays() -> None:
    generator = torch.Generator().manual_seed(0)
    k, rows = 200, 5  # more columns than one block
    x = torch.randn(400, k, generator=generator)
    h, linear = (x.T @ x)[None], 10 * torch.randn(1, k, rows, generator=generator)
    low, high = -torch.rand(1, k, rows, generator=generator), torch.rand(1, k, rows, generator=generator)

    def objective(up: torch.Tensor) -> torch.Tensor:
        d = torch.where(up, high, low)
        return (d * (h @ d + 2 * linear)).sum(1)

    up = adaround.feedback(adaround.damped(h, 0.01), linear, low, high)
    sweeps = [adaround.descend(h, linear, low, high, up, n) for n in (0, 1, 2, 100)]
    assert torch.equal(sweeps[0], up)
    values = [objective(each) for each in sweeps]
    assert all((after <= before + 1e-2).all() for before, after in pairwise(values))
    for column in range(k):
        flipped = sweeps[-1].clone()
        flipped[:, column] ^= True
        assert (objective(flipped) >= values[-1] - 1e-2).all()


def test_feedback_settles_diagonal_problems_at_once() -> None:
    h = torch.diag_embed(torch.tensor([[3.0, 1.0, 2.0]]))
    low, high = torch.tensor([[[-0.2], [-0.7], [0.0]]]), torch.tensor([[[0.8], [0.3], [0.0]]])
    up = adaround.feedback(h, torch.zeros(1, 3, 1), low, high)
    assert up.flatten().tolist() == [False, True, False]


def test_weights_on_the_grid_stay() -> None:
    problem = problem_of(WeightLayout("linear", (16, 64)), Spec(int4, PerChannel(0)))
    once = adaround.solve(problem)
    twice = adaround.solve(replace(problem, weight=once.weight))
    assert torch.equal(once.weight, twice.weight)


def test_dead_inputs_are_rounded_to_nearest() -> None:
    problem = problem_of(WeightLayout("linear", (4, 6)), Spec(int4, PerChannel(0)))
    zero = torch.zeros_like(problem.g)
    found = adaround.solve(replace(problem, g=zero, c=zero, g_quantized=zero))
    assert torch.equal(found.weight, seq_mse.fake_quantize(problem, problem.encoding))


def test_ranges_and_rounding_help_each_other() -> None:
    problem = problem_of(WeightLayout("linear", (32, 96)), Spec(int3, PerChannel(0)))
    better = seq_mse.solve(problem)
    both = adaround.solve(replace(problem, encoding=better.encoding))
    assert both.error_after < adaround.solve(problem).error_after
    assert both.error_after < better.error_after


def test_what_cannot_be_rounded_is_refused() -> None:
    layout = WeightLayout("linear", (4, 6))
    with pytest.raises(ConfigError, match="fc:weight: adaround needs an integer grid, not float8e4m3fn"):
        adaround.solve(problem_of(layout, Spec(float8e4m3fn, PerChannel(0))))
    with pytest.raises(ConfigError, match="fc:weight: a damping of 0 is not positive"):
        adaround.solve(problem_of(layout, Spec(int4, PerChannel(0))), damping=0)
