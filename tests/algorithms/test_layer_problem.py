"""The closed form on second moments against the layer itself, for every kind of layer."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_walk import FakeStep, FakeWalk
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_problems import problem_from_moments
from torch import Tensor

from qsdk import DataError, ModelError, int4, int8
from qsdk.algorithms.problems.calls import ROWS, gather_patches, sample_positions
from qsdk.algorithms.problems.gather import GatherOptions, problems_of
from qsdk.algorithms.problems.moments import FOLD, Bounds, Moments
from qsdk.algorithms.solvers.rounding import noise_in
from qsdk.core.layers.layer_problem import Layer, LayerProblem, PatchGeometry, WeightLayout
from qsdk.core.numerics import affine
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of

CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Case:
    """A layer without bias, small enough for brute force."""

    layout: WeightLayout
    geometry: PatchGeometry | None
    inputs: tuple[int, ...]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        geometry = self.geometry
        if geometry is None:
            return x @ (weight.mT if self.layout.channel_axis == 0 else weight)
        dims, pads = len(geometry.kernel), [before for before, _ in geometry.padding]
        if geometry.transposed:
            extra = geometry.output_padding or 0
            return TRANSPOSED[dims](x, weight, None, geometry.stride, pads, extra, geometry.groups, geometry.dilation)
        around = [side for pad in reversed(geometry.padding) for side in pad]
        x = F.pad(x, around, mode="constant" if geometry.mode == "zeros" else geometry.mode)
        return CONVOLUTIONS[dims](x, weight, None, geometry.stride, 0, geometry.dilation, geometry.groups)


@st.composite
def cases(draw: Any, kinds: tuple[str, ...] = ("linear", "matmul", "conv", "conv_transpose")) -> Case:
    kind = draw(st.sampled_from(kinds))
    small = st.integers(1, 3)
    if kind in ("linear", "matmul"):
        o, k = draw(small), draw(st.integers(1, 6))
        axes = (0, 1) if kind == "linear" else (1, 0)
        shape = (o, k) if kind == "linear" else (k, o)
        return Case(WeightLayout("linear", shape, 1, *axes), None, (*draw(st.sampled_from([(2,), (2, 3)])), k))
    dims, groups = draw(small), draw(small)
    per_group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]))  # outputs and inputs of a group
    each = st.tuples(*[small] * dims)
    kernel, stride, dilation = draw(each), draw(each), draw(st.tuples(*[st.integers(1, 2)] * dims))
    mode = "zeros" if kind == "conv_transpose" else draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    before = draw(st.tuples(*[st.integers(0, 2)] * dims))
    after = before if kind == "conv_transpose" else draw(st.tuples(*[st.integers(0, 2)] * dims))
    if kind == "conv_transpose":
        before = after = tuple(min(b, d * (k - 1)) for b, d, k in zip(before, dilation, kernel, strict=True))
    geometry = PatchGeometry(
        kernel, stride, tuple(zip(before, after, strict=True)), dilation, groups, mode, kind == "conv_transpose"
    )
    if kind == "conv_transpose":
        extra = tuple(min(1, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        layout = WeightLayout("conv_transpose", (groups * per_group[1], per_group[0], *kernel), groups, 1, 0)
        return Case(layout, replace(geometry, output_padding=extra), (2, groups * per_group[1], *[3] * dims))
    layout = WeightLayout("conv", (groups * per_group[0], per_group[1], *kernel), groups)
    return Case(layout, geometry, (2, groups * per_group[1], *[5] * dims))


def random_problem(case: Case, seed: int, spec: Spec) -> tuple[LayerProblem, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(case.layout.shape, generator=generator)
    x = torch.randn(case.inputs, generator=generator)
    noisy = x + 0.1 * torch.randn(case.inputs, generator=generator)
    pairs = [(x[:1], noisy[:1]), (x[1:], noisy[1:])]  # two updates of the same sums
    return gathered(case, spec, weight, pairs), x, noisy, weight


def is_sampled(case: Case) -> bool:
    """Whether more patches arise than are kept, so that the moments are an estimate."""
    outputs = case.geometry.output_size(case.inputs[2:]) if case.geometry else ()
    return case.inputs[0] * math.prod(outputs) > ROWS


def gathered(
    case: Case, spec: Spec, weight: Tensor, pairs: list[tuple[Any, Any]], held_back: int = 0, batches: int | None = None
) -> LayerProblem:
    layer = Layer("w", spec, case.layout, case.geometry)
    walk = FakeWalk([[layer]], {"w": weight}, [pairs[0][0]] * (batches or len(pairs)))
    (problem,) = problems_of(FakeStep([layer], pairs), walk, GatherOptions(held_back=held_back), 0)
    return problem


def test_the_rank_that_owns_a_layer_alone_has_its_second_moments() -> None:
    layer, x = Layer("w", Spec(int4), WeightLayout("linear", (3, 4))), torch.randn(6, 4)
    walk, pairs = FakeWalk([[layer]], {"w": torch.randn(3, 4)}, [x]), [(x, x + 0.1)]
    for owner in (0, 1):
        (problem,) = problems_of(FakeStep([layer], pairs), walk, GatherOptions(held_back=0), 0, {"w": owner})
        assert problem.mean is not None
        assert (problem.h is None and problem.x_quantized is None) is (owner == 1)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 99))
def test_the_closed_form_is_the_layers_own_error(case: Case, seed: int) -> None:
    assume(not is_sampled(case))
    problem, x, noisy, weight = random_problem(case, seed, Spec(int4))
    quantized = torch.from_numpy(problem.encoding.fake_quantize(weight.numpy()))
    reference = case(x, weight)
    wanted = (reference - case(noisy, quantized)).square().sum()
    energy = reference.square().sum()
    found = problem.errors(case.layout.to_matrix(quantized)).sum()
    torch.testing.assert_close(problem.energy.sum(), energy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(energy) + 1e-6)


@settings(max_examples=60, deadline=None)
@given(cases(("conv", "conv_transpose")), st.integers(0, 99))
def test_each_output_has_its_own_error(case: Case, seed: int) -> None:
    assume(not is_sampled(case))
    problem, x, noisy, weight = random_problem(case, seed, Spec(int4))
    difference = case(x, weight) - case(noisy, weight)
    per_channel = difference.square().sum((0, *range(2, difference.dim()))).reshape(problem.layout.matrix_shape[:2])
    energy = float(problem.energy.sum())
    torch.testing.assert_close(problem.drift, per_channel, rtol=1e-3, atol=1e-5 * energy + 1e-6)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_weight_comes_back_from_its_matrix(case: Case) -> None:
    stored = np.arange(np.prod(case.layout.shape)).reshape(case.layout.shape)
    matrix = case.layout.to_matrix(stored)
    assert matrix.shape == case.layout.matrix_shape
    assert np.array_equal(case.layout.from_matrix(matrix), stored)
    as_torch = case.layout.to_matrix(torch.from_numpy(stored))
    assert np.array_equal(as_torch.numpy(), matrix)
    assert np.array_equal(case.layout.from_matrix(as_torch).numpy(), stored)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(["tensor", "channel", "block"]), st.integers(1, 4))
def test_scales_align_with_the_matrix(case: Case, granularity: str, size: int) -> None:
    layout = case.layout
    spec = Spec(
        int8,
        {
            "tensor": PerTensor(),
            "channel": PerChannel(layout.channel_axis),
            "block": PerBlock(layout.input_axis, size),
        }[granularity],
    )
    weight = np.random.default_rng(size).normal(size=layout.shape).astype(np.float32)
    encoding = encoding_from_range(range_of(weight, spec), spec)
    aligned = affine.align(encoding.scale, layout.shape, encoding.axis, encoding.block_size)
    by_cell = encoding.scale.reshape(-1)[layout.cells(encoding)]
    assert np.array_equal(layout.from_matrix(by_cell), np.broadcast_to(aligned, layout.shape))


def test_numpy_and_torch_problems_agree() -> None:
    layout = WeightLayout("conv", (4, 2, 3, 3), 2)
    case = Case(layout, PatchGeometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2), (2, 4, 5, 5))
    problem, *_ = random_problem(case, 0, Spec(int4))
    names = ("weight", "h", "linear", "drifts")
    other = replace(problem, **{name: np.asarray(getattr(problem, name)) for name in names})
    moved = problem.weight * 0.9
    assert other.relative_error(moved.numpy()) == pytest.approx(problem.relative_error(moved), rel=1e-4)


def test_equal_inputs_have_no_drift() -> None:
    x = torch.randn(7, 3)
    problem = gathered(linear(2, 3), Spec(int8), torch.randn(2, 3), [(x, x)])
    assert not problem.linear_term.any()
    assert not problem.drift.any()
    assert problem.rows == problem.count == 7


def linear(outputs: int, inputs: int) -> Case:
    return Case(WeightLayout("linear", (outputs, inputs)), None, (1, inputs))


@pytest.mark.parametrize(("rows", "outputs"), [(100, 8), (3000, 8), (3000, 700)])
def test_every_route_is_as_exact_as_float32_allows(rows: int, outputs: int) -> None:
    """Rows kept as they are, sums by way of the outputs, and sums of products, against float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 300, generator=generator) * torch.logspace(0, -2, 300) + 1
    noisy = x + 1e-3 * torch.randn(x.shape, generator=generator)
    weight = torch.randn(outputs, 300, generator=generator)
    pairs = [(x[:1500], noisy[:1500]), (x[1500:], noisy[1500:])][: 1 + (rows > 1500)]
    problem = gathered(linear(outputs, 300), Spec(int4), weight, pairs)
    assert (problem.x_quantized is None) == (rows >= 300)
    exact, now, w = x.double(), noisy.double(), weight.double()
    for found, wanted in (
        (problem.g_quantized[0], now.T @ now),
        (problem.linear_term[0], w @ ((now - exact).T @ now)),
        (problem.drift[0], ((exact - now) @ w.T).square().sum(0)),
        (problem.energy[0], (exact @ w.T).square().sum(0)),
    ):
        assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < 3e-6


