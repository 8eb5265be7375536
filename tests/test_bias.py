import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qsdk.core.bias import with_room_for
from qsdk.core.dtypes import int8, int32, uint8
from qsdk.core.encoding import Encoding

FLOATS = st.floats(-1e4, 1e4, width=32)


@given(st.lists(FLOATS, min_size=3, max_size=3), st.floats(2.0**-20, 8, width=32), st.booleans())
def test_every_bias_fits_half_of_int32_after_making_room(bias, input_scale, per_channel):
    source = Encoding(uint8, np.float32([input_scale]), 3)
    small = np.float32([1.1920929e-07, 1e-3, 0.5]) if per_channel else np.float32([1.1920929e-07])
    weight = Encoding(int8, small, 0, 0 if per_channel else None)
    roomy = with_room_for(bias, source, weight)
    steps = np.abs(np.float64(bias)) / (source.scale * roomy.scale).astype(np.float64)
    assert (steps <= 2.0**30 * (1 + 1e-6)).all()
    assert (roomy.scale >= weight.scale).all()
    if (np.abs(bias) < 2.0**29 * source.scale * 1e-7).all():
        assert roomy == weight


def test_a_bias_behind_a_channel_of_zeros_survives_its_int32_grid():
    source, weight = Encoding(uint8, np.float32([1e-4]), 0), Encoding(int8, np.float32([1.1920929e-07, 0.01]), 0, 0)
    bias = np.float32([0.75, 0.75])
    tight = Encoding(int32, source.scale * weight.scale, 0, 0)
    roomy = Encoding(int32, source.scale * with_room_for(bias, source, weight).scale, 0, 0)
    assert tight.fake_quantize(bias)[0] < 0.1
    np.testing.assert_allclose(roomy.fake_quantize(bias), bias, rtol=1e-6)
