"""The formula in NumPy and PyTorch against ONNX Runtime's QuantizeLinear and DequantizeLinear, bit for bit.

Every dtype x granularity x opset x form the runtime has a kernel for; many arrays in one session, which is built as
the simulation builds its own. float4 has no kernel and is held against the ONNX reference and its written table.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from strategies import (
    EXTREMES,
    FILLINGS,
    FLOAT8,
    GRANULARITIES,
    STANDARD_INTEGERS,
    Case,
    make_case,
    minifloat_values,
    same_bits,
)

from qsdk import DType, Encoding
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DTYPES

IR_OF_OPSET = {21: 10, 23: 11, 25: 13}
ARRAYS_PER_FILLING = 12
TWO_BITS = tuple(d for d in STANDARD_INTEGERS if d.bits == 2)
COMBINATIONS = [
    pytest.param(dtype, opset, granularity, form, id=f"{dtype}-{opset}-{granularity}-{form}")
    for dtype in (*STANDARD_INTEGERS, *FLOAT8)
    for opset in (21, 25)
    for granularity in GRANULARITIES
    for form in ("output_dtype", "zero_point")
    if dtype not in TWO_BITS or opset == 25
]
TORCH_FLOAT8 = {
    "float8e4m3fn": torch.float8_e4m3fn,
    "float8e4m3fnuz": torch.float8_e4m3fnuz,
    "float8e5m2": torch.float8_e5m2,
    "float8e5m2fnuz": torch.float8_e5m2fnuz,
}


def onnx_type(dtype: DType) -> int:
    return getattr(TensorProto, dtype.name.upper())


@dataclass
class Batch:
    """One model with a Q -> DQ pair per case, and the stored integers of Q read back exactly by a DQ of scale 1."""

    cases: list[Case]
    form: str
    opset: int

    def model(self) -> bytes:
        nodes, inputs, outputs = [], [], []
        constants = [numpy_helper.from_array(np.array(1, np.float32), "one")]
        for i, case in enumerate(self.cases):
            nodes += self._nodes(i, case, constants)
            inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, case.x.shape))
            for name in (f"stored{i}", f"y{i}"):
                outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, case.x.shape))
        graph = helper.make_graph(nodes, "batch", inputs, outputs, constants)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_OF_OPSET[self.opset])
        onnx.checker.check_model(model, full_check=True)
        return model.SerializeToString()

    def _nodes(self, i: int, case: Case, constants: list[TensorProto]) -> list[onnx.NodeProto]:
        encoding = case.encoding
        shape = () if encoding.axis is None else encoding.scale.shape
        constants.append(numpy_helper.from_array(encoding.scale.reshape(shape), f"s{i}"))
        attributes = {} if encoding.axis is None else {"axis": encoding.axis}
        attributes |= {} if encoding.block_size is None else {"block_size": encoding.block_size}
        operands, written = [f"s{i}"], {}
        if self.form == "zero_point":
            values = encoding.zero_point.ravel().tolist()
            constants.append(helper.make_tensor(f"z{i}", onnx_type(encoding.dtype), shape, values))
            operands.append(f"z{i}")
        else:
            written = {"output_dtype": onnx_type(encoding.dtype)}
        return [
            helper.make_node("QuantizeLinear", [f"x{i}", *operands], [f"q{i}"], **attributes, **written),
            helper.make_node("DequantizeLinear", [f"q{i}", "one"], [f"stored{i}"]),
            helper.make_node("DequantizeLinear", [f"q{i}", *operands], [f"y{i}"], **attributes),
        ]

    def run(self) -> list[tuple[np.ndarray, np.ndarray]]:
        found = session(self.model()).run(None, {f"x{i}": case.x for i, case in enumerate(self.cases)})
        return list(zip(found[::2], found[1::2], strict=True))


def session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_double_qdq_remover", "1")
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def draw(rng: np.random.Generator, dtype: DType, granularity: str, form: str) -> list[Case]:
    found = []
    for filling in FILLINGS:
        for _ in range(ARRAYS_PER_FILLING):
            symmetric = True if form == "output_dtype" else None
            case = make_case(rng, dtype, granularity, filling, symmetric=symmetric, wild_scales=filling == "extreme")
            while case.encoding.block_size and case.x.ndim == 1 and case.encoding.scale.size == 1:
                # the runtime refuses one block over a vector
                case = make_case(rng, dtype, granularity, filling, symmetric=symmetric)
            found.append(case)
    return found


def in_torch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The stored values and the fake-quantized ones, by the same formula on torch tensors."""
    encoding, x = case.encoding, torch.from_numpy(case.x)
    where = (case.x.shape, encoding.axis, encoding.block_size)
    scale = affine.align(torch.from_numpy(encoding.scale), *where)
    if not encoding.dtype.is_integer:
        cast = TORCH_FLOAT8[encoding.dtype.name]
        y = affine.fake_quantize_minifloat(x, scale, encoding.dtype, lambda v: v.to(cast).to(v.dtype))
        stored = (x / scale).clip(encoding.dtype.lo, encoding.dtype.hi).to(cast).to(torch.float32)
        return stored.numpy(), y.numpy()
    zero_point = affine.align(torch.from_numpy(encoding.zero_point.astype(np.float32)), *where)
    grid = encoding.dtype.lo, encoding.dtype.hi
    stored = affine.quantize(x, scale, zero_point, *grid)
    return stored.numpy(), affine.fake_quantize(x, scale, zero_point, *grid).numpy()


