"""Quantizers of float16, bfloat16 and float64 tensors: the formula in float32, rounded once to the tensor's dtype."""

from fractions import Fraction

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from strategies import exact_dequantize, exact_quantize, nearest_float
from torch import Tensor, nn

from qsdk import DType, Encoding
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.numerics.stored_codes import reason_codes_get_lost
from qsdk.core.planning.plan import Decision
from torch_bridge.quantizers import quantizer as module
from torch_bridge.quantizers.quantizer import Quantizer

HALVES = {torch.float16: (11, -24, 16), torch.bfloat16: (8, -133, 128)}  # digits, least exponent, limit
OTHERS = (*HALVES, torch.float64)
GRIDS = ("int4", "int8", "uint8", "int16", "uint16")


def quantizer_of(dtype: str, scale: float | np.ndarray, zero_point: int = 0, *, weight: bool = False) -> Quantizer:
    """A quantizer by itself, with this encoding."""
    values = np.array(scale, np.float32)
    granularity = PerTensor() if values.ndim == 0 else PerChannel(0)
    spec = Spec(DTYPES[dtype], granularity, symmetric=weight)
    decision = Decision("self:weight", "Gemm", "weight", spec, "")
    owner = nn.Module()
    quantizer = Quantizer(decision, owner, "qsdk_weight", owner)
    axis = None if values.ndim == 0 else 0
    points = np.full(values.shape, zero_point, np.int32)
    quantizer.set_encoding(Encoding(DTYPES[dtype], values, points, axis))
    return quantizer


