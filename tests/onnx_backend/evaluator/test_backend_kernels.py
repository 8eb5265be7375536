"""The NumPy kernels of the ONNX backend: against ONNX Runtime where it has kernels, else against exact arithmetic."""

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper
from strategies import FLOAT8, ML_DTYPE, STANDARD_INTEGERS, Case, cases

from onnx_backend.evaluator.backend import run_model
from onnx_backend.evaluator.kernels import KERNELS, grid
from qsdk.core.numerics.dtypes import DTYPES, DType

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
quantize, dequantize = KERNELS["QuantizeLinear"], KERNELS["DequantizeLinear"]


def onnx_type(dtype: DType) -> int:
    return getattr(TensorProto, dtype.name.upper())


def numpy_type(dtype: DType) -> np.dtype:
    return np.dtype(helper.tensor_dtype_to_np_dtype(onnx_type(dtype)))


def in_runtime(model: ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def model_of(nodes: list[Any], feeds: dict[str, np.ndarray], outputs: dict[str, int], constants: list[Any]):
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    made = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph(nodes, "case", inputs, made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


def agree(model: ModelProto, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Run a model in both and hold every output's bits against each other."""
    ours = run_model(model, feeds)
    for mine, theirs in zip(ours, in_runtime(model, feeds), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)
        if mine.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(mine), np.signbit(theirs))
    return ours


def pair(case: Case, kind: int, *, zero_point: bool, back: int) -> ModelProto:
    """Q -> DQ, and the codes of Q read back by a DequantizeLinear of scale 1."""
    encoding, dtype = case.encoding, onnx_type(case.encoding.dtype)
    shape = () if encoding.axis is None else encoding.scale.shape
    scale = encoding.scale.reshape(shape).astype(helper.tensor_dtype_to_np_dtype(kind))
    constants = [numpy_helper.from_array(scale, "s"), numpy_helper.from_array(np.ones((), np.float32), "one")]
    facts: dict[str, Any] = {} if encoding.axis is None else {"axis": encoding.axis}
    facts |= {} if encoding.block_size is None else {"block_size": encoding.block_size}
    operands, told = ["s"], {"output_dtype": dtype}
    if zero_point:
        constants.append(helper.make_tensor("z", dtype, shape, encoding.zero_point.ravel().tolist()))
        operands, told = ["s", "z"], {}
    # the runtime divides in float32, whatever the scale's type
    told |= {"precision": FLOAT} if kind != FLOAT else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *operands], ["q"], **facts, **told),
        helper.make_node("DequantizeLinear", ["q", "one"], ["stored"]),
        helper.make_node("DequantizeLinear", ["q", *operands], ["y"], **facts, output_dtype=back),
    ]
    feeds = {"x": case.x.astype(scale.dtype)}
    return model_of(nodes, feeds, {"stored": FLOAT, "y": back}, constants)


def has_kernel(case: Case) -> bool:
    """The runtime refuses one block over a vector."""
    return not (case.encoding.block_size and case.x.ndim == 1 and case.encoding.scale.size == 1)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    cases([*STANDARD_INTEGERS, *FLOAT8], fillings=["random", "ties"]), st.booleans(), st.sampled_from([FLOAT, FLOAT16])
)
def test_quantize_and_dequantize_equal_the_runtime(case: Case, zero_point: bool, back: int):
    if not zero_point:
        case.encoding.zero_point[...] = 0
    if has_kernel(case):
        agree(pair(case, FLOAT, zero_point=zero_point, back=back), {"x": case.x})


@pytest.mark.slow
@settings(max_examples=60)
@given(
    cases([d for d in STANDARD_INTEGERS if d.bits > 2], fillings=["random", "ties"]), st.sampled_from([FLOAT, FLOAT16])
)
def test_float16_operands_equal_the_runtime(case: Case, back: int):
    with np.errstate(over="ignore"):
        half = Case(case.x.astype(np.float16), case.encoding)
    if has_kernel(case) and np.isfinite(half.x).all():
        agree(pair(half, FLOAT16, zero_point=True, back=back), {"x": half.x})


def test_the_grids_are_those_of_the_core():
    for dtype in (*STANDARD_INTEGERS, *FLOAT8, DTYPES["float4e2m1"]):
        assert grid(numpy_type(dtype)) == (dtype.lo, dtype.hi)
    assert grid(ml_dtypes.float6_e2m3fn) == (-7.5, 7.5)
    assert grid(ml_dtypes.float6_e3m2fn) == (-28, 28)


HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_the_scales_type_is_that_of_the_division(kind: Any):
    x = HALVES[np.isfinite(HALVES)].astype(kind)
    scale = np.asarray(0.0127, kind)
    # a float64 quotient of two such values rounds to their type as the exact one does: 53 >= 2 * 11 + 2 bits
    with np.errstate(over="ignore"):
        quotient = (x.astype(np.float64) / float(scale)).astype(kind).astype(np.float64)
    expected = (np.rint(quotient) + 7).clip(0, 65535)
    found = quantize({}, x, scale, np.asarray(7, np.uint16))
    np.testing.assert_array_equal(found, expected)
    wide = quantize({"precision": FLOAT}, x, scale, np.asarray(7, np.uint16))
    assert (wide != found).any()
    # from opset 23 on x may be of another type than the scale: the scale's decides
    np.testing.assert_array_equal(quantize({}, x.astype(np.float32), scale, np.asarray(7, np.uint16)), found)
    np.testing.assert_array_equal(quantize({}, x, scale.astype(np.float32), np.asarray(7, np.uint16)), wide)


def test_an_int32_input_is_divided_in_the_scales_type():
    x = np.array([2**24 + 1, -(2**24) - 1, 5, 2**31 - 1], np.int32)
    scale = np.float32(2**17 / 3)
    quotients = x.astype(np.float32) / scale
    np.testing.assert_array_equal(
        quantize({}, x, np.asarray(scale), np.asarray(0, np.int16)), np.rint(quotients).clip(-32768, 32767)
    )
    both = quantize({}, x, np.asarray(2, np.int32), np.asarray(1, np.int16))
    np.testing.assert_array_equal(both, [32767, -32768, 3, 32767])


@pytest.mark.parametrize("exponent", [-127, -126, -3, 0, 5, 127])
def test_a_power_of_two_scale_is_exact(exponent: int):
    scale = np.asarray(2.0**exponent, np.float32).astype(ml_dtypes.float8_e8m0fnu)
    steps = np.array([-6.0, -0.5, 0.5, 1.0, 1.5, 4.0], np.float32)
    with np.errstate(over="ignore"):
        x = np.ldexp(steps, exponent).astype(np.float32)
    keep = np.isfinite(x) & (np.ldexp(x.astype(np.float64), -exponent) == steps)
    found = quantize({"output_dtype": TensorProto.FLOAT4E2M1}, x[keep], scale)
    assert found.dtype == ml_dtypes.float4_e2m1fn
    np.testing.assert_array_equal(found.astype(np.float32), steps[keep])
    np.testing.assert_array_equal(dequantize({"output_dtype": FLOAT}, found, scale), x[keep])
    np.testing.assert_array_equal(
        quantize({"output_dtype": TensorProto.INT8}, x[keep], scale), np.rint(steps[keep]).astype(np.int8)
    )


BEYOND = [np.inf, -np.inf, np.nan, 1e6, -1e6]
OVERFLOWS = {  # without saturation, from the table of the ONNX operator Cast
    "float8e4m3fn": [np.nan] * 5,
    "float8e4m3fnuz": [np.nan] * 5,
    "float8e5m2": [np.inf, -np.inf, np.nan, np.inf, -np.inf],
    "float8e5m2fnuz": [np.nan] * 5,
}


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_saturate_says_what_overflows_become(dtype: DType):
    x, facts = np.array([*BEYOND, 1.0], np.float32), {"output_dtype": onnx_type(dtype)}
    loose = quantize({**facts, "saturate": 0}, x, np.ones((), np.float32)).astype(np.float32)
    np.testing.assert_array_equal(loose, [*OVERFLOWS[dtype.name], 1])
    tight = quantize(facts, x, np.ones((), np.float32)).astype(np.float32)
    np.testing.assert_array_equal(tight, [dtype.hi, dtype.lo, np.nan, dtype.hi, dtype.lo, 1])


