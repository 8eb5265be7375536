"""Laws of the formula: exact on rationals, equal in NumPy and PyTorch, idempotent, monotone, and 0 stays 0."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import (
    EXTREMES,
    GRANULARITIES,
    INTEGERS,
    LARGEST,
    MINIFLOATS,
    ODD_INTEGERS,
    Case,
    cases,
    exact_dequantize,
    exact_quantize,
    finite_ranges,
    make_case,
    minifloat_values,
    same_bits,
    to_float32,
)

from qsdk import Encoding, int8, uint8
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import Range, encoding_from_range

# examples are cheap, and arrays of a few hundred elements are wanted
lawful = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.data_too_large])


def elements(case: Case) -> list[tuple[float, float, int]]:
    """Every element of x with its own scale and zero point, as Python numbers."""
    scale, zero_point = case.spread(case.encoding.scale), case.spread(case.encoding.zero_point)
    triples = zip(case.x.ravel(), scale.ravel(), zero_point.ravel(), strict=True)
    return [(float(x), float(s), int(z)) for x, s, z in triples]


def in_torch(case: Case) -> np.ndarray:
    encoding = case.encoding
    where = (case.x.shape, encoding.axis, encoding.block_size)
    scale = affine.align(torch.from_numpy(encoding.scale), *where)
    zero_point = affine.align(torch.from_numpy(encoding.zero_point.astype(np.float32)), *where)
    x = torch.from_numpy(case.x)
    return affine.fake_quantize(x, scale, zero_point, encoding.dtype.lo, encoding.dtype.hi).numpy()


# the oracle itself


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(2.0**-149, LARGEST, width=32))
@lawful
def test_the_exact_quotient_is_that_of_ieee_hardware(x: float, scale: float):
    with np.errstate(over="ignore"):
        expected = np.float32(x) / np.float32(scale)
    assert to_float32(Fraction(x) / Fraction(scale)) == expected


@pytest.mark.parametrize(
    ("exact", "expected"),
    [
        (Fraction(1, 3), 11184811 * 2.0**-25),
        (1 + Fraction(1, 2**24), 1.0),
        (1 + Fraction(3, 2**24), 1 + 2.0**-22),
        (Fraction(1, 2**150), 0.0),
        (Fraction(3, 2**150), 2.0**-148),
        (Fraction(2) ** 128, math.inf),
        (-(Fraction(2) ** 128), -math.inf),
        (Fraction(2) ** 128 - Fraction(2) ** 103, math.inf),
        (Fraction(2) ** 128 - Fraction(2) ** 103 - 1, LARGEST),
    ],
)
def test_rounding_to_float32_is_half_to_even(exact: Fraction, expected: float):
    assert to_float32(exact) == expected


# the formula


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_exact_arithmetic(dtype, granularity: str):
    rng = np.random.default_rng(17)
    for filling, wild in (("random", False), ("ties", False), ("extreme", True)):
        for _ in range(3):
            case = make_case(rng, dtype, granularity, filling, wild_scales=wild)
            encoding, q = case.encoding, case.encoding.quantize(case.x)
            expected = [exact_quantize(x, s, z, dtype.lo, dtype.hi) for x, s, z in elements(case)]
            assert q.astype(int).ravel().tolist() == expected, case
            points = zip(expected, elements(case), strict=True)
            exact = np.array([exact_dequantize(v, s, z) for v, (_, s, z) in points], np.float32)
            assert same_bits(encoding.fake_quantize(case.x).ravel(), exact), case


@pytest.mark.slow
@given(cases())
@lawful
def test_exact_arithmetic_anywhere(case: Case):
    dtype = case.encoding.dtype
    expected = [exact_quantize(x, s, z, dtype.lo, dtype.hi) for x, s, z in elements(case)]
    assert case.encoding.quantize(case.x).astype(int).ravel().tolist() == expected


@pytest.mark.slow
@given(cases(wild_scales=True))
@lawful
def test_numpy_and_torch_agree_bit_for_bit(case: Case):
    assert same_bits(in_torch(case), case.encoding.fake_quantize(case.x))


@pytest.mark.slow
@given(cases())
@lawful
def test_quantize_then_dequantize_is_fake_quantize(case: Case):
    encoding = case.encoding
    y = encoding.dequantize(encoding.quantize(case.x))
    assert same_bits(encoding.fake_quantize(case.x), y)
    where = (case.x.shape, encoding.axis, encoding.block_size)
    scale = affine.align(encoding.scale, *where)
    zero_point = affine.align(encoding.zero_point.astype(np.float32), *where)
    with np.errstate(over="ignore"):
        assert same_bits(affine.fake_quantize(case.x, scale, zero_point, encoding.dtype.lo, encoding.dtype.hi), y)


@pytest.mark.slow
@given(cases())
@lawful
def test_quantized_values_are_inside_the_grid(case: Case):
    q = case.encoding.quantize(case.x).astype(int)
    assert case.encoding.dtype.lo <= q.min()
    assert q.max() <= case.encoding.dtype.hi


@pytest.mark.slow
@given(cases((*INTEGERS, *MINIFLOATS)))
@lawful
def test_idempotent(case: Case):
    once = case.encoding.fake_quantize(case.x)
    assert same_bits(case.encoding.fake_quantize(once), once)


@pytest.mark.slow
@given(cases((*INTEGERS, *MINIFLOATS), ("tensor",)))
@lawful
def test_monotone(case: Case):
    x = np.sort(case.x.ravel())
    assert (np.diff(case.encoding.quantize(x).astype(np.float32)) >= 0).all()
    assert (np.diff(case.encoding.fake_quantize(x)) >= 0).all()


@pytest.mark.slow
@given(cases(fillings=("random", "ties")))
@lawful
def test_inside_the_range_the_error_is_at_most_half_a_step(case: Case):
    encoding = case.encoding
    low, high, scale = (case.spread(v).astype(np.float64) for v in (encoding.low, encoding.high, encoding.scale))
    inside = (case.x >= low) & (case.x <= high)
    error = np.abs(encoding.fake_quantize(case.x).astype(np.float64) - case.x)
    # the quotient and the product are rounded once each
    assert (error <= scale / 2 + np.abs(case.x) * 2.0**-22)[inside].all()


def test_zero_is_exact_for_a_thousand_ranges():
    rng = np.random.default_rng(11)
    dtypes = [*INTEGERS, *MINIFLOATS]
    for _ in range(1000):
        ends = rng.normal(size=2) * 10.0 ** rng.integers(-6, 6, 2)
        dtype = dtypes[rng.integers(len(dtypes))]
        symmetric = dtype.kind == "minifloat" or bool(rng.integers(2))
        spec = Spec(dtype, symmetric=symmetric, scale_bits=1 if rng.integers(2) else None)
        encoding = encoding_from_range(Range(np.float32([ends.min()]), np.float32([ends.max()])), spec)
        assert encoding.dequantize(encoding.quantize(np.zeros(1))).tolist() == [0.0], (ends, spec)


@pytest.mark.slow
@given(finite_ranges(), st.sampled_from(INTEGERS), st.booleans(), st.sampled_from([None, 1, 7]))
@lawful
def test_any_finite_range_gives_an_encoding_that_holds_zero(ends, dtype, symmetric: bool, scale_bits):
    spec = Spec(dtype, symmetric=symmetric, scale_bits=scale_bits)
    encoding = encoding_from_range(Range(np.float32([ends[0]]), np.float32([ends[1]])), spec)
    assert encoding.fake_quantize(np.zeros(1)).tolist() == [0.0]
    assert encoding.low <= 0.0 <= encoding.high


# granularities


@pytest.mark.slow
@given(cases((*INTEGERS, *MINIFLOATS), ("channel",)))
@lawful
def test_a_block_over_the_full_axis_is_one_scale_for_the_axis(case: Case):
    per_channel = case.encoding
    assume(case.x.ndim > 1)
    # the scales of one channel, spread over the other axes, with one block along the next axis
    axis = (per_channel.axis + 1) % case.x.ndim
    shape = list(case.x.shape)
    shape[axis] = 1
    scale = case.spread(per_channel.scale).take([0], axis)
    zero_point = case.spread(per_channel.zero_point).take([0], axis)
    assert list(scale.shape) == shape
    per_block = Encoding(per_channel.dtype, scale, zero_point, axis, case.x.shape[axis])
    assert same_bits(per_block.fake_quantize(case.x), per_channel.fake_quantize(case.x))


@pytest.mark.slow
@given(cases((*INTEGERS, *MINIFLOATS), ("block",)))
@lawful
def test_blocks_of_one_are_scales_per_element(case: Case):
    encoding = case.encoding
    single = Encoding(
        encoding.dtype, case.spread(encoding.scale), case.spread(encoding.zero_point), encoding.axis, block_size=1
    )
    assert same_bits(single.fake_quantize(case.x), encoding.fake_quantize(case.x))
    scalars = [Encoding(encoding.dtype, np.array([s]), np.array([z])) for _, s, z in elements(case)]
    alone = [one.fake_quantize(x) for one, x in zip(scalars, case.x.ravel(), strict=True)]
    assert same_bits(np.array(alone, np.float32), single.fake_quantize(case.x).ravel())


@pytest.mark.slow
@given(cases((*INTEGERS, *MINIFLOATS), ("channel", "block")))
@lawful
def test_a_negative_axis_counts_from_the_end(case: Case):
    e = case.encoding
    other = e.axis - case.x.ndim if e.axis >= 0 else e.axis + case.x.ndim
    moved = Encoding(e.dtype, e.scale, e.zero_point, other, e.block_size)
    assert same_bits(moved.fake_quantize(case.x), e.fake_quantize(case.x))


def test_uneven_blocks_leave_a_short_last_one():
    encoding = Encoding(int8, np.array([[1.0, 2.0, 4.0]]), np.array([0]), axis=1, block_size=2)
    x = np.array([[9.0, 9.0, 9.0, 9.0, 9.0]])
    assert encoding.quantize(x).tolist() == [[9, 9, 4, 4, 2]]


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("shape", "x_shape", "axis", "block_size", "message"),
    [
        ((2,), (2, 3), None, None, r"shape \(2,\) is not one scale per tensor; name the channel axis"),
        ((2,), (2, 3), 1, None, r"shape \(2,\) does not fit the 3 channels \(axis 1\) of \(2, 3\)"),
        ((1, 3), (2, 3), 1, None, r"shape \(1, 3\) does not fit the 3 channels"),
        ((3,), (2, 3), 2, None, r"axis 2 is outside a tensor of shape \(2, 3\)"),
        ((1,), (), 0, None, r"axis 0 is outside a tensor of shape \(\)"),
        ((2, 1), (2, 3), 1, 2, r"shape \(2, 1\) does not fit blocks of 2 \(axis 1\) in \(2, 3\)"),
    ],
)
def test_a_scale_of_another_granularity_is_refused(make, shape, x_shape, axis, block_size, message: str):
    with pytest.raises(ValueError, match=message):
        affine.align(make(shape), x_shape, axis, block_size)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_fits_any_tensor(shape: tuple[int, ...]):
    for ones in (np.ones(shape), torch.ones(shape)):
        assert tuple(affine.align(ones, (4, 5), None, None).shape) == ()


def test_rounding_is_an_argument():
    x = np.array([0.2, 0.8, -0.2], np.float32)
    assert affine.quantize(x, 1.0, 0.0, -8, 7, rounding=np.floor).tolist() == [0, 0, -1]
    assert affine.fake_quantize(x, 0.5, 0.0, -8, 7, rounding=np.ceil).tolist() == [0.5, 1.0, 0.0]


def test_the_zero_point_is_added_after_rounding():
    # 0.5 + 3 would round to 4
    assert Encoding(uint8, np.array([1.0]), np.array([3])).quantize([0.5, 1.5, 2.5]).tolist() == [3, 5, 5]


# minifloats, by nearest value in exact arithmetic


@pytest.mark.parametrize("dtype", MINIFLOATS, ids=str)
def test_minifloats_round_to_their_nearest_value(dtype):
    grid = minifloat_values(dtype)
    rng = np.random.default_rng(1)
    for filling in ("random", "ties"):
        case = make_case(rng, dtype, "tensor", filling, shape=(400,))
        quotient = (case.x / case.encoding.scale).astype(np.float64)
        q = case.encoding.quantize(case.x).astype(np.float64)
        assert np.isin(q, grid).all()
        nearest = np.abs(grid[None] - quotient.clip(grid[0], grid[-1])[:, None]).min(1)
        assert np.array_equal(np.abs(q - quotient.clip(grid[0], grid[-1])), nearest)


@pytest.mark.parametrize("dtype", MINIFLOATS, ids=str)
def test_minifloats_saturate_to_the_largest_finite_value(dtype):
    assert dtype.hi == minifloat_values(dtype)[-1]
    assert dtype.lo == minifloat_values(dtype)[0]
    encoding = Encoding(dtype, np.array([2.0]), np.array([0]))
    assert encoding.fake_quantize([np.inf, 1e38, -np.inf]).tolist() == [2 * dtype.hi, 2 * dtype.hi, 2 * dtype.lo]


@pytest.mark.parametrize("dtype", ODD_INTEGERS, ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock(1, 3)], ids=str)
def test_odd_widths_saturate_at_their_own_grid_inside_a_wider_container(dtype, granularity):
    scale = {PerTensor(): np.ones(1), PerChannel(0): np.ones(1), PerBlock(1, 3): np.ones((1, 8))}[granularity]
    axis, size = (getattr(granularity, name, None) for name in ("axis", "size"))
    q = Encoding(dtype, scale, np.array([0]), axis, size).quantize(EXTREMES[None])
    assert q.dtype.name == dtype.container
    assert DTYPES[dtype.container].bits > dtype.bits
    assert int(q.min()) == dtype.lo
    assert int(q.max()) == dtype.hi
