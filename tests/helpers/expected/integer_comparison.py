"""Integer models against the Q/DQ models that they were made from."""

import numpy as np
import pytest
from integer_models import INT4, INT8, LEVELS, UINT4, UINT8, Net, run, simulate
from onnx import ModelProto

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings
from onnx_backend.integer.verify.measure import require_bounds
from qsdk import IntegerError

ROUNDINGS = ("half_even", "half_up", "half_away", "gemmlowp")


def exact(product, shift, rounding):
    if rounding == "gemmlowp":
        high = (product + (1 << min(shift, 31) - 1)) >> min(shift, 31)
        return exact(high, shift - 31, "half_away") if shift > 31 else high
    floor, rest = divmod(product, 1 << shift)
    half = 1 << (shift - 1)
    if rest != half:
        return floor + (rest > half)
    return {"half_up": floor + 1, "half_even": floor + floor % 2, "half_away": floor + (product > 0)}[rounding]


def compare(model: ModelProto, feeds, tolerance=0.002, **options):
    """Convert; integer model == reference at every level, in its bounds, within 1 LSB of the Q/DQ model, mostly 0."""
    before = model.SerializeToString()
    result = convert(model, **options)
    assert model.SerializeToString() == before
    assert integer_findings(result.model) == []
    reference = run_reference(result.model, feeds, every_tensor=True)
    require_bounds(result.bounds, reference)
    simulated = simulate(model, feeds)
    for level in LEVELS:
        for name, found in run(result.model, feeds, level).items():
            np.testing.assert_array_equal(found, reference[name], err_msg=f"{name} at {level}")
    for name, wanted in simulated.items():
        assert wanted.size
        steps = result.certificate["outputs"][name]["scale"] if wanted.dtype == np.float32 else 1
        lsb = np.abs(np.rint((reference[name].astype(np.float64) - wanted) / steps))
        assert lsb.max() <= 1, f"{name}: {lsb.max()} LSB"
        assert (lsb > 0).mean() <= tolerance, f"{name}: {(lsb > 0).mean()} of the elements differ"
        assert np.unique(wanted).size > 1
    return result


def grid(scale, zero, dtype=UINT8):
    """Every value of an activation's grid, in order."""
    lo, hi = {UINT8: (0, 255), INT8: (-128, 127), UINT4: (0, 15), INT4: (-8, 7)}[dtype]
    return ((np.arange(lo, hi + 1) - zero) * np.float32(scale)).astype(np.float32)


def noise(shape, size=3.0, seed=0):
    return np.random.default_rng(seed).normal(0, size, shape).astype(np.float32)


ENCODINGS = {
    "uint8": {"scale": 0.031, "zero": 119, "dtype": UINT8},
    "int8": {"scale": 0.031, "zero": -11, "dtype": INT8},
    "uint8_default": {"scale": 0.031, "zero": 0, "dtype": UINT8, "form": "output_dtype"},
    "int8_default": {"scale": 0.031, "zero": 0, "dtype": INT8, "form": "output_dtype"},
    "uint8_both": {"scale": 0.031, "zero": 7, "dtype": UINT8, "form": "both"},
}


def refused(net_or_model, *fragments, **options):
    model = net_or_model.model() if isinstance(net_or_model, Net) else net_or_model
    with pytest.raises(IntegerError) as caught:
        convert(model, **options)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)
    return str(caught.value)