def comparable(case: Case) -> np.ndarray:
    """Where the runtime computes what ONNX says: see `test_saturation_where_the_runtime_wraps`."""
    dtype, blocked = case.encoding.dtype, case.encoding.block_size is not None
    if not dtype.is_integer or (dtype.bits >= 8 and not blocked):
        return np.full(case.x.shape, True)
    with np.errstate(over="ignore"):
        return np.abs(case.x / case.spread(case.encoding.scale)) < 2.0**30


@pytest.mark.parametrize(("dtype", "opset", "granularity", "form"), COMBINATIONS)
def test_bit_for_bit(dtype: DType, opset: int, granularity: str, form: str):
    rng = np.random.default_rng(zlib.crc32(f"{dtype} {opset} {granularity} {form}".encode()))
    batch = Batch(draw(rng, dtype, granularity, form), form, opset)
    compared = 0
    for case, (stored, y) in zip(batch.cases, batch.run(), strict=True):
        at = comparable(case)
        compared += int(at.sum())
        q = case.encoding.quantize(case.x)
        assert same_bits(q.astype(np.float32)[at], stored[at]), case
        assert same_bits(case.encoding.dequantize(q)[at], y[at]), case
        assert same_bits(case.encoding.fake_quantize(case.x)[at], y[at]), case
        torch_stored, torch_y = in_torch(case)
        assert same_bits(torch_stored[at], stored[at]), case
        assert same_bits(torch_y[at], y[at]), case
    assert compared > 300


def test_the_comparison_can_fail():
    """The two orders that look right and are not: the zero point before rounding, and multiplying by 1/scale."""
    rng = np.random.default_rng(5)
    cases = [make_case(rng, DTYPES["uint8"], "tensor", "ties", symmetric=False) for _ in range(40)]
    early = late = 0
    for case, (stored, _) in zip(cases, Batch(cases, "zero_point", 21).run(), strict=True):
        scale, zero_point = case.encoding.scale, case.encoding.zero_point.astype(np.float32)
        early += int((np.rint(case.x / scale + zero_point).clip(0, 255) != stored).sum())
        late += int(((np.rint(case.x * (np.float32(1) / scale)) + zero_point).clip(0, 255) != stored).sum())
    assert early > 0
    assert late > 0


