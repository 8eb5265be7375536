"""SeqMSE against exhaustive search, and the promises that it never makes a layer worse."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk.algorithms import seq_mse
from qsdk.algorithms.moments import Moments
from qsdk.core.dtypes import DType, float8e4m3fn, int4, int8, uint4
from qsdk.core.encoding import Encoding
from qsdk.core.errors import ConfigError
from qsdk.core.layer_problem import LayerProblem, WeightLayout
from qsdk.core.ranges import Range, encoding_from_range, range_of
from qsdk.core.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec

CONV = WeightLayout("conv", (6, 4, 3), 2)
TRANSPOSED = WeightLayout("conv_transpose", (8, 3, 3), 2, channel_axis=1, input_axis=0)
LINEAR = WeightLayout("linear", (6, 16))


def problem_of(layout: WeightLayout, spec: Spec, seed: int = 0, noise: float = 0.1, rows: int = 300) -> LayerProblem:
    """A weight with a few large values, so that the widest range is not the best one."""
    generator = torch.Generator().manual_seed(seed)
    groups, _, k = layout.matrix_shape
    weight = torch.randn(layout.shape, generator=generator)
    weight = weight * (1 + 2 * (torch.rand(layout.shape, generator=generator) > 0.9))
    mix = torch.randn(k, k, generator=generator) / k**0.5
    g, c, h = (torch.empty(groups, k, k) for _ in range(3))
    for group in range(groups):
        x = torch.randn(rows, k, generator=generator) @ mix
        moments = Moments(WeightLayout("linear", (1, k)))
        moments.update(x, x + noise * torch.randn(x.shape, generator=generator))
        g[group], c[group], h[group] = moments.g[0], moments.c[0], moments.g_quantized[0]
    encoding = encoding_from_range(range_of(weight.numpy(), spec), spec)
    return LayerProblem("fc:weight", spec, encoding, layout, layout.to_matrix(weight), g, c, h, rows)


def candidate(problem: LayerProblem, share: float) -> Encoding:
    full = range_of(problem.layout.from_matrix(problem.weight).numpy(), problem.spec)
    return encoding_from_range(Range(full.low * share, full.high * share), problem.spec)


def error_with(problem: LayerProblem, encoding: Encoding) -> float:
    return problem.relative_error(seq_mse.fake_quantize(problem, encoding))


LAYERS: list[tuple[WeightLayout, Granularity]] = [
    (LINEAR, PerTensor()),
    (LINEAR, PerChannel(0)),
    (LINEAR, PerChannel(1)),
    (LINEAR, PerBlock(1, 4)),
    (LINEAR, PerBlock(1, 5)),
    (LINEAR, PerBlock(0, 2)),
    (CONV, PerTensor()),
    (CONV, PerChannel(0)),
    (CONV, PerBlock(1, 2)),
    (TRANSPOSED, PerTensor()),
    (TRANSPOSED, PerChannel(1)),
    (TRANSPOSED, PerBlock(0, 2)),
]


@pytest.mark.parametrize(("layout", "granularity"), LAYERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_common_share_of_the_range_is_better(
    layout: WeightLayout, granularity: Granularity, symmetric: bool
) -> None:
    problem = problem_of(layout, Spec(int4, granularity, symmetric))
    found = seq_mse.solve(problem)
    assert found.error_before == pytest.approx(error_with(problem, problem.encoding))
    assert found.error_after == pytest.approx(error_with(problem, found.encoding))
    assert found.error_after <= found.error_before
    if granularity in (PerTensor(), PerChannel(layout.channel_axis)):  # others descend: not a search of all pairs
        best = min(error_with(problem, candidate(problem, i / 20)) for i in range(1, 21))
        assert found.error_after <= best * (1 + 1e-5)


def test_a_shared_scale_is_the_exhaustive_joint_optimum() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerTensor()))
    errors = [error_with(problem, candidate(problem, i / 20)) for i in range(1, 21)]
    found = seq_mse.solve(problem)
    assert found.encoding == candidate(problem, (int(np.argmin(errors)) + 1) / 20)
    assert found.error_after == pytest.approx(min(errors))


def test_channels_are_chosen_independently() -> None:
    layout = WeightLayout("linear", (3, 8))
    problem = problem_of(layout, Spec(int4, PerChannel(0)))
    candidates = [candidate(problem, i / 5) for i in range(1, 6)]
    best = min(error_with(problem, mixed(candidates, np.array(choice))) for choice in product(range(5), repeat=3))
    assert seq_mse.solve(problem, candidates=5).error_after == pytest.approx(best, rel=1e-5)


def mixed(candidates: list[Encoding], choice: np.ndarray) -> Encoding:
    scales = np.stack([c.scale for c in candidates])[choice, np.arange(len(choice))]
    return Encoding(candidates[0].dtype, scales, np.zeros(len(choice), np.int32), 0)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(LAYERS),
    st.sampled_from([int4, int8, uint4]),
    st.integers(0, 99),
    st.floats(0.1, 1.5),
    st.integers(1, 20),
)
def test_the_layer_is_never_worse_than_it_was(
    layer: tuple[WeightLayout, Granularity], dtype: DType, seed: int, share: float, count: int
) -> None:
    problem = problem_of(layer[0], Spec(dtype, layer[1]), seed)
    problem = replace(problem, encoding=candidate(problem, share))  # any starting range
    found = seq_mse.solve(problem, candidates=count)
    assert error_with(problem, found.encoding) <= error_with(problem, problem.encoding) + 1e-7
    assert found.error_after <= error_with(problem, candidate(problem, 1.0)) * (1 + 1e-5) + 1e-7


def test_blocks_are_better_than_channels() -> None:
    channel = seq_mse.solve(problem_of(WeightLayout("linear", (8, 64)), Spec(int4, PerChannel(0))))
    block = seq_mse.solve(problem_of(WeightLayout("linear", (8, 64)), Spec(int4, PerBlock(1, 16))))
    assert block.error_after < 0.9 * channel.error_after


def test_the_float_input_is_the_target() -> None:
    """With inputs twice too small in the simulation, wider weights make up for it, as far as the range goes."""
    layout = WeightLayout("linear", (1, 4))
    weight = torch.tensor([[0.5, -0.5, 0.25, 0.1]])
    spec = Spec(int8, PerChannel(0))
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    moments = Moments(layout)
    moments.update(x, x / 2)
    encoding = encoding_from_range(range_of(weight.numpy(), spec), spec)
    sums = (moments.g, moments.c, moments.g_quantized)
    found = seq_mse.solve(LayerProblem("w", spec, encoding, layout, layout.to_matrix(weight), *sums, 200))
    assert found.encoding == encoding
    assert found.error_after == pytest.approx(0.25, rel=0.02)


def test_numpy_moments_give_the_same() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    arrays = {name: np.asarray(getattr(problem, name)) for name in ("weight", "g", "c", "g_quantized")}
    assert seq_mse.solve(replace(problem, **arrays)).encoding == seq_mse.solve(problem).encoding


def test_a_frozen_encoding_stays() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    found = seq_mse.solve(replace(problem, encoding=replace(problem.encoding, frozen=True)))
    assert found.encoding == problem.encoding
    assert found.note == "its encoding is frozen"


def test_blocks_across_groups_are_left_with_a_reason() -> None:
    layout = WeightLayout("conv_transpose", (6, 2, 3), 2, channel_axis=1, input_axis=0)
    found = seq_mse.solve(problem_of(layout, Spec(int4, PerBlock(0, 2))))
    assert "let the block size divide a group's channels" in found.note


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigError, match="fc:weight: seq_mse searches integer grids, not float8e4m3fn"):
        seq_mse.solve(problem_of(LINEAR, Spec(float8e4m3fn, PerChannel(0))))
    with pytest.raises(ConfigError, match="0 candidates for fc:weight; give at least 1"):
        seq_mse.solve(problem_of(LINEAR, Spec(int4, PerChannel(0))), candidates=0)


def test_a_dead_layer_has_no_error() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    zero = torch.zeros_like(problem.g)
    found = seq_mse.solve(replace(problem, g=zero, c=zero, g_quantized=zero))
    assert found.encoding == problem.encoding
    assert found.error_after == 0