def test_sums_of_parts_add_up_whatever_the_batches() -> None:
    x = torch.randn(16 * FOLD + 77, 5, generator=torch.Generator().manual_seed(0))
    noisy, weight = x * 1.01, torch.randn(1, 3, 5)
    sums = []
    for sizes in ([len(x)], [1, 2, 1000, len(x) - 1003]):
        moments = Moments(weight, Bounds.of(x[None], noisy[None], len(x)))
        for one, other in zip(x.split(sizes), noisy.split(sizes), strict=True):
            assert moments.add(one[None], other[None])
        sums.append(moments.finish())
    for name in ("h", "linear", "drifts", "mean", "mean_quantized"):
        torch.testing.assert_close(getattr(sums[0], name), getattr(sums[1], name), rtol=1e-4, atol=1e-3)
    assert sums[0].rows == sums[1].rows == len(x)


def test_what_is_left_of_an_input_that_never_varies_is_within_its_noise():
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 1000.1
    means = {"mean": x.mean(0)[None], "mean_quantized": x.mean(0)[None]}
    layout, spec = WeightLayout("linear", (4, 3)), Spec(int8, PerTensor())
    weight = torch.randn(1, 4, 3)
    encoding = encoding_from_range(range_of(weight[0].numpy(), spec), spec)
    moment = (x.T @ x)[None]
    problem = problem_from_moments("fc:weight", spec, encoding, layout, weight, moment, moment, moment, 500, **means)
    assert noise_in(problem) is None
    noise, left = noise_in(problem.centered()), problem.centered().h
    assert abs(float(left[0, 1, 1])) <= float(noise[0, 1])
    assert float(noise[0, 0]) < 0.01 * float(left[0, 0, 0])