@pytest.mark.parametrize("dtype", [*FLOAT8, DTYPES["float4e2m1"]], ids=str)
def test_every_minifloat_returns_through_a_zero_point(dtype: DType):
    codes = np.arange(1 << dtype.bits, dtype=np.uint8).view(ML_DTYPE[dtype.name])
    codes = codes[np.isfinite(codes.astype(np.float32))]
    scale, zero = np.asarray(0.25, np.float32), np.zeros((), codes.dtype)
    values = dequantize({}, codes, scale, zero)
    np.testing.assert_array_equal(values, codes.astype(np.float32) / 4)
    back = quantize({}, values, scale, zero)
    np.testing.assert_array_equal(back.view(np.uint8), codes.view(np.uint8))  # -0.0 too
    one = np.ones((), codes.dtype)
    np.testing.assert_array_equal(dequantize({}, codes, scale, one), (codes.astype(np.float32) - 1) / 4)
    shifted = quantize({}, np.array([0.25, -0.125], np.float32), scale, one)
    np.testing.assert_array_equal(shifted.astype(np.float32), [2, 0.5])


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn"])
def test_float6_saturates(name: str):
    dtype = np.dtype(getattr(ml_dtypes, name))
    x = np.array([1e9, -1e9, 1.5, -0.0], np.float32)
    hi = grid(dtype)[1]
    found = quantize({"output_dtype": helper.np_dtype_to_tensor_dtype(dtype)}, x, np.ones((), np.float32))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float32), [hi, -hi, 1.5, 0])


@pytest.mark.parametrize("dtype", STANDARD_INTEGERS, ids=str)
def test_whatever_overflows_saturates_and_nan_is_the_lowest(dtype: DType):
    x = np.array([np.inf, -np.inf, 3e9, -3e9, 3e38, np.nan], np.float32)
    zero = np.asarray(1).astype(numpy_type(dtype))
    found = quantize({}, x, np.asarray(0.25, np.float32), zero)
    assert found.dtype == zero.dtype
    assert found.astype(int).tolist() == [dtype.hi, dtype.lo, dtype.hi, dtype.lo, dtype.hi, dtype.lo]


def test_the_result_is_uint8_if_nothing_says_otherwise():
    assert quantize({}, np.array([-1, 300], np.float32), np.ones((), np.float32)).tolist() == [0, 255]


def test_a_ragged_last_block_has_its_own_scale():
    x = np.arange(14, dtype=np.float32).reshape(2, 7)
    scale = np.array([[1, 2, 4], [8, 16, 32]], np.float32)
    spread = np.repeat(scale, 3, 1)[:, :7]
    facts = {"axis": -1, "block_size": 3, "output_dtype": TensorProto.INT8}
    found = quantize(facts, x, scale)
    np.testing.assert_array_equal(found, np.rint(x / spread))
    np.testing.assert_array_equal(dequantize({"axis": 1, "block_size": 3}, found, scale), found * spread)


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def u8(*shape: int) -> np.ndarray:
    return np.ones(shape, np.uint8)


Q, DQ = "QuantizeLinear", "DequantizeLinear"
INF, E8M0 = np.array([1, np.inf], np.float32), np.ones((), ml_dtypes.float8_e8m0fnu)
REFUSED = [
    (Q, {"output_dtype": 3}, [f32(2), f32(), u8()], "output_dtype INT8 contradicts the zero point's type UINT8; make"),
    (Q, {"output_dtype": 6}, [f32(2), f32()], "int32 cannot be quantized to; use an integer of 2 to 16 bits"),
    (Q, {"block_size": -1}, [f32(2), f32()], "block_size is -1; give a positive size"),
    (Q, {"axis": 0}, [f32(3), f32(2)], r"a scale of shape \(2,\) does not fit the 3 channels"),
    (Q, {}, [f32(2), f32(2)], r"axis 1 is outside a tensor of shape \(2,\)"),
    (Q, {"axis": 1, "block_size": 2}, [f32(2, 4), f32(2, 3)], "does not fit blocks of 2"),
    (Q, {"axis": 0}, [f32(3), f32(3), u8()], r"the zero point has the shape \(\), the scale \(3,\); make them equal"),
    (DQ, {}, [u8(2), f32(), u8().astype(np.int8)], "x is uint8 and its zero point int8; give both one type"),
    (DQ, {}, [u8(2), E8M0], "the result would be float8_e8m0fnu; set output_dtype to FLOAT"),
    ("DynamicQuantizeLinear", {}, [INF], "from 0.0 to inf, which has no finite scale; look for inf and NaN"),
    ("ConvInteger", {}, [u8(1, 2, 3), u8(4, 2, 1), u8(), u8(3)], r"the zero point of the filters has the shape \(3,\)"),
    ("MatMulInteger", {}, [u8(2, 3), u8(3, 4), u8(3)], r"of shape \(3,\) do not fit the rows of \(2, 3\)"),
    ("MatMulInteger", {}, [u8(2, 3), u8(3, 4), u8(), u8(3)], r"\(3,\) do not fit the columns of \(3, 4\)"),
    (
        "QLinearMatMul",
        {},
        [u8(2, 3), f32(), u8(), u8(3, 4), f32(), u8(), f32(4), u8(4)],
        "give one value for the result",
    ),
]


