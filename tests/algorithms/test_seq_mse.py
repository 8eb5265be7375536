"""SeqMSE against exhaustive search, and the promises that it never makes a layer worse."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from fake_walk import FakeStep, FakeWalk
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import problem_from_moments

from qsdk import ConfigError, DType, Encoding, int4, int8, uint4
from qsdk.algorithms.problems.gather import GatherOptions, problems_of
from qsdk.algorithms.solvers import seq_mse
from qsdk.core.layers.layer_problem import Layer, LayerProblem, PatchGeometry, WeightLayout
from qsdk.core.numerics.block_scales import restrict_block_scales
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of

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
        noisy = x + noise * torch.randn(x.shape, generator=generator)
        g[group], c[group], h[group] = x.T @ x, x.T @ noisy, noisy.T @ noisy
    encoding = encoding_from_range(range_of(weight.numpy(), spec), spec)
    return problem_from_moments("fc:weight", spec, encoding, layout, layout.to_matrix(weight), g, c, h, rows)


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


def test_candidates_are_shares_of_the_range_and_none_is_worse_than_min_max() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    full = candidate(problem, 1)
    problem = replace(problem, encoding=full)
    found = seq_mse.solve(problem, refine=False)
    shares = found.encoding.scale / full.scale * 20
    np.testing.assert_allclose(shares, np.rint(shares), rtol=1e-4)
    assert len(set(np.rint(shares))) > 2
    for refine in (False, True):
        encoding = seq_mse.solve(problem, refine=refine).encoding
        assert (per_output(problem, encoding) <= per_output(problem, full)).all()


def per_output(problem: LayerProblem, encoding: Encoding) -> torch.Tensor:
    return problem.errors(seq_mse.fake_quantize(problem, encoding))


@pytest.mark.parametrize("seed", range(4))
def test_a_scale_per_tensor_is_the_exhaustive_joint_optimum(seed: int) -> None:
    problem = problem_of(LINEAR, Spec(int4, PerTensor()), seed)
    errors = [error_with(problem, candidate(problem, i / 20)) for i in range(1, 21)]
    found = seq_mse.solve(problem, refine=False)
    assert found.encoding == candidate(problem, (int(np.argmin(errors)) + 1) / 20)
    assert found.error_after == pytest.approx(min(errors))
    assert found.error_after < errors[-1]  # argmin per channel, then the largest, would be min-max


KINDS = [
    (WeightLayout("conv", (4, 3, 3)), PatchGeometry((3,), (1,), ((1, 1),), (1,), mode="reflect"), (3, 9)),
    (
        WeightLayout("conv", (4, 2, 2, 2, 2), 2),
        PatchGeometry((2,) * 3, (1,) * 3, ((0, 0),) * 3, (1,) * 3, 2),
        (4, 4, 4, 4),
    ),
    (WeightLayout("conv", (4, 1, 3, 3), 4), PatchGeometry((3, 3), (2, 2), ((1, 1),) * 2, (1, 1), 4), (4, 8, 8)),
    (WeightLayout("linear", (4, 8)), None, (8,)),
]


@pytest.mark.parametrize(("layout", "geometry", "shape"), KINDS)
@pytest.mark.parametrize("dtype", [int4, int8])
def test_ragged_batches_eight_bits_any_convolution_and_padding(
    layout: WeightLayout, geometry: PatchGeometry | None, shape: tuple[int, ...], dtype: DType
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(layout.shape, generator=generator)
    layer = Layer("w", Spec(dtype, PerChannel(0)), layout, geometry)
    pairs = [(x, x * 1.01) for x in (torch.randn(n, *shape, generator=generator) for n in (4, 4, 1))]
    walk = FakeWalk([[layer]], {"w": weight}, [x for x, _ in pairs])
    (problem,) = problems_of(FakeStep([layer], pairs), walk, GatherOptions(held_back=0), 0)
    found = seq_mse.solve(problem)
    assert found.error_after < found.error_before
    assert found.encoding != problem.encoding


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock(1, 4)])
def test_more_candidates_are_not_worse(granularity: Granularity) -> None:
    problem = problem_of(LINEAR, Spec(int4, granularity))
    # each set of candidates holds the one before
    errors = [seq_mse.solve(problem, candidates=n, refine=False).error_after for n in (1, 5, 10, 20, 40)]
    slack = 1.02 if granularity == PerBlock(1, 4) else 1 + 1e-5  # a descent, not a search of all combinations
    assert all(later <= earlier * slack for earlier, later in pairwise(errors))
    assert errors[-1] < 0.97 * errors[0]


def test_a_wide_layer_comes_close_to_what_trying_all_candidates_finds() -> None:
    problem = problem_of(WeightLayout("linear", (16, 300)), Spec(int4, PerChannel(0)), rows=600)
    found = per_output(problem, seq_mse.solve(problem, refine=False).encoding)
    every = torch.stack([per_output(problem, candidate(problem, i / 20)) for i in range(1, 21)])
    assert float((found <= every.min(0).values * (1 + 1e-4)).float().mean()) > 0.7
    assert float(found.sum()) < 1.02 * float(every.min(0).values.sum())
    assert (found <= every[-1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("granularity", [PerChannel(0), PerBlock(1, 4)])
def test_refined_scales_are_better(granularity: Granularity) -> None:
    problem = problem_of(WeightLayout("linear", (16, 32)), Spec(int4, granularity))
    assert seq_mse.solve(problem).error_after < seq_mse.solve(problem, refine=False).error_after


def test_asymmetric_ranges_are_searched_at_either_end() -> None:
    problem = problem_of(LINEAR, Spec(uint4, PerChannel(0), symmetric=False))
    skewed = problem.weight.clone()
    skewed[..., 0] = 9.0  # one outlier at the upper end only
    problem = reweighted(problem, skewed)
    common = min(error_with(problem, candidate(problem, i / 20)) for i in range(1, 21))
    assert seq_mse.solve(problem, refine=False).error_after < 0.9 * common


def reweighted(problem: LayerProblem, weight: torch.Tensor) -> LayerProblem:
    """The same inputs, equal in float and quantized, with another weight."""
    h = problem.g_quantized
    encoding = encoding_from_range(range_of(problem.layout.from_matrix(weight).numpy(), problem.spec), problem.spec)
    return problem_from_moments("w", problem.spec, encoding, problem.layout, weight, h, h, h, problem.rows)


def test_a_channel_that_held_back_data_speaks_against_keeps_its_range() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    free = seq_mse.solve(problem)
    moved = free.encoding.scale != problem.encoding.scale
    assert moved.all()
    # the held-back inputs of the first three outputs ask for just the weight that the old range gives
    old = seq_mse.fake_quantize(problem, problem.encoding)
    linear = problem.linear_term.clone()
    linear[:, :3] = -(old - problem.weight)[:, :3] @ problem.g_quantized
    guarded = seq_mse.solve(replace(problem, held_back=replace(problem, linear=linear)))
    kept = guarded.encoding.scale == problem.encoding.scale
    assert kept.tolist() == [True] * 3 + [False] * 3
    np.testing.assert_array_equal(guarded.encoding.scale[3:], free.encoding.scale[3:])
    assert free.error_after < guarded.error_after < guarded.error_before
    shared = problem_of(LINEAR, Spec(int4, PerTensor()))
    against = replace(
        shared, linear=-(seq_mse.fake_quantize(shared, shared.encoding) - shared.weight) @ shared.g_quantized
    )
    assert seq_mse.solve(replace(shared, held_back=against)).encoding == shared.encoding


def with_means(problem: LayerProblem, mean: float) -> LayerProblem:
    """The problem with inputs that have a mean, as those behind a ReLU have."""
    k = problem.weight.shape[-1]
    mu = torch.full((1, k), mean)
    h = problem.g_quantized + problem.rows * mu[..., None] * mu[:, None]
    found = reweighted(replace(problem, h=h), problem.weight)
    return replace(found, mean=mu, mean_quantized=mu, bias=torch.zeros(found.weight.shape[:2]))


def test_the_bias_takes_up_the_mean_error_that_ranges_leave() -> None:
    problem = with_means(problem_of(LINEAR, Spec(dtype_named("int3"), PerChannel(0)), noise=0), 2.0)
    plain, shifted = seq_mse.solve(problem, shift_bias=False), seq_mse.solve(problem)
    assert plain.bias_shift is None
    assert shifted.bias_shift is not None
    weight = seq_mse.fake_quantize(problem, shifted.encoding)
    torch.testing.assert_close(shifted.bias_shift, problem.mean_error(weight))
    left = problem.errors(weight) - problem.rows * shifted.bias_shift**2
    assert shifted.error_after == pytest.approx(problem.relative(left), rel=1e-3)
    assert shifted.error_after < 0.85 * plain.error_after
    assert plain.error_before == pytest.approx(shifted.error_before, rel=1e-3)
    assert seq_mse.solve(replace(problem, bias=None)).bias_shift is None


def test_a_shift_that_held_back_data_does_not_show_is_not_made() -> None:
    problem = with_means(problem_of(LINEAR, Spec(int4, PerChannel(0)), noise=0), 2.0)
    assert problem.mean is not None
    opposite = replace(problem, mean=-problem.mean, mean_quantized=-problem.mean)
    shift = seq_mse.solve(replace(problem, held_back=opposite)).bias_shift
    assert shift is not None
    assert not shift.any()


def test_the_loss_sqnr_weighs_outputs_that_share_a_scale_by_their_energy() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerTensor()))
    weight = problem.weight * torch.tensor([1, 1, 1, 1, 0.2, 0.2])[:, None]
    problem = reweighted(problem, weight)

    def relative(encoding: Encoding) -> float:
        return float((per_output(problem, encoding) / problem.energy).sum())

    found = seq_mse.solve(problem, loss="sqnr", refine=False)
    best = min(relative(candidate(problem, i / 20)) for i in range(1, 21))
    assert relative(found.encoding) == pytest.approx(best, rel=1e-4)
    assert relative(found.encoding) < relative(seq_mse.solve(problem, refine=False).encoding)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock(1, 4)])
def test_the_loss_l1_is_the_absolute_error_on_samples(granularity: Granularity) -> None:
    problem = problem_of(LINEAR, Spec(int4, granularity))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 200, 16, generator=generator)
    noisy = x + 0.1 * torch.randn(x.shape, generator=generator)
    problem = replace(problem, samples=(x, noisy))

    def absolute(encoding: Encoding) -> float:
        return float((x @ problem.weight.mT - noisy @ seq_mse.fake_quantize(problem, encoding).mT).abs().sum())

    found = seq_mse.solve(problem, loss="l1")
    assert absolute(found.encoding) <= absolute(problem.encoding)
    if granularity == PerTensor():
        best = min(absolute(candidate(problem, i / 20)) for i in range(1, 21))
        assert absolute(found.encoding) == pytest.approx(best, rel=1e-5)
    with pytest.raises(ConfigError, match="the loss l1 needs samples"):
        seq_mse.solve(replace(problem, samples=None), loss="l1")
    with pytest.raises(ConfigError, match="unknown loss 'huber'; choose one of mse, l1, sqnr"):
        seq_mse.solve(problem, loss="huber")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec", [Spec(int4, PerBlock(1, 4), scale_dtype=uint4), Spec(int4, PerBlock(1, 4), scale_bits=1)]
)
def test_scales_stay_what_the_spec_can_hold(spec: Spec) -> None:
    problem = problem_of(LINEAR, spec)
    found = seq_mse.solve(problem)
    assert found.error_after < found.error_before
    assert np.array_equal(restrict_block_scales(found.encoding.scale, spec), found.encoding.scale)
    if spec.scale_bits == 1:
        assert np.array_equal(np.frexp(found.encoding.scale)[0], np.full(found.encoding.scale.shape, 0.5))


def test_channels_are_chosen_independently() -> None:
    layout = WeightLayout("linear", (3, 8))
    problem = problem_of(layout, Spec(int4, PerChannel(0)))
    candidates = [candidate(problem, i / 5) for i in range(1, 6)]
    best = min(error_with(problem, mixed(candidates, np.array(choice))) for choice in product(range(5), repeat=3))
    assert seq_mse.solve(problem, candidates=5, refine=False).error_after == pytest.approx(best, rel=1e-5)


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
    sums = (x.T @ x)[None] * torch.tensor([1, 0.5, 0.25])[:, None, None, None]
    encoding = encoding_from_range(range_of(weight.numpy(), spec), spec)
    found = seq_mse.solve(
        problem_from_moments("w", spec, encoding, layout, layout.to_matrix(weight), *sums, 200), refine=False
    )
    assert found.encoding == encoding
    assert found.error_after == pytest.approx(0.25, rel=0.02)


def test_numpy_moments_give_the_same() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    arrays = {name: np.asarray(getattr(problem, name)) for name in ("weight", "h", "linear", "drifts")}
    assert seq_mse.solve(replace(problem, **arrays)).encoding == seq_mse.solve(problem).encoding


def test_blocks_across_groups_are_left_with_a_reason() -> None:
    layout = WeightLayout("conv_transpose", (6, 2, 3), 2, channel_axis=1, input_axis=0)
    found = seq_mse.solve(problem_of(layout, Spec(int4, PerBlock(0, 2))))
    assert "let the block size divide a group's channels" in found.note


def test_a_dead_layer_has_no_error() -> None:
    problem = problem_of(LINEAR, Spec(int4, PerChannel(0)))
    zero = torch.zeros_like(problem.h)
    found = seq_mse.solve(replace(problem, h=zero, linear=0 * problem.linear, drifts=0 * problem.drifts))
    assert found.encoding == problem.encoding
    assert found.error_after == 0
