"""Fake quantization in PyTorch of values that no module owns: bit for bit that of the encoding, in fewer steps."""

import numpy as np
import pytest
import torch

from qsdk import Encoding
from qsdk.algorithms.graph_in_torch.run_graph import fake_quantize
from qsdk.core.numerics import dtypes


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint4", "int16", "int32", "float8e4m3fn"])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_it_is_that_of_the_encoding(dtype: str, axis: int | None):
    rng, kind = np.random.default_rng(0), getattr(dtypes, dtype)
    x = (rng.integers(-400, 400, (6, 6, 5)) * 0.25).astype(np.float32)  # many ties
    count = 1 if axis is None else 6
    zero = rng.integers(0, 8, count) if dtype in ("uint8", "int8", "uint4", "int16") else np.zeros(count, int)
    encoding = Encoding(kind, rng.choice([0.5, 0.1, 0.37], count), zero, axis)
    given = torch.from_numpy(x.copy())
    np.testing.assert_array_equal(fake_quantize(given, encoding).numpy(), encoding.fake_quantize(x))
    assert np.array_equal(given.numpy(), x)