@pytest.mark.parametrize("few", [0, 100])
def test_a_row_counts_as_often_as_it_stands_for(few: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 6, 5, generator=generator), torch.randn(1, 3, 5, generator=generator)
    noisy = x + 0.1 * torch.randn(1, 6, 5, generator=generator)
    bounds = Bounds.of(x, noisy, 12)
    standing, repeated = Moments(weight, bounds, few=few), Moments(weight, bounds, few=0)
    for rows, times in ((slice(0, 2), 4), (slice(2, 6), 1)):
        standing.add(x[:, rows], noisy[:, rows], float(times))
        repeated.add(*(v[:, rows].repeat_interleave(times, 1) for v in (x, noisy)))
    found, wanted = standing.finish(), repeated.finish()
    assert (found.rows, found.count, wanted.count) == (6, 12, 12)
    h, linear, drifts = found.h, found.linear, found.drifts
    if found.x_quantized is not None and found.drifted is not None:
        h, linear = found.x_quantized.mT @ found.x_quantized, found.drifted.mT @ found.x_quantized
        drifts = found.drifted.square().sum(1)
        assert found.roots is not None
        torch.testing.assert_close(found.x_quantized.mT @ found.roots, 12 * wanted.mean_quantized)
    assert (found.h is None) == (few > 6)
    torch.testing.assert_close((h, linear, drifts), (wanted.h, wanted.linear, wanted.drifts))


