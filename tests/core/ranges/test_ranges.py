"""Ranges: from observed minima and maxima to scales and zero points. Numbers behind `behaviour` are the reference's."""

import math

import numpy as np
import pytest
from strategies import MINIFLOATS

from qsdk import CalibrationError, ConfigError, Encoding, float16, int2, int4, int8, int16, uint4, uint8, uint16
from qsdk.core.numerics.block_scales import round_up_to_digits
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import SMALLEST_SCALE, Range, encoding_from_range, range_of

ASYMMETRIC = Spec(uint8, symmetric=False)
SYMMETRIC = Spec(int8)
EPS = float(np.finfo(np.float32).eps)


def calibrated(x, spec: Spec) -> Encoding:
    return encoding_from_range(range_of(x, spec), spec)


def ends(encoding: Encoding) -> list[float]:
    return [*encoding.low.ravel().tolist(), *encoding.high.ravel().tolist()]


def between(low: float, high: float, spec: Spec) -> Encoding:
    return encoding_from_range(Range(np.float32([low]), np.float32([high])), spec)


# scale and range


def test_an_asymmetric_range_gives_scale_and_zero_point():
    encoding = calibrated(np.arange(0, 26, 0.5), ASYMMETRIC)
    assert ends(encoding) == pytest.approx([0.0, 25.5], rel=1e-7)
    assert encoding.scale.tolist() == pytest.approx([0.1], rel=1e-7)


def test_a_symmetric_range_has_254_or_255_steps():
    x = np.arange(0, 26, 0.5)
    assert ends(calibrated(x, Spec(int8.strict))) == pytest.approx([-25.5, 25.5], rel=1e-7)
    assert ends(calibrated(x, SYMMETRIC)) == pytest.approx([-25.7007866, 25.5], rel=1e-7)


@pytest.mark.parametrize(("constant", "expected"), [(3.0, [0.0, 3.0]), (-3.0, [-3.0, 0.0])])
def test_the_range_of_a_constant_reaches_to_zero(constant: float, expected: list[float]):
    encoding = calibrated(np.full(7, constant), ASYMMETRIC)
    assert ends(encoding) == pytest.approx(expected, rel=1e-7)
    assert encoding.fake_quantize([constant]).tolist() == pytest.approx([constant], rel=1e-7)


def test_a_tensor_of_zeros_has_an_encoding():
    assert ends(calibrated(np.zeros(5), ASYMMETRIC)) == [0.0, 255 * EPS]
    assert ends(calibrated(np.zeros(5), SYMMETRIC)) == [-128 * EPS, 127 * EPS]
    assert pytest.approx(3.0398e-5, rel=1e-4) == 255 * EPS


def test_a_range_around_zero_keeps_zero_exact():
    x = np.array([-1.0, 0.5])
    asymmetric = calibrated(x, ASYMMETRIC)
    assert asymmetric.scale.tolist() == pytest.approx([0.0058823530], rel=2e-7)
    assert asymmetric.zero_point.tolist() == [170]
    assert ends(asymmetric) == pytest.approx([-1.0, 0.5], rel=1e-6)
    assert calibrated(x, SYMMETRIC).scale.tolist() == [0.0078125]
    assert calibrated(x, Spec(int4)).scale.tolist() == [0.125]


def test_a_range_above_zero_is_extended_to_zero():
    for encoding in (calibrated([0.2, 1.0], ASYMMETRIC), between(0.2, 1.0, ASYMMETRIC)):
        assert ends(encoding) == pytest.approx([0.0, 1.0], rel=1e-6)
        assert encoding.scale.tolist() == pytest.approx([0.0039216], rel=1e-5)
        assert encoding.zero_point.tolist() == [0]
    below = between(-1.0, -0.2, ASYMMETRIC)
    assert (ends(below)[1], below.zero_point.tolist()) == (0.0, [255])


def test_strict_symmetric_never_uses_the_lowest_integer():
    encoding = calibrated([-1.0, 0.5], Spec(int8.strict))
    assert encoding.scale.tolist() == pytest.approx([1 / 127], rel=1e-7)
    assert encoding.quantize([-1.0, -5.0, 1.0, 5.0]).tolist() == [-127, -127, 127, 127]


