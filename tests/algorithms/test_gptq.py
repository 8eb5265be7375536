"""GPTQ: on the grid, better than nearest and SeqMSE on data it has not seen, never worse where data was held back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import LAYERS, problem_of

from qsdk import DType, int4, int8, uint4
from qsdk.algorithms.solvers import adaround, gptq, seq_mse
from qsdk.algorithms.solvers.heldout_check import with_held_back
from qsdk.core.layers.layer_problem import WeightLayout
from qsdk.core.numerics.block_scales import restrict_block_scales, round_up_to_digits
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec

int2, int3 = dtype_named("int2"), dtype_named("int3")
LINEAR, PER_CHANNEL = WeightLayout("linear", (32, 96)), PerChannel(0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYERS),
    st.sampled_from([int2, int3, int4, int4.strict, int8, uint4]),
    st.booleans(),
    st.integers(0, 50),
    st.sampled_from([3, 50]),
    st.sampled_from([0, 3]),
    st.sampled_from(["search", "fixed"]),
)
def test_weights_are_on_the_grid_and_no_unit_is_worse(
    layer: tuple[WeightLayout, Granularity],
    dtype: DType,
    symmetric: bool,
    seed: int,
    rows: int,
    held_back: int,
    scales: gptq.Scales,
) -> None:
    spec = Spec(dtype, layer[1], symmetric)
    problem = problem_of(layer[0], spec, seed=seed, weights=seed, rows=rows, held_back=held_back)
    found = gptq.solve(problem, scales=scales)
    assert found.weight is not None
    stored = problem.layout.from_matrix(found.weight).numpy()
    assert np.array_equal(found.encoding.fake_quantize(stored), stored)
    if scales == "fixed":
        assert found.encoding == problem.encoding
    nearest = seq_mse.fake_quantize(problem, problem.encoding)
    judged = (problem.held_back or problem).centered()
    gain = judged.errors(nearest) - judged.errors(found.weight)
    unit = gptq.units_of(torch.from_numpy(problem.layout.cells(problem.encoding)))
    per_unit = torch.zeros(unit.numel()).index_add_(0, unit.flatten(), gain.flatten())
    assert (per_unit >= -1e-5 * float(judged.energy.sum())).all()
    assert found.error_after <= found.error_before + 1e-6


@pytest.mark.parametrize(("dtype", "share"), [(int3, 0.5), (int4, 0.52), (int8, 1.0)])
def test_unseen_data_has_a_smaller_error_than_with_other_methods(dtype: DType, share: float) -> None:
    seen, unseen = (problem_of(LINEAR, Spec(dtype, PER_CHANNEL), seed=seed) for seed in (0, 1))
    found = gptq.solve(seen, shift_bias=False)
    error = unseen.relative_error(found.weight)
    searched = seq_mse.fake_quantize(seen, seq_mse.solve(seen, shift_bias=False).encoding)
    assert error < share * unseen.relative_error(seq_mse.fake_quantize(seen, seen.encoding))
    assert error < (1.0 if dtype == int8 else 0.8) * unseen.relative_error(searched)
    assert error < 1.002 * unseen.relative_error(adaround.solve(seen).weight)


def test_searched_scales_are_better_than_fixed_ones_at_few_bits() -> None:
    seen, unseen = (problem_of(LINEAR, Spec(int3, PER_CHANNEL), seed=seed) for seed in (0, 1))
    fixed, searched = (gptq.solve(seen, scales=scales, shift_bias=False) for scales in gptq.SCALES[::-1])
    assert unseen.relative_error(searched.weight) < 0.9 * unseen.relative_error(fixed.weight)
    factors = searched.encoding.scale / seen.encoding.scale
    assert np.isclose(factors[:, None], gptq.FACTORS).any(-1).all()
    assert (factors < 1).any()


def test_the_order_of_the_diagonal_helps_few_outliers() -> None:
    ratios = []
    for seed in range(4):
        seen, unseen = (problem_of(LINEAR, Spec(int3, PER_CHANNEL), seed=s, weights=seed) for s in (seed, seed + 50))
        plain, ordered = (gptq.solve(seen, act_order=order, scales="fixed", sweeps=0) for order in (False, True))
        ratios.append(unseen.centered().relative_error(ordered.weight) / unseen.centered().relative_error(plain.weight))
    assert np.mean(ratios) < 0.97


@pytest.mark.parametrize("rows", [8, 20, 64])
def test_few_rows_do_not_mislead(rows: int) -> None:
    ratios = []
    for seed in range(4):
        spec = Spec(int4, PER_CHANNEL)
        seen = problem_of(LINEAR, spec, seed=seed, weights=seed, rows=rows)
        unseen = problem_of(LINEAR, spec, seed=seed + 100, weights=seed)
        nearest = unseen.relative_error(seq_mse.fake_quantize(seen, seen.encoding))
        found = gptq.solve(seen)
        unseen = replace(unseen, without_mean=False)
        error = unseen.errors(found.weight) + unseen.count * found.bias_shift * (
            found.bias_shift - 2 * unseen.mean_error(found.weight)
        )
        ratios.append(unseen.relative(error) / nearest)
    assert np.mean(ratios) < 0.95


def test_blocks_are_better_than_channels_on_unseen_data() -> None:
    unseen = problem_of(LINEAR, Spec(int3, PER_CHANNEL), seed=1)

    def error(granularity: Granularity, scale_dtype: DType | None = None) -> float:
        problem = problem_of(LINEAR, Spec(int3, granularity, scale_dtype=scale_dtype))
        return unseen.relative_error(gptq.solve(problem, shift_bias=False).weight)

    tensor, channels, blocks = error(PerTensor()), error(PER_CHANNEL), error(PerBlock(1, 16))
    assert blocks < 0.9 * channels < channels < tensor
    assert error(PerBlock(1, 16), uint4) < 0.95 * channels


def test_scales_stay_what_the_spec_can_store() -> None:
    levels = problem_of(LINEAR, Spec(int3, PerBlock(1, 16), scale_dtype=uint4))
    found = gptq.solve(levels).encoding
    assert (found.scale != levels.encoding.scale).any()
    assert np.array_equal(restrict_block_scales(found.scale, levels.spec), found.scale)
    short = problem_of(LINEAR, Spec(int3, PER_CHANNEL, scale_bits=8))
    found = gptq.solve(short).encoding
    assert (found.scale != short.encoding.scale).any()
    assert np.array_equal(round_up_to_digits(found.scale, 8), found.scale)


def test_outputs_that_share_scales_are_one_unit() -> None:
    assert gptq.units_of(torch.tensor([[[0, 1], [2, 3]], [[4, 4], [1, 5]]])).tolist() == [[0, 1], [2, 0]]
    # a chain: the first shares with the second, the second with the third
    assert gptq.units_of(torch.tensor([[[0, 1], [1, 2], [2, 3], [4, 4]]])).tolist() == [[0, 0, 0, 1]]
    for layout, granularity, units in [(*LAYERS[0], 4), (*LAYERS[2], 1), (*LAYERS[5], 3)]:
        problem = problem_of(layout, Spec(int4, granularity))
        assert int(gptq.units_of(torch.from_numpy(layout.cells(problem.encoding))).max()) + 1 == units


def test_the_mean_of_all_data_counts_the_rows_that_were_held_back() -> None:
    problem = problem_of(LINEAR, Spec(int3, PER_CHANNEL), rows=300, held_back=900)
    assert problem.held_back is not None
    for name in ("mean", "mean_quantized"):
        expected = (getattr(problem, name) + 3 * getattr(problem.held_back, name)) / 4
        torch.testing.assert_close(getattr(with_held_back(problem), name), expected)


def test_what_held_back_data_contradicts_is_not_done() -> None:
    problem = problem_of(LINEAR, Spec(int3, PER_CHANNEL), held_back=500)
    assert problem.held_back is not None
    nearest = seq_mse.fake_quantize(problem, problem.encoding)
    wish = replace(problem.held_back, linear=problem.held_back.linear.clone())
    wish.linear[:, :10] = -((nearest - problem.weight) @ problem.held_back.h)[:, :10]
    found = gptq.solve(replace(problem, held_back=wish), shift_bias=False)
    assert torch.equal(found.weight[:, :10], nearest[:, :10])
    assert np.array_equal(found.encoding.scale[:10], problem.encoding.scale[:10])
    assert (found.weight[:, 10:] != nearest[:, 10:]).any(-1).all()


def test_inputs_that_no_data_reaches_are_rounded_to_nearest() -> None:
    problem = problem_of(LINEAR, Spec(int4, PER_CHANNEL))
    h, linear = problem.h.clone(), problem.linear.clone()
    h[:, 40:50], h[:, :, 40:50], linear[:, :, 40:50] = 0, 0, 0
    found = gptq.solve(replace(problem, h=h, linear=linear), scales="fixed", shift_bias=False)
    nearest = seq_mse.fake_quantize(problem, problem.encoding)
    assert torch.equal(found.weight[..., 40:50], nearest[..., 40:50])
    assert not torch.equal(found.weight, nearest)


def test_rows_that_stand_for_their_moments_give_the_same() -> None:
    problem = problem_of(LINEAR, Spec(int4, PER_CHANNEL), rows=40)
    values, vectors = torch.linalg.eigh(problem.h[0].double())
    rows = (vectors * values.clamp(min=0).sqrt()).mT[-40:].float()[None]
    found = gptq.solve(replace(problem, h=None, x_quantized=rows), shift_bias=False)
    assert found.error_after == pytest.approx(gptq.solve(problem, shift_bias=False).error_after, rel=0.02)


@pytest.mark.parametrize(("dtype", "symmetric"), [(int4, True), (uint4, False), (int3, True), (int2, True)], ids=str)
def test_no_scale_of_a_block_could_be_much_better_for_its_codes(dtype: DType, symmetric: bool) -> None:
    problem = problem_of(LINEAR, Spec(dtype, PerBlock(1, 16), symmetric), seed=3)
    found, judged = gptq.solve(problem), problem.centered()
    assert found.weight is not None
    errors = judged.errors(found.weight)
    saved = torch.zeros_like(errors)
    for block in range(6):
        for factor in (0.9, 0.94, 0.97, 1.03, 1.06, 1.1):
            moved = found.weight.clone()
            moved[..., 16 * block : 16 * (block + 1)] *= factor
            saved = torch.maximum(saved, errors - judged.errors(moved))
    assert saved.sum() < 0.005 * errors.sum()


def test_blocks_of_a_weight_that_is_stored_inputs_first_have_the_same_scales() -> None:
    """Where the scales of a block stand beside those of the other outputs."""
    rows = problem_of(WeightLayout("linear", (300, 96)), Spec(int4, PerBlock(1, 16)), seed=3)
    turned = replace(
        rows.encoding, scale=rows.encoding.scale.T, zero_point=np.asarray(rows.encoding.zero_point).T, axis=0
    )
    columns = replace(
        rows, layout=WeightLayout("linear", (96, 300), 1, 1, 0), spec=Spec(int4, PerBlock(0, 16)), encoding=turned
    )
    one, other = (gptq.solve(problem) for problem in (rows, columns))
    assert one.weight is not None
    assert other.weight is not None
    torch.testing.assert_close(one.weight, other.weight)
    np.testing.assert_allclose(one.encoding.scale, other.encoding.scale.T, rtol=1e-6)