def test_few_rows_are_kept_and_tell_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 40, generator=generator)
    noisy, weight = x + 0.1 * torch.randn(12, 40, generator=generator), torch.randn(6, 40, generator=generator)
    problem = gathered(linear(6, 40), Spec(int4, PerChannel(0)), weight, [(x, noisy)])
    assert problem.h is None
    assert problem.x_quantized is not None
    sums = {"h": problem.g_quantized, "linear": problem.linear_term, "drifts": problem.drift}
    other = replace(problem, x_quantized=None, drifted=None, **sums)
    for one, two in ((problem, other), (problem.centered(), other.centered()) if problem.mean is not None else ()):
        torch.testing.assert_close(one.errors(0.9 * weight[None]), two.errors(0.9 * weight[None]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.energy, two.energy, rtol=1e-4, atol=1e-4)


def test_the_centered_problem_is_what_a_shift_of_the_bias_leaves() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator) + 2
    noisy, weight = x + 0.3, torch.randn(4, 5, generator=generator)
    problem = gathered(linear(4, 5), Spec(int4), weight, [(x, noisy)])
    moved = 0.9 * weight
    error = x @ weight.T - noisy @ moved.T
    torch.testing.assert_close(problem.mean_error(moved[None])[0], error.mean(0), rtol=1e-4, atol=1e-5)
    left = (error - error.mean(0)).square().sum(0)
    torch.testing.assert_close(problem.centered().errors(moved[None])[0], left, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(problem.centered().energy, problem.energy, rtol=1e-4, atol=1e-3)


def test_an_embedding_counts_how_often_each_row_is_read() -> None:
    table = torch.randn(5, 3)
    layout = WeightLayout("embedding", (5, 3), 5, channel_axis=1, input_axis=0)
    problem = gathered(Case(layout, None, (1,)), Spec(int4), table, [(t, t) for t in (torch.tensor([[0, 1], [1, 3]]),)])
    assert problem.g_quantized.flatten().tolist() == pytest.approx([2, 3, 1, 2, 1])  # once more than in the data
    moved = table + 0.5
    assert float(problem.errors(layout.to_matrix(moved)).sum()) == pytest.approx(9 * 3 * 0.25)
    assert problem.rows == 4
    with pytest.raises(DataError, match="batch 0: an index is none of the 5 rows of the table"):
        gathered(Case(layout, None, (1,)), Spec(int4), table, [(torch.tensor([5]), torch.tensor([5]))])


def test_groups_of_a_linear_layer_read_inputs_side_by_side() -> None:
    """As the directions of a recurrent layer do."""
    layout = WeightLayout("conv_transpose", (2, 4, 3), 2, channel_axis=1, input_axis=0)
    x, weight = torch.randn(5, 7, 6), torch.randn(2, 4, 3)
    problem = gathered(Case(layout, None, (1,)), Spec(int4), weight, [(x, x)])
    energy = torch.stack([(x[..., 3 * i : 3 * i + 3] @ weight[i].T).square().sum((0, 1)) for i in range(2)])
    torch.testing.assert_close(problem.energy, energy)


def test_sampled_patches_estimate_all_patches() -> None:
    geometry = PatchGeometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    case = Case(WeightLayout("conv", (2, 2, 3, 3)), geometry, (4, 2, 32, 32))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 2, 32, 32, generator=generator), torch.randn(2, 2, 3, 3, generator=generator)
    one, again = (gathered(case, Spec(int4), weight, [(x, x)]) for _ in range(2))
    assert (one.rows, one.count) == (1024, 4096)
    assert torch.equal(one.g_quantized, again.g_quantized)
    energy = case(x, weight).square().sum((0, 2, 3))
    torch.testing.assert_close(one.energy[0], energy, rtol=0.1, atol=0)


