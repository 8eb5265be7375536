"""Solvers on grids of narrow floats in blocks, whose values are not evenly spaced."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_problems import problem_of

from qsdk import float4e2m1, float8e4m3fn, float8e5m2
from qsdk.algorithms.solvers import adaround, gptq
from qsdk.algorithms.solvers.rounding import WeightGrid, rounded_
from qsdk.core.layers.layer_problem import WeightLayout
from qsdk.core.numerics.block_scales import float8_scales, scale_dtype_of
from qsdk.core.numerics.dtypes import BLOCK_FORMATS
from qsdk.core.numerics.encoding import storage_type
from qsdk.core.numerics.spec import PerBlock, Spec

LINEAR = WeightLayout("linear", (32, 96))
SOLVERS = {"gptq": gptq.solve, "adaround": adaround.solve}


def spec_of(name: str) -> Spec:
    form = BLOCK_FORMATS[name]
    return Spec(form.dtype, PerBlock(1, form.block_size), scale_dtype=form.scale_dtype)


def nearest(problem) -> torch.Tensor:
    stored = problem.layout.from_matrix(problem.weight).numpy()
    return problem.layout.to_matrix(torch.from_numpy(problem.encoding.fake_quantize(stored)))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_are_on_the_grid_and_outputs_nearer(solver: str, name: str) -> None:
    seen, unseen = (problem_of(LINEAR, spec_of(name), seed=seed) for seed in (0, 1))
    found = SOLVERS[solver](seen, shift_bias=False)
    stored = seen.layout.from_matrix(found.weight).numpy()
    assert np.array_equal(found.encoding.fake_quantize(stored), stored)
    assert found.error_after < 0.8 * found.error_before
    assert unseen.relative_error(found.weight) < 0.8 * unseen.relative_error(nearest(seen))
    assert scale_dtype_of(found.encoding) == seen.spec.scale_dtype


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_adaround_chooses_one_of_the_two_neighbours(name: str) -> None:
    problem = problem_of(LINEAR, spec_of(name))
    form, scale = BLOCK_FORMATS[name], np.repeat(problem.encoding.scale, BLOCK_FORMATS[name].block_size, axis=1)
    codes = (adaround.solve(problem).weight[0].numpy() / scale).astype(storage_type(form.dtype)).astype(np.float32)
    exact = (problem.weight[0].numpy() / scale).clip(form.dtype.lo, form.dtype.hi)
    levels = np.arange(1 << form.bits, dtype=np.uint8).view(storage_type(form.dtype)).astype(np.float32)
    levels = np.unique(levels[np.isfinite(levels)])
    between = (np.searchsorted(levels, exact, "left") - np.searchsorted(levels, codes, "left")).astype(int)
    assert set(between.flatten()) == {0, 1}  # a level just above, or just below


def test_gptq_keeps_the_number_that_all_scales_of_nvfp4_share() -> None:
    problem = problem_of(LINEAR, spec_of("nvfp4"))
    before, after = float8_scales(problem.encoding), float8_scales(gptq.solve(problem).encoding)
    assert before is not None
    assert after is not None
    quotients = gptq.solve(problem).encoding.scale * before.divisor
    assert np.array_equal(
        quotients.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / before.divisor,
        gptq.solve(problem).encoding.scale,
    )


FLOATS = {dtype.name: dtype for dtype in (float4e2m1, float8e4m3fn, float8e5m2)}


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=20), st.sampled_from(sorted(FLOATS)))
def test_codes_are_those_of_ml_dtypes(values: list[float], name: str) -> None:
    dtype, x = FLOATS[name], torch.tensor(values)[None, :, None]
    ends = tuple(torch.full_like(x, end) for end in (dtype.lo, dtype.hi))
    clipped = x.numpy().clip(dtype.lo, dtype.hi)
    found = rounded_(x.clone(), dtype, *ends)
    assert found.tolist() == clipped.astype(storage_type(dtype)).astype(np.float32).tolist()
    around = WeightGrid(torch.ones_like(x), *ends, dtype).around(x)
    near = 3e-7 * np.abs(clipped)
    assert (around.lowest.numpy() <= clipped + near).all()
    assert (around.highest.numpy() >= clipped - near).all()
    assert ((found == around.lowest) | (found == around.highest)).all()
