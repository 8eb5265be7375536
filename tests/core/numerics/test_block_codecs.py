"""Blocks of narrow floats, bit for bit those of compressed-tensors' and torchao's own codecs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from fetch import TORCHAO, fetch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk.core.numerics import affine
from qsdk.core.numerics.block_scales import float8_scales, shared_exponents
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, BlockFormat, float4e2m1, float8e4m3fn, int8
from qsdk.core.numerics.spec import PerBlock, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of
from torch_bridge.quantizers.quantizer import fake_quantize_dynamic_blocks

NAMES = ("nvfp4", "mxfp4", "mxfp8")
#: ties of float4, ends of grids, zeros, subnormals
SPECIAL = [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 448.0, 464.0, 2.0**-126, 1e-40, 2.0**-133]


@st.composite
def matrices(draw, length: int):
    """Matrices of ordinary numbers and of those on ties and ends, rows and single ones scaled by powers of two."""
    source = np.random.default_rng(draw(st.integers(0, 10**6)))
    x = source.normal(size=(6, length)).astype(np.float32)
    x[1::2] = source.choice(np.float32(SPECIAL), (3, length)) * source.choice(np.float32([-1, 1]), (3, length))
    x *= np.float32(2.0) ** source.integers(-draw(st.integers(0, 100)), draw(st.integers(1, 60)), (6, 1))
    x[:3] *= np.float32(2.0) ** source.integers(-draw(st.integers(0, 30)), 1, (3, length))
    return x.astype(np.float32)


def arguments(name: str, part: str):
    return getattr(preset_name_to_scheme(name.upper(), ["Linear"]), part)


def of_weight(x: np.ndarray, form: BlockFormat):
    spec = Spec(form.dtype, PerBlock(1, form.block_size), scale_dtype=form.scale_dtype)
    return encoding_from_range(range_of(x, spec), spec)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(x=matrices(64))
def test_scales_and_values_of_weights_are_those_of_compressed_tensors(name: str, x: np.ndarray):
    form, given_args = BLOCK_FORMATS[name], arguments(name, "weights")
    values = torch.from_numpy(x)
    blocks = values.unflatten(-1, (-1, form.block_size))
    divisor = generate_gparam(values.min(), values.max()) if name == "nvfp4" else None
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), given_args, global_scale=divisor)
    encoding = of_weight(x, form)
    if name == "nvfp4":
        parts = float8_scales(encoding)
        assert parts is not None
        assert np.array_equal(parts.codes.astype(np.float32), scale.numpy())
        # the divisor that is read off the scales may be a neighbour with which all of them are the same
        assert (scale.numpy() / divisor.numpy()).tolist() == encoding.scale.tolist()
    else:
        assert np.array_equal(scale.numpy(), encoding.scale)
    expected = fake_quantize(values, scale, zero_point, given_args, global_scale=divisor)
    assert np.array_equal(encoding.fake_quantize(x), expected.numpy())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(x=matrices(64), reach=st.sampled_from([1.0, 0.3, 7.0]))
def test_values_of_activations_are_those_of_compressed_tensors(name: str, x: np.ndarray, reach: float):
    """Also where they are larger or smaller than those of the calibration."""
    form, given_args, values = BLOCK_FORMATS[name], arguments(name, "input_activations"), torch.from_numpy(x)
    peak = (values.abs().max() * reach).reshape(1)
    divisor = generate_gparam(-peak, peak) if name == "nvfp4" else None
    scale, zero_point = compute_dynamic_scales_and_zp(values, given_args, torch.nn.Identity(), global_scale=divisor)
    expected = fake_quantize(values, scale, zero_point, given_args, global_scale=divisor)
    found = fake_quantize_dynamic_blocks(values, form, peak if name == "nvfp4" else None)
    assert torch.equal(found, expected)


@given(st.floats(0, 2.0**126, width=32), st.sampled_from([float4e2m1, float8e4m3fn, int8]))
def test_both_arithmetics_have_the_same_powers_of_two(peak: float, dtype):
    in_numpy = shared_exponents(np.float32([peak]), dtype)
    bits = 0x7F800000
    in_torch = affine.power_of_two_scale(
        torch.tensor([peak]), dtype, lambda x: (x.view(torch.int32) & bits).view(torch.float32)
    )
    assert in_numpy.tolist() == in_torch.tolist()
    assert np.frexp(in_numpy)[0].tolist() == [0.5]


@settings(max_examples=30)
@given(x=matrices(32))
def test_mxint8_is_an_integer_of_64ths_times_a_power_of_two(x: np.ndarray):
    """OCP MX 1.0, section 5.3.4: the element is a two's complement number with 6 binary places."""
    found = fake_quantize_dynamic_blocks(torch.from_numpy(x), BLOCK_FORMATS["mxint8"], None).numpy()
    peak = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    power = 2.0 ** (np.frexp(peak)[1] - 1 - 6.0)
    expected = np.clip(np.rint(x / power), -128, 127) * power
    usual = peak[:, 0] > 2.0**-110
    assert np.array_equal(found[usual], expected[usual])
    assert np.array_equal(found, of_weight(x, BLOCK_FORMATS["mxint8"]).fake_quantize(x))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_last_block_that_is_shorter_has_its_own_scale(name: str):
    form, x = BLOCK_FORMATS[name], torch.randn(3, 2, 41, generator=torch.Generator().manual_seed(0))
    peak = x.abs().max().reshape(1) if name == "nvfp4" else None
    found = fake_quantize_dynamic_blocks(x, form, peak)
    for start in range(0, 41, form.block_size):
        alone = x[..., start : start + form.block_size]
        assert torch.equal(found[..., start : start + form.block_size], fake_quantize_dynamic_blocks(alone, form, peak))
    weight = x[:, 0].numpy()
    assert of_weight(weight, form).scale.shape == (3, -(-41 // form.block_size))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_is_not_a_number_stays_in_its_block_and_infinity_is_the_largest(name: str):
    form = BLOCK_FORMATS[name]
    x = torch.ones(2, 2 * form.block_size)
    x[0, 1] = float("nan")
    peak = torch.ones(1) if name == "nvfp4" else None
    found = fake_quantize_dynamic_blocks(x, form, peak)
    assert found[0, 1].isnan()
    assert torch.equal(found[1], x[1])
    assert torch.equal(found[0, form.block_size :], x[0, form.block_size :])
    x[0, 1] = float("inf")
    found = fake_quantize_dynamic_blocks(x, form, peak)
    assert not found.isnan().any()
    assert found[0, 1] == (1 if name == "nvfp4" else float("inf"))  # nvfp4: the largest of the calibration


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_gradients_pass_straight_through(name: str):
    form = BLOCK_FORMATS[name]
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gradient = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    found = fake_quantize_dynamic_blocks(x, form, x.detach().abs().max().reshape(1) if name == "nvfp4" else None)
    (found * gradient).sum().backward()
    assert not torch.equal(found, x)
    assert torch.equal(x.grad, gradient)


TORCHAO_CODES = """
import sys
import numpy as np
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

x = torch.from_numpy(np.load(sys.argv[1]))
found = {}
for name, dtype, mode in (
    ("mxfp4", torch.float4_e2m1fn_x2, "EVEN"),
    ("mxfp8", torch.float8_e4m3fn, "RCEIL"),
):
    made = MXTensor.to_mx(x, dtype, 32, ScaleCalculationMode[mode])
    found[name] = made.dequantize(torch.float32).numpy()
    found[f"{name}_scale"] = made.scale.view(torch.uint8).numpy()
x = torch.from_numpy(np.load(sys.argv[3]))
made = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=x.abs().max() / (448 * 6))
found["nvfp4"] = made.dequantize(torch.float32).numpy()
found["nvfp4_scale"] = made.scale.float().numpy()
np.savez(sys.argv[2], **found)
"""


@pytest.mark.slow
def test_codes_are_those_of_torchao(tmp_path: Path):
    """Its mode EVEN for MXFP4, RCEIL for MXFP8 and NVFP4 with a scale for the tensor.

    NVFP4 multiplies by a rounded reciprocal there, so that a value beside a tie may have another code, and scales
    beside a tie too: few of either.
    """
    x = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    x *= np.float32(2.0) ** np.random.default_rng(1).integers(-20, 20, (512, 1)).astype(np.float32)
    x[3], x[4, :32] = 0, 0
    plain = np.random.default_rng(2).normal(size=(512, 1024)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "plain.npy", plain)
    paths = os.pathsep.join([str(fetch(TORCHAO)), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TORCHAO_CODES, str(tmp_path / "x.npy"), str(tmp_path / "found.npz")]
    command += [str(tmp_path / "plain.npy")]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = np.load(tmp_path / "found.npz")
    for name in ("mxfp4", "mxfp8"):
        encoding = of_weight(x, BLOCK_FORMATS[name])
        exponents = np.frexp(encoding.scale)[1] - 1 + 127
        assert np.array_equal(exponents, found[f"{name}_scale"].reshape(exponents.shape)), name
        assert np.array_equal(encoding.fake_quantize(x), found[name]), name
    encoding = of_weight(plain, BLOCK_FORMATS["nvfp4"])
    parts = float8_scales(encoding)
    assert parts is not None
    same = parts.codes.astype(np.float32) == found["nvfp4_scale"].reshape(encoding.scale.shape)
    assert same.mean() > 0.9999
    close = np.isclose(encoding.fake_quantize(plain), found["nvfp4"], rtol=1e-6, atol=0)
    assert close[np.repeat(same, 16, axis=1)].mean() > 0.99999