def test_positions_are_uniform_and_reproducible() -> None:
    counts = torch.zeros(10)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        counts += torch.bincount(sample_positions(10, 3, generator), minlength=10)
    assert float((counts / 900 - 1).abs().max()) < 0.1
    assert torch.equal(sample_positions(5, 5, None), torch.arange(5))
    assert torch.equal(sample_positions(5, None, None), torch.arange(5))


def test_an_unbatched_convolution_input_is_one_sample() -> None:
    case = Case(WeightLayout("conv", (1, 2, 3)), PatchGeometry((3,), (1,), ((0, 0),), (1,)), (2, 8))
    x, weight = torch.randn(2, 8), torch.randn(1, 2, 3)
    one, batch = (gathered(case, Spec(int4), weight, [(given, given)]) for given in (x, x[None]))
    assert torch.equal(one.g_quantized, batch.g_quantized)


def test_patches_lie_in_the_order_of_the_weight() -> None:
    geometry = PatchGeometry((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1))
    x = torch.arange(18.0).reshape(1, 2, 3, 3)
    assert gather_patches(x, torch.tensor([3]), geometry).tolist() == [[[4, 5, 7, 8, 13, 14, 16, 17]]]


@pytest.mark.parametrize(("shape", "groups", "match"), [((2, 3, 4), 1, "one matrix"), ((2, 3), 2, "one matrix")])
def test_a_linear_weight_must_be_a_matrix(shape: tuple[int, ...], groups: int, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        WeightLayout("linear", shape, groups)


def test_groups_must_divide() -> None:
    with pytest.raises(ModelError, match="2 groups do not divide axis 0"):
        WeightLayout("conv", (3, 1, 3), 2)


def test_shapes_of_a_problem_must_belong_together() -> None:
    layout, spec = WeightLayout("linear", (2, 3)), Spec(int8)
    encoding = encoding_from_range(range_of(np.ones((2, 3)), spec), spec)
    weight, moment = np.ones((1, 2, 3), np.float32), np.ones((1, 3, 3), np.float32)
    with pytest.raises(ModelError, match=r"fc:weight: a weight of \(2, 3\)"):
        LayerProblem("fc:weight", spec, encoding, layout, weight[0], moment, weight, weight[..., 0], 1, 1.0)
    with pytest.raises(ModelError, match="fc:weight: a second moment of"):
        LayerProblem("fc:weight", spec, encoding, layout, weight, moment[:, :2], weight, weight[..., 0], 1, 1.0)


@pytest.mark.parametrize(
    ("x", "other", "match"),
    [
        (torch.ones(2, 3), torch.ones(1, 3), "different shapes"),
        (torch.ones(2, 4), torch.ones(2, 4), "does not fit a weight with 3 inputs"),
        (torch.full((2, 3), torch.nan), torch.ones(2, 3), "NaN"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: Tensor, other: Tensor, match: str) -> None:
    with pytest.raises(DataError, match=match):
        gathered(linear(2, 3), Spec(int4), torch.ones(2, 3), [(x, other)])