@pytest.mark.parametrize("dtype", [*STANDARD_INTEGERS, *FLOAT8], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_stored_value_is_dequantized_alike(dtype: DType, granularity: str):
    rng = np.random.default_rng(3)
    grid = np.arange(dtype.lo, dtype.hi + 1) if dtype.is_integer else minifloat_values(dtype)
    case = make_case(rng, dtype, granularity, "random", shape=(3, 4, 5))
    encoding = case.encoding
    stored = rng.choice(grid, (40, *case.x.shape)).astype(encoding.quantize(case.x).dtype)
    shape = () if encoding.axis is None else encoding.scale.shape
    attributes = {} if encoding.axis is None else {"axis": encoding.axis}
    attributes |= {} if encoding.block_size is None else {"block_size": encoding.block_size}
    constants = [
        numpy_helper.from_array(encoding.scale.reshape(shape), "s"),
        helper.make_tensor("z", onnx_type(dtype), shape, encoding.zero_point.ravel().tolist()),
        *(numpy_helper.from_array(values, f"q{i}") for i, values in enumerate(stored)),
    ]
    nodes = [helper.make_node("DequantizeLinear", [f"q{i}", "s", "z"], [f"y{i}"], **attributes) for i in range(40)]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, case.x.shape) for i in range(40)]
    graph = helper.make_graph(nodes, "stored", [], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    for values, y in zip(stored, session(model.SerializeToString()).run(None, {}), strict=True):
        assert same_bits(encoding.dequantize(values), y)


@pytest.mark.parametrize("dtype", [*STANDARD_INTEGERS, *FLOAT8], ids=str)
def test_nan_becomes_the_lowest_integer_and_stays_nan_in_float8(dtype: DType):
    zero_point = 1 if dtype.is_integer else 0
    case = Case(np.full(37, np.nan, np.float32), Encoding(dtype, np.array([0.5]), np.array([zero_point])))
    ((stored, y),) = Batch([case], "zero_point", 25).run()
    expected = dtype.lo if dtype.is_integer else np.nan
    assert np.array_equal(stored, np.full(37, expected, np.float32), equal_nan=True)
    assert same_bits(case.encoding.quantize(case.x).astype(np.float32), stored)
    assert same_bits(case.encoding.fake_quantize(case.x), y)


def test_nan_stays_nan_in_the_bare_formula_so_that_training_sees_it():
    x = torch.tensor([float("nan"), 1.0])
    y = affine.fake_quantize(x, torch.tensor(0.5), torch.tensor(0.0), -128, 127)
    assert torch.isnan(y[0])
    assert y[1] == 1.0


def test_runtime_refuses_one_block_over_a_vector_that_the_encoding_takes():
    case = Case(np.array([1.0, 2.0, 400.0], np.float32), Encoding(DTYPES["int8"], np.array([0.5]), np.array([0]), 0, 3))
    assert case.encoding.quantize(case.x).tolist() == [2, 4, 127]
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail, match="block_size must be 0"):
        Batch([case], "zero_point", 21).run()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", STANDARD_INTEGERS, ids=str)
def test_saturation_where_the_runtime_wraps(dtype: DType, granularity: str):
    """The runtime's 2-bit, blocked and (in part) 4-bit kernels cast a quotient to int32 first: 3e9 becomes lo."""
    axis, size = {"tensor": (None, None), "channel": (0, None), "block": (0, 1)}[granularity]
    scale = np.full({"tensor": (1,), "channel": (5,), "block": (5, 1)}[granularity], 0.25)
    encoding = Encoding(dtype, scale, np.ones(scale.shape), axis, size)
    x = np.array([[np.inf], [1e38], [2.0**31], [-np.inf], [-1e38]], np.float32)
    assert encoding.quantize(x).astype(int).ravel().tolist() == [dtype.hi] * 3 + [dtype.lo] * 2
    torch_stored, _ = in_torch(Case(x, encoding))
    assert torch_stored.ravel().tolist() == [dtype.hi] * 3 + [dtype.lo] * 2


#: x and the value of the ONNX float4e2m1 table it becomes; midpoints go to the even mantissa.
FLOAT4_TABLE = [
    *((v, v) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    *((0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)),
    *((0.26, 0.5), (0.74, 0.5), (1.26, 1.5), (2.51, 3.0), (3.49, 3.0), (3.51, 4.0), (4.99, 4.0), (5.01, 6.0)),
    *((7.0, 6.0), (1e30, 6.0), (np.inf, 6.0), (1e-30, 0.0)),
]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_float4_follows_the_written_table(sign: float, scale: float):
    x = np.array([sign * v * scale for v, _ in FLOAT4_TABLE], np.float32)
    expected = np.array([sign * v for _, v in FLOAT4_TABLE], np.float32)
    encoding = Encoding(DTYPES["float4e2m1"], np.array([scale]), np.array([0]))
    assert same_bits(encoding.quantize(x).astype(np.float32), expected)
    assert same_bits(encoding.fake_quantize(x), expected * np.float32(scale))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_float4_equals_the_onnx_reference(granularity: str):
    rng = np.random.default_rng(11)
    cases = [make_case(rng, DTYPES["float4e2m1"], granularity, f) for f in ("random", "ties") for _ in range(12)]
    model = onnx.load_from_string(Batch(cases, "output_dtype", 23).model())
    found = ReferenceEvaluator(model).run(None, {f"x{i}": case.x for i, case in enumerate(cases)})
    for case, stored, y in zip(cases, found[::2], found[1::2], strict=True):
        assert same_bits(case.encoding.quantize(case.x).astype(np.float32), stored), case
        assert same_bits(case.encoding.fake_quantize(case.x), y), case


def test_float4_has_no_kernel_yet():
    case = Case(EXTREMES[-3:], Encoding(DTYPES["float4e2m1"], np.array([1.0]), np.array([0])))
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.NotImplemented, match="QuantizeLinear"):
        Batch([case], "output_dtype", 23).run()
