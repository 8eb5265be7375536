import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk import Encoding, int4
from qsdk.core.numerics.block_scales import TwoLevel, block_scales, split_block_scales


def blocked(scale, axis=1, block=32) -> Encoding:
    return Encoding(int4, np.asarray(scale, np.float32), np.int32(0), axis, block)


channel_scales = st.floats(2.0**-120, 2.0**100, width=32)


@pytest.mark.slow
@given(
    levels=st.lists(st.lists(st.integers(1, 16), min_size=4, max_size=4), min_size=1, max_size=4),
    channels=st.lists(channel_scales, min_size=4, max_size=4),
    transposed=st.booleans(),
)
@settings(deadline=None)
def test_factors_that_made_the_scales_are_found(levels, channels, transposed):
    made = TwoLevel(np.float32(channels[: len(levels)]).reshape(-1, 1), np.int32(levels))
    scale = block_scales(made)
    encoding = blocked(scale.T, -2) if transposed else blocked(scale)
    found = split_block_scales(encoding)
    assert found is not None
    assert found.levels.dtype == np.int32
    assert 1 <= found.levels.min() <= found.levels.max() <= 16
    assert found.channel_scale.shape == ((1, len(levels)) if transposed else (len(levels), 1))
    assert block_scales(found).tobytes() == encoding.scale.tobytes()


@pytest.mark.slow
@given(levels=st.lists(st.integers(1, 16), min_size=1, max_size=6), channel=channel_scales)
def test_factors_with_the_highest_level_come_back_as_they_were(levels, channel):
    """Calibration sets the channel's scale to a 16th of its largest block scale."""
    made = TwoLevel(np.float32([[channel]]), np.int32([[16, *levels]]))
    found = split_block_scales(blocked(block_scales(made)))
    assert found is not None
    assert found.channel_scale.tobytes() == made.channel_scale.tobytes()
    assert np.array_equal(found.levels, made.levels)


def test_channels_have_factors_of_their_own():
    found = split_block_scales(
        blocked([[0.3 * 16, 0.3], [np.float32(0.1) * np.float32(15), np.float32(0.1) * np.float32(2)]])
    )
    assert found is not None
    assert found.levels.tolist() == [[16, 1], [15, 2]]
    assert found.channel_scale[1, 0] == np.float32(0.1)


@pytest.mark.parametrize(
    ("scale", "axis", "block"),
    [
        ([[1.0, 17.0]], 1, 2),  # further apart than 16 levels
        ([[1.0, np.nextafter(np.float32(16), np.float32(17))]], 1, 2),  # one bit off
        ([[1.0, 0.311], [0.16, 0.01]], 1, 2),  # the second channel alone would do
        ([1.0, 0.5], 0, None),
        ([1.0], None, None),
    ],
)
def test_what_has_no_factors(scale, axis, block):
    assert split_block_scales(blocked(scale, axis, block)) is None


def test_scales_near_the_smallest_float():
    """A 16th of the largest is no float any more; a smaller divisor still is."""
    tiny = np.float32(1e-45)
    found = split_block_scales(blocked([[tiny * 3, tiny]]))
    assert found is not None
    assert block_scales(found).tobytes() == np.float32([[tiny * 3, tiny]]).tobytes()
    assert found.levels.tolist() == [[3, 1]]