@pytest.mark.parametrize(("largest", "scale"), [(0.9, 2.0**-7), (0.992, 2.0**-7), (0.995, 2.0**-6)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_power_of_two_scale_is_rounded_up(largest: float, scale: float, sign: int):
    encoding = calibrated([0.0, sign * largest], Spec(int8.strict, scale_bits=1))
    assert encoding.scale.tolist() == [scale]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerBlock(1, 2)], ids=str)
def test_a_range_that_is_not_finite_is_refused(bad: float, granularity):
    x = np.ones((2, 3))
    x[1, 2] = bad
    with pytest.raises(CalibrationError, match="the data holds NaN or an infinity"):
        range_of(x, Spec(int8, granularity))


def test_a_float64_beyond_float32_is_refused_too():
    with pytest.raises(CalibrationError, match="the data holds NaN or an infinity"):
        range_of(np.array([1e300]), SYMMETRIC)


# quantize and dequantize


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerChannel(1), PerBlock(1, 2)], ids=str)
def test_quantize_then_dequantize_is_fake_quantize(granularity):
    x = np.random.default_rng(4).normal(size=(3, 5))
    for spec in (Spec(uint8, granularity, symmetric=False), Spec(int4, granularity)):
        encoding = calibrated(x, spec)
        assert encoding.dequantize(encoding.quantize(x)).tobytes() == encoding.fake_quantize(x).tobytes()


# symmetric and asymmetric


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [(0.0, 1.0, 1 / 255, 0), (0.2, 1.0, 1 / 255, 0), (-1.0, 1.0, 1 / 127, 128), (-1.0, 0.5, 1 / 128, 128)],
)
def test_unsigned_symmetric_uses_the_whole_grid_or_its_middle(low, high, scale: float, zero_point: int):
    encoding = between(low, high, Spec(uint8))
    assert encoding.scale.tolist() == pytest.approx([scale], rel=1e-6)
    assert encoding.zero_point.tolist() == [zero_point]