def floats(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Finite values of a dtype, with many near the ties of a scale around 1."""
    near = st.tuples(st.integers(-600, 600), st.integers(-4, 4)).map(lambda at: at[0] / 2 + at[1] * 2**-9)
    anywhere = st.floats(-60000, 60000)
    return st.one_of(near, anywhere).map(lambda x: float(torch.tensor(x, dtype=torch.float64).to(dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(data=st.data())
def test_values_of_half_tensors_are_those_of_exact_arithmetic(dtype: torch.dtype, data: st.DataObject):
    name = data.draw(st.sampled_from(GRIDS))
    grid: DType = DTYPES[name]
    lo, hi = int(grid.lo), int(grid.hi)
    zero_point = data.draw(st.integers(lo, hi))
    scale = float(np.float32(data.draw(st.one_of(st.sampled_from([1.0, 0.5, 0.1]), st.floats(1e-6, 100)))))
    values = data.draw(st.lists(floats(dtype), min_size=1, max_size=8))
    found = quantizer_of(name, scale, zero_point)(torch.tensor(values, dtype=dtype))
    assert found.dtype == dtype
    for x, y in zip(values, found.tolist(), strict=True):
        level = exact_dequantize(exact_quantize(x, scale, zero_point, lo, hi), scale, zero_point)
        assert y == nearest_float(Fraction(level), *HALVES[dtype]), x


@pytest.mark.parametrize("name", ["uint8", "int8", "uint16", "int16"])
def test_float16_tensors_are_those_of_the_runtimes_float16_nodes(name: str):
    """With scales that float16 holds: every float16 value up to 2048, by bits, the two zeros counted as one."""
    x = np.arange(0, 0x6800, dtype=np.uint16).view(np.float16)
    x = np.concatenate([x, -x])
    grid = DTYPES[name]
    for scale, zero_point in ((np.float16(0.0171), int(grid.lo) + 3), (np.float16(0.5), 0), (np.float16(6e-5), 1)):
        expected = _runtime(name, x, scale, zero_point)
        found = quantizer_of(name, float(scale), zero_point)(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(
            (found + np.float16(0)).view(np.uint16), (expected + np.float16(0)).view(np.uint16)
        )


def _runtime(name: str, x: np.ndarray, scale: np.float16, zero_point: int) -> np.ndarray:
    kind = getattr(TensorProto, name.upper())
    stored = [
        helper.make_tensor("s", TensorProto.FLOAT16, (), [scale]),
        helper.make_tensor("z", kind, (), [zero_point]),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [None]) for n in "xy"]
    graph = helper.make_graph(nodes, "pair", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("scale", [0.1, np.array([0.1, 0.3], np.float32)], ids=["per tensor", "per channel"])
def test_float64_tensors_get_the_values_that_the_file_computes(scale: float | np.ndarray):
    """A value beside a tie that float64 tells from it and float32 does not goes where the file's float32 sends it."""
    quantizer = quantizer_of("int8", scale, weight=True)
    ties = torch.tensor([[2.5, -3.5, 0.5]] * 2, dtype=torch.float64) * torch.tensor(scale, dtype=torch.float64).reshape(
        -1, 1
    )
    x = torch.cat([ties * (1 + side * 1e-12) for side in (-1, 0, 1)], 1)
    assert torch.equal(quantizer(x), quantizer(x.float()).double())
    in_float64 = (x / quantizer.scale_and_zero_point()[0].double().reshape(-1, 1)).round()
    in_float32 = (x.float() / quantizer.scale_and_zero_point()[0].reshape(-1, 1)).round()
    assert not torch.equal(in_float64, in_float32.double()), "the values tell the two apart"


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_gradients_pass_straight_through_in_the_dtype_of_the_tensor(dtype: torch.dtype):
    quantizer = quantizer_of("int4", 0.25, weight=True)
    gradients = {}
    for kind in (torch.float32, dtype):
        x = torch.linspace(-3, 3, 31).to(dtype).to(kind).requires_grad_()
        quantizer(x).backward(torch.linspace(0, 1, 31).to(dtype).to(kind))
        assert x.grad is not None
        assert x.grad.dtype == kind
        gradients[kind] = x.grad
    assert torch.equal(gradients[dtype], gradients[torch.float32].to(dtype))
    assert 0 < int((gradients[dtype] == 0).sum()) < 31


LOST = {torch.float16: ("int16",), torch.bfloat16: ("int16", "uint8"), torch.float64: ()}


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8", "int16"])
def test_codes_survive_that_their_values_are_stored_in_the_dtype(dtype: torch.dtype, name: str):
    """Every code at many scales, stored and quantized again; the unsigned ones as far from the zero point as can be."""
    grid = DTYPES[name]
    zero_point = 0 if grid.signed else int(grid.hi)
    scales = torch.rand(2000, generator=torch.Generator().manual_seed(0)) + 0.02
    codes = torch.arange(max(grid.lo, -300), min(grid.hi, 300) + 1)
    values = (codes - zero_point) * scales[:, None]
    quantizer = quantizer_of(name, scales.numpy(), zero_point, weight=grid.signed)
    survived = torch.equal(quantizer(values.to(dtype).float()), quantizer(values))
    spec = Spec(grid, PerChannel(0), grid.signed)
    assert survived == (name not in LOST[dtype] or (name, dtype) == ("int16", torch.float16))
    assert bool(reason_codes_get_lost(spec, str(dtype).removeprefix("torch."))) == (name in LOST[dtype])


def test_the_reason_names_the_dtype_the_grid_and_the_remedy():
    assert reason_codes_get_lost(Spec(DTYPES["int16"]), "bfloat16") == (
        "bfloat16 has 8 binary digits, too few for the codes of symmetric int16; convert the model to float32"
    )
    assert reason_codes_get_lost(Spec(DTYPES["float8e4m3fn"]), "bfloat16") == ""


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_infinities_go_to_the_ends_of_the_grid(dtype: torch.dtype):
    found: Tensor = quantizer_of("int8", 0.5)(torch.tensor([torch.inf, -torch.inf], dtype=dtype))
    assert found.tolist() == [63.5, -64.0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [None, 4])
def test_a_large_weight_is_on_the_grid_that_it_has_in_float32(
    dtype: torch.dtype, block: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_PIECE", 24)  # two rows of eight at a time, and a rest
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    spec = Spec(DTYPES["int8"], PerTensor() if block is None else PerBlock(1, block), symmetric=True)
    owner = nn.Module()
    quantizer = Quantizer(Decision("self:weight", "Gemm", "weight", spec, ""), owner, "qsdk_weight", owner)
    scale = (
        np.full(1, 0.03, np.float32) if block is None else np.linspace(0.01, 0.05, 10, dtype=np.float32).reshape(5, 2)
    )
    axis = None if block is None else 1
    quantizer.set_encoding(Encoding(DTYPES["int8"], scale, np.zeros(scale.shape, np.int32), axis, block))
    with torch.no_grad():
        wanted = quantizer(x.float())
        assert torch.equal(quantizer(x), wanted.to(dtype))
        quantizer.gives_float32 = True
        assert torch.equal(quantizer(x), wanted)