@pytest.mark.parametrize(("op_type", "attrs", "operands", "message"), REFUSED)
def test_what_the_standard_forbids_is_refused(op_type: str, attrs: dict[str, Any], operands: list[Any], message: str):
    with pytest.raises(ValueError, match=message):
        KERNELS[op_type](attrs, *operands)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(), (0,), (1,), (3, 5), (2, 1, 4)]),
    st.sampled_from([0, 1e-30, 1, 1e30]),
)
def test_dynamic_quantization_equals_the_runtime(seed: int, shape: tuple[int, ...], size: float):
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.normal(rng.normal(0, 3), 1, shape) * size, np.float32)
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    outputs = {"y": TensorProto.UINT8, "s": FLOAT, "z": TensorProto.UINT8}
    if x.size:
        agree(model_of([node], {"x": x}, outputs, []), {"x": x})
    else:
        y, s, z = KERNELS["DynamicQuantizeLinear"]({}, x)
        assert (y.shape, float(s), int(z)) == (x.shape, 1.0, 0)


def codes(rng: np.random.Generator, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    info = np.iinfo(kind)
    return rng.integers(info.min, info.max + 1, shape).astype(kind)


def weights(rng: np.random.Generator, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Signed ones have 7 bits: without VNNI the runtime adds two products with them in 16 bits, which saturate."""
    return codes(rng, kind, shape) // np.array(1 + (kind == np.int8), kind)


@settings(max_examples=60)
@given(st.data())
def test_qlinear_conv_equals_the_runtime(data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    kind, weight_kind = data.draw(st.sampled_from([(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)]))
    group, depth = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    filters = group * data.draw(st.integers(1, 3))
    attrs = {
        "group": group,
        "pads": data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)),
        "strides": data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=2)),
    }
    x, w = codes(rng, kind, (2, group * depth, 6, 5)), weights(rng, weight_kind, (filters, depth, 2, 3))
    wide = data.draw(st.booleans(), label="per channel")
    parts = {
        "sx": np.float32(rng.uniform(0.01, 1)),
        "zx": codes(rng, kind, ()),
        "w": w,
        "sw": rng.uniform(0.001, 0.1, filters if wide else ()).astype(np.float32),
        "zw": np.full(filters if wide else (), 0 if weight_kind == np.int8 else 9, weight_kind),
        "sy": np.float32(rng.uniform(0.05, 2)),
        "zy": codes(rng, kind, ()),
    }
    if data.draw(st.booleans(), label="bias"):
        parts["b"] = rng.integers(-9999, 9999, filters).astype(np.int32)
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in parts.items()]
    node = helper.make_node("QLinearConv", ["x", *parts], ["y"], **attrs)
    agree(model_of([node], {"x": x}, {"y": helper.np_dtype_to_tensor_dtype(np.dtype(kind))}, constants), {"x": x})


def test_every_filter_may_have_its_own_zero_point():
    rng = np.random.default_rng(2)
    x, w, zeros = codes(rng, np.uint8, (2, 4, 5)), codes(rng, np.int8, (6, 2, 3)), codes(rng, np.int8, (6,))
    conv = KERNELS["ConvInteger"]
    found = conv({"group": 2, "pads": [1, 0]}, x, w, np.uint8(7).reshape(1), zeros)
    for filter, outputs in enumerate(range(6)):
        mine = x[:, 2 * (filter // 3) : 2 * (filter // 3) + 2]
        one = conv({"pads": [1, 0]}, mine, w[filter : filter + 1], np.asarray(7, np.uint8), zeros[filter].reshape(()))
        np.testing.assert_array_equal(found[:, outputs : outputs + 1], one)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("left", "right"), list(itertools.product([np.uint8, np.int8], repeat=2)))
def test_matrix_products_are_exact_per_row_and_column(left: Any, right: Any, batch: tuple[int, ...]):
    rng = np.random.default_rng(4)
    a, b = codes(rng, left, (*batch, 3, 5)), codes(rng, right, (*batch, 5, 4))
    za, zb = codes(rng, left, (*batch, 3, 1)), codes(rng, right, (*batch, 1, 4))
    sa, sb = (rng.uniform(0.01, 1, zero.shape).astype(np.float32) for zero in (za, zb))
    exact = np.matmul(a.astype(object) - za.astype(object), b.astype(object) - zb.astype(object))
    given = (za, zb, sa, sb) if batch else (za.ravel(), zb.ravel(), sa.ravel(), sb.ravel())
    np.testing.assert_array_equal(KERNELS["MatMulInteger"]({}, a, b, *given[:2]), exact.astype(np.int64))
    sy, zy = np.asarray(37.5, np.float32), np.asarray(11, np.uint8)
    found = KERNELS["QLinearMatMul"]({}, a, given[2], given[0], b, given[3], given[1], sy, zy)
    for index, total in np.ndenumerate(exact):
        scale = Fraction(float(sa[(*index[:-1], 0)])) * Fraction(float(sb[(*index[:-2], 0, index[-1])]))
        wanted = min(max(round(total * scale / Fraction(float(sy))) + 11, 0), 255)
        assert abs(int(found[index]) - wanted) <= (0 if abs(total) < 2**20 else 1)


@settings(max_examples=40)
@given(st.integers(0, 999), st.sampled_from([np.uint8, np.int8]), st.sampled_from([(3, 5), (2, 3, 5)]))
def test_qlinear_matmul_equals_the_runtime(seed: int, kind: Any, shape: tuple[int, ...]):
    rng = np.random.default_rng(seed)
    a = codes(rng, kind, shape)
    parts = {
        "sa": np.float32(rng.uniform(0.01, 1)),
        "za": codes(rng, kind, ()),
        "b": weights(rng, kind, (*shape[:-2], 5, 4)),
        "sb": np.float32(rng.uniform(0.01, 1)),
        "zb": codes(rng, kind, ()),
        "sy": np.float32(rng.choice([2.0, rng.uniform(0.5, 300)])),
        "zy": codes(rng, kind, ()),
    }
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in parts.items()]
    node = helper.make_node("QLinearMatMul", ["a", *parts], ["y"])
    agree(model_of([node], {"a": a}, {"y": helper.np_dtype_to_tensor_dtype(np.dtype(kind))}, constants), {"a": a})


@pytest.mark.parametrize("scale", [14.0, 240.0, 252.0, 488.0])
def test_ties_are_decided_by_the_multiplier_in_float32_as_in_the_runtime(scale: float):
    pairs = np.stack(np.meshgrid(np.arange(256), np.arange(256)), -1).reshape(-1, 2).astype(np.uint8)
    parts: dict[str, Any] = {"sa": f32(), "za": u8() * 0, "b": np.array([[255], [1]], np.uint8)}
    parts |= {"sb": f32(), "zb": u8() * 0, "sy": f32() * np.float32(scale), "zy": u8()}
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in parts.items()]
    node = helper.make_node("QLinearMatMul", ["a", *parts], ["y"])
    agree(model_of([node], {"a": pairs}, {"y": TensorProto.UINT8}, constants), {"a": pairs})


def test_a_tie_goes_to_the_even_integer_before_the_zero_point_is_added():
    a, b = np.arange(8, dtype=np.uint8).reshape(8, 1), np.ones((1, 1), np.uint8)
    one, zero = np.ones((), np.float32), np.zeros((), np.uint8)
    found = KERNELS["QLinearMatMul"]({}, a, one, zero, b, one, zero, one * 2, zero + np.uint8(3))
    assert found.ravel().tolist() == [3, 3, 4, 5, 5, 5, 6, 7]  # 0, 0.5, 1, 1.5 ... rounded to even, then plus 3


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_qlinear_matmul_takes_float8(dtype: DType):
    kind, rng = numpy_type(dtype), np.random.default_rng(0)
    a, b = (rng.choice([-2.0, -1.0, 0.5, 1.5, 3.0], shape).astype(kind) for shape in ((3, 4), (4, 2)))
    scale, zero = np.asarray(0.5, np.float32), np.zeros((), kind)
    found = KERNELS["QLinearMatMul"]({}, a, scale, zero, b, scale, zero, scale, zero)
    expected = (a.astype(np.float64) @ b.astype(np.float64) / 2).astype(np.float32).astype(kind)
    assert found.dtype == kind
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_an_accumulator_beyond_int32_is_an_error():
    x, w = np.full((1, 40000, 1), 255, np.uint8), np.full((1, 40000, 1), 255, np.uint8)
    with pytest.raises(OverflowError, match="the accumulator reaches 2601000000, beyond int32"):
        KERNELS["ConvInteger"]({}, x, w)
    one, zero = np.ones((), np.float32), np.zeros((), np.uint8)
    bias = np.array([2**31 - 1], np.int32)
    with pytest.raises(OverflowError, match="would wrap"):
        KERNELS["QLinearConv"]({}, x[:, :1], one, zero, w[:, :1], one, zero, one, zero, bias)