@pytest.mark.parametrize("dtype", [int2, int4, int8, uint4, uint8, int16, uint16, DTYPES["uint5"]], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_bits", [None, 1, 5, 8, 11])
def test_a_fixed_range_of_shares_has_a_whole_number_of_steps(dtype, symmetric: bool, scale_bits):
    """Also for who takes the whole part of `1 / scale` in float32; and 1 is one of the values, to half a step."""
    encoding = between(0.0, 1.0, Spec(dtype, symmetric=symmetric, scale_bits=scale_bits, fixed_range=(0.0, 1.0)))
    steps = np.float32(1) / encoding.scale[0]
    nearest = np.rint(1.0 / np.float64(encoding.scale[0]))
    assert encoding.high[0] + encoding.scale[0] / 2 >= 1.0
    if scale_bits is None or nearest == dtype.hi - encoding.zero_point[0]:
        assert np.floor(steps) == nearest
    mantissa = np.frexp(np.float64(encoding.scale[0]))[0] * 2.0 ** (scale_bits or 24)
    assert mantissa == np.rint(mantissa)


@pytest.mark.parametrize("dtype", [int2, int4, int8, uint4, uint8, uint16, DTYPES["uint5"]], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_bits", [None, 1, 5])
def test_the_grid_covers_the_range(dtype, symmetric: bool, scale_bits):
    rng = np.random.default_rng(8)
    for _ in range(50):
        low, high = np.sort(rng.normal(size=2))
        encoding = between(low, high, Spec(dtype, symmetric=symmetric, scale_bits=scale_bits))
        # rounding the zero point moves an asymmetric grid by up to half a step
        step = 0.0 if symmetric else encoding.scale[0] / 2
        assert encoding.low[0] <= low + step + abs(low) * 1e-6
        assert encoding.high[0] >= high - step - abs(high) * 1e-6


@pytest.mark.parametrize("dtype", [int4, int8, int16], ids=str)
def test_a_symmetric_scale_is_the_smallest_that_covers(dtype):
    for low, high in ((-1.0, 0.9), (-1.0, 1.0), (-0.3, 1.0)):
        scale = between(low, high, Spec(dtype)).scale[0]
        assert scale == pytest.approx(max(high / dtype.hi, low / dtype.lo), rel=2e-7)


@pytest.mark.parametrize("exponent", [-20, -7, 0, 5, 60])
def test_powers_of_two_stay_and_what_is_above_is_rounded_up(exponent: int):
    spec = Spec(int2, scale_bits=1)
    scale = np.float32(2.0**exponent)
    assert between(0.0, scale, spec).scale.tolist() == [scale]
    assert between(0.0, np.nextafter(scale, np.float32(np.inf)), spec).scale.tolist() == [2 * scale]


@pytest.mark.parametrize("bits", [1, 2, 5, 12, 24])
def test_short_scales_are_the_next_ones_with_so_many_digits(bits: int):
    scale = np.float32(2.0) ** np.random.default_rng(bits).uniform(-100, 100, 2000).astype(np.float32)
    short = round_up_to_digits(scale, bits)
    mantissa, exponent = np.frexp(short.astype(np.float64))
    # of float16's digits, or fewer, they are float16 numbers: below its smallest normal one, steps stay as long
    place = exponent - bits if bits not in range(2, 12) else np.maximum(exponent - bits, -24)
    digits = np.ldexp(mantissa, exponent - place)
    assert (digits == np.rint(digits)).all()
    # one step of the last digit less would lie below
    assert ((short >= scale) & (np.ldexp(digits - 1, place) < scale)).all()
    assert round_up_to_digits(short, bits).tolist() == short.tolist()
    largest = np.array([np.finfo(np.float32).max], np.float32)
    assert np.isfinite(round_up_to_digits(largest, bits)).all()


@pytest.mark.parametrize("bits", [0, 25])
def test_digits_that_float32_does_not_have_are_refused(bits: int):
    with pytest.raises(ConfigError, match=f"scale_bits={bits} is no number of digits"):
        Spec(int8, scale_bits=bits)


def test_asymmetric_power_of_two():
    encoding = between(-1.0, 0.5, Spec(uint8, symmetric=False, scale_bits=1))
    assert (encoding.scale.tolist(), encoding.zero_point.tolist()) == ([2.0**-7], [128])


@pytest.mark.parametrize("spec", [ASYMMETRIC, SYMMETRIC, Spec(uint8), Spec(int2, scale_bits=1)], ids=str)
def test_the_widest_range_has_a_finite_scale(spec: Spec):
    largest = float(np.finfo(np.float32).max)
    encoding = between(-largest, largest, spec)
    assert np.isfinite(encoding.scale).all()
    assert encoding.fake_quantize([0.0]).tolist() == [0.0]


@pytest.mark.parametrize("tiny", [1e-12, 1e-38, 1e-45])
def test_scales_never_fall_below_epsilon(tiny: float):
    assert between(-tiny, tiny, SYMMETRIC).scale.tolist() == [SMALLEST_SCALE]
    assert between(-tiny, tiny, ASYMMETRIC).scale.tolist() == [SMALLEST_SCALE]
    assert SMALLEST_SCALE == EPS


@pytest.mark.parametrize("dtype", MINIFLOATS, ids=str)
def test_minifloats_reach_their_largest_finite_value_at_the_end_of_the_range(dtype):
    encoding = between(-3.0, 2.0, Spec(dtype))
    assert encoding.scale.tolist() == [np.float32(3.0 / dtype.hi)]
    assert encoding.zero_point.tolist() == [0]
    assert encoding.fake_quantize([-3.0]).tolist() == pytest.approx([-3.0], rel=1e-6)
    two = between(-3.0, 2.0, Spec(dtype, scale_bits=1))
    assert two.scale.tolist() == [2.0 ** math.ceil(math.log2(3.0 / dtype.hi))]


def test_a_float_dtype_has_no_encoding():
    with pytest.raises(CalibrationError, match="float16 has no scale"):
        between(-1.0, 1.0, Spec(float16))


# observing


@pytest.mark.parametrize("axis", [1, -2])
def test_per_channel_ranges(axis: int):
    x = np.arange(24.0).reshape(2, 3, 4) - 10
    found = range_of(x, Spec(int8, PerChannel(axis)))
    assert found.low.tolist() == [-10.0, -6.0, -2.0]
    assert found.high.tolist() == [5.0, 9.0, 13.0]
    assert found.low.dtype == np.float32


@pytest.mark.parametrize("axis", [1, -1])
def test_per_block_ranges_with_a_short_last_block(axis: int):
    found = range_of([[1, -2, 3, 4, -5], [6, 7, -8, 9, 10]], Spec(int8, PerBlock(axis, 2)))
    assert found.low.tolist() == [[-2, 3, -5], [6, -8, 10]]
    assert found.high.tolist() == [[1, 4, -5], [7, 9, 10]]


def test_a_block_over_the_full_axis_is_one_range_there():
    x = np.random.default_rng(2).normal(size=(3, 7))
    block, channel = range_of(x, Spec(int8, PerBlock(1, 7))), range_of(x, Spec(int8, PerChannel(0)))
    assert block.low.shape == (3, 1)
    assert block.low.ravel().tolist() == channel.low.tolist()
    assert block.high.ravel().tolist() == channel.high.tolist()


def test_per_tensor_ranges_have_one_element():
    for x in (5.0, [5.0], np.full((2, 2), 5.0)):
        found = range_of(x, SYMMETRIC)
        assert (found.low.tolist(), found.high.tolist()) == ([5.0], [5.0])


def test_channels_of_a_vector_are_its_elements():
    found = range_of([1.0, -2.0], Spec(int8, PerChannel(0)))
    assert found.low.tolist() == found.high.tolist() == [1.0, -2.0]


def test_granularities_reach_the_encoding():
    x = np.random.default_rng(5).normal(size=(4, 6))
    block = calibrated(x, Spec(int4, PerBlock(1, 4)))
    assert (block.axis, block.block_size, block.scale.shape) == (1, 4, (4, 2))
    channel = calibrated(x, Spec(int4, PerChannel(-1)))
    assert (channel.axis, channel.block_size, channel.scale.shape) == (-1, None, (6,))


@pytest.mark.parametrize("granularity", [PerChannel(2), PerChannel(-3), PerBlock(2, 2)], ids=str)
def test_an_axis_that_the_data_lacks_is_named(granularity):
    message = rf"axis {granularity.axis} is outside a tensor of shape \(2, 3\); name one of its axes"
    with pytest.raises(CalibrationError, match=message):
        range_of(np.zeros((2, 3)), Spec(int8, granularity))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_an_empty_tensor_has_no_range(shape):
    with pytest.raises(CalibrationError, match="there is no range in an empty tensor; give data with at least one"):
        range_of(np.zeros(shape), SYMMETRIC)


@pytest.mark.parametrize("ends", [(np.nan, 1.0), (0.0, np.nan), (-np.inf, 1.0), (0.0, np.inf)])
def test_a_range_must_be_finite(ends: tuple[float, float]):
    with pytest.raises(CalibrationError, match="a range must be finite"):
        between(*ends, ASYMMETRIC)


def test_a_range_must_be_the_right_way_round():
    with pytest.raises(CalibrationError, match="a range must have its minimum below its maximum"):
        between(0.5, 0.2, ASYMMETRIC)


def test_merging_covers_both():
    left, right = Range(np.float32([0, -1]), np.float32([1, 2])), Range(np.float32([-3, 0]), np.float32([0, 5]))
    assert left.merge(right).low.tolist() == [-3, -1]
    assert left.merge(right).high.tolist() == [1, 5]


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_min_max_over_batches_is_min_max_over_all(pieces: int):
    x = np.random.default_rng(6).normal(size=(10, 3))
    found = [range_of(part, Spec(int8, PerChannel(1))) for part in np.array_split(x, pieces)]
    merged = found[0]
    for other in found[1:]:
        merged = merged.merge(other)
    assert merged.low.tolist() == x.astype(np.float32).min(0).tolist()
    assert merged.high.tolist() == x.astype(np.float32).max(0).tolist()
