import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsdk import Encoding, int8, int32, uint8
from qsdk.core.numerics.bias import bias_remark, with_room_for
from qsdk.core.numerics.block_scales import round_up_to_digits

FLOATS = st.floats(-1e4, 1e4, width=32)


@pytest.mark.slow
@given(
    st.lists(FLOATS, min_size=3, max_size=3),
    st.floats(2.0**-20, 8, width=32),
    st.booleans(),
    st.sampled_from([None, 1, 6]),
)
def test_every_bias_fits_half_of_int32_after_making_room(bias, input_scale, per_channel, scale_bits):
    source = Encoding(uint8, np.float32([input_scale]), 3)
    small = np.float32([1.1920929e-07, 1e-3, 0.5]) if per_channel else np.float32([1.1920929e-07])
    weight = Encoding(int8, small, 0, 0 if per_channel else None)
    roomy = with_room_for(bias, source, weight, scale_bits)
    steps = np.abs(np.float64(bias)) / (source.scale * roomy.scale).astype(np.float64)
    assert (steps <= 2.0**30 * (1 + 1e-6)).all()
    assert (roomy.scale >= weight.scale).all()
    if (np.abs(bias) < 2.0**29 * source.scale * 1e-7).all():
        assert roomy == weight
    widened = roomy.scale[roomy.scale != weight.scale]
    assert scale_bits is None or (round_up_to_digits(widened, scale_bits) == widened).all()


def test_a_bias_behind_a_channel_of_zeros_survives_its_int32_grid():
    source, weight = Encoding(uint8, np.float32([1e-4]), 0), Encoding(int8, np.float32([1.1920929e-07, 0.01]), 0, 0)
    bias = np.float32([0.75, 0.75])
    tight = Encoding(int32, source.scale * weight.scale, 0, 0)
    roomy = Encoding(int32, source.scale * with_room_for(bias, source, weight).scale, 0, 0)
    assert tight.fake_quantize(bias)[0] < 0.1
    np.testing.assert_allclose(roomy.fake_quantize(bias), bias, rtol=1e-6)


SOURCE = Encoding(uint8, np.float32([0.5]), 3)


def remark(bias, weight_scale, *, source=SOURCE):
    weight = Encoding(int8, np.float32(weight_scale), 0, None if len(weight_scale) == 1 else 0)
    return bias_remark(np.float32(bias), Encoding(int32, source.scale * weight.scale, 0, weight.axis))


def test_a_bias_that_its_grid_only_rounds_has_no_remark():
    assert remark([1.0, -2.0, 0.0], [0.01]) == ""
    assert remark([0.0, 0.0, 0.0], [0.01]) == ""  # zeros are not lost
    assert remark([1.0, 0.001, 0.0], [0.01]) == ""  # half of the values that are not 0: not most of them


def test_a_bias_that_rounds_to_zero_is_named_with_the_step_that_loses_it():
    said = remark([0.002, -0.0025, 4.0], [0.01])
    assert said.startswith("2 of 3 values round to 0 (the largest is 0.0025)")
    assert "a step is 0.005" in said
    assert 'bias="float32"' in said
    per_channel = remark([0.01, 0.01, 0.01], [1e-3, 1.0, 1.0])
    assert per_channel.startswith("2 of 3 values round to 0")


def test_a_bias_beyond_int32_is_named():
    assert remark([1.0, 3.0], [2e-9]).startswith("1 of 2 values do not fit int32 and are clipped")
    assert remark([1.0, 1.0], [2e-9]) == ""


@given(st.floats(1, 1e4, width=32), st.floats(2.0**-20, 8, width=32))
def test_room_that_was_made_for_a_bias_is_told(bias, input_scale):
    source = Encoding(uint8, np.float32([input_scale]), 3)
    weight = Encoding(int8, np.float32([1.1920929e-12, 100.0]), 0, 0)
    roomy = with_room_for([bias, 0], source, weight)
    said = bias_remark([bias, 0], Encoding(int32, source.scale * roomy.scale, 0, 0))
    assert said == "the weight's scale was raised in 1 of 2 channels, so that the bias fits int32"
