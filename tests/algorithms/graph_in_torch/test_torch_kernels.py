"""Every op of the evaluator against ONNX Runtime, in several forms each."""

import inspect
from types import BuiltinFunctionType

import numpy as np
import onnx
import pytest
from one_op import by_runtime, by_torch, one_op

from qsdk.algorithms.graph_in_torch.run_graph import KERNELS

RNG = np.random.default_rng(0)


def f(*shape, low=-2.0, high=2.0):
    return RNG.uniform(low, high, shape).astype(np.float32)


def i(*values):
    return np.asarray(values, np.int64)


def small(*values):
    """int32 numbers, which are fed rather than stored."""
    return np.asarray(values, np.int32)


def bits(*shape):
    return RNG.integers(0, 2, shape).astype(bool)


def scalar(value, dtype=np.float32):
    return np.asarray(value, dtype)


X = f(2, 3, 4)
PICTURE = f(2, 4, 7, 6)
WITH_ZEROS = np.array([[-1.5, 0, 0.5], [2.5, -0.5, -np.inf], [np.nan, np.inf, 1]], np.float32)
ONE_INPUT = "Abs Atan Ceil Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Mish Neg"
ONE_INPUT += " Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Tanh"
TWO_INPUTS = "Add Sub Mul Div Equal Greater GreaterOrEqual Less LessOrEqual"
RESIZE_REFUSED = ["antialias", "cubic_coeff_a", "exclude_outside", "extrapolation_value", "keep_aspect_ratio_policy"]
REDUCTIONS = "L1 L2 LogSumExp Max Mean Min Prod Sum SumSquare"

CASES = [
    *((op, [X], {}) for op in ONE_INPUT.split()),
    *((op, [f(3, 4, low=1.1, high=3)], {}) for op in ("Log", "Sqrt")),
    *((op, [X, f(3, 1)], {}) for op in TWO_INPUTS.split()),
    *((op, [small(7, -7, 5), small(2, 2, -3)], {}) for op in ("Add", "Sub", "Mul", "Div", "Mod", "Less", "Max", "Min")),
    *((op, [bits(3, 4), bits(4)], {}) for op in ("And", "Or", "Equal")),
    ("Not", [bits(3, 4)], {}),
    ("Mod", [X, f(4)], {"fmod": 1}),
    ("Pow", [f(3, 4, low=0.1), f(4)], {}),
    ("Pow", [f(3, 4), scalar(2, np.int32)], {}),
    ("Pow", [small(2, 3), scalar(2.0)], {}),
    *((op, [X, f(4), f(3, 1)], {}) for op in ("Max", "Min", "Sum", "Mean")),
    ("Max", [X], {}),
    ("Clip", [X, scalar(-0.5), scalar(0.5)], {}),
    ("Clip", [X, None, scalar(0.5)], {}),
    ("Clip", [X, scalar(0.5), scalar(-0.5)], {}),
    ("Clip", [X], {}),
    ("Cast", [X], {"to": 7}),
    ("Cast", [WITH_ZEROS], {"to": 9}),
    ("Cast", [X], {"to": 11}),
    ("Cast", [small(0, 3, -2)], {"to": 1}),
    ("CastLike", [X, small(1)], {}),
    ("IsNaN", [WITH_ZEROS], {}),
    ("IsInf", [WITH_ZEROS], {}),
    ("IsInf", [WITH_ZEROS], {"detect_negative": 0}),
    ("Elu", [X], {"alpha": 0.3}),
    ("Selu", [X], {"alpha": 1.3, "gamma": 0.7}),
    ("Gelu", [X], {"approximate": "tanh"}),
    ("HardSigmoid", [X], {"alpha": 0.3, "beta": 0.4}),
    ("LeakyRelu", [X], {"alpha": 0.3}),
    ("PRelu", [X, f(3, 1)], {}),
    ("Round", [np.arange(-2.5, 3, 0.5, np.float32)], {}),
    ("Dropout", [X], {}),
    ("Where", [bits(3, 4), X, f(1)], {}),
    *((f"Reduce{kind}", [f(2, 3, 4, low=0.1)], {}) for kind in REDUCTIONS.split()),
    *((f"Reduce{kind}", [f(2, 3, 4, low=0.1), i(-1, 0)], {"keepdims": 0}) for kind in REDUCTIONS.split()),
    *((f"Reduce{kind}", [f(2, 3, low=0.1), i(1)], {}) for kind in REDUCTIONS.split()),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}),
    ("ReduceMax", [small(3, 1, 2), i(0)], {}),
    ("ReduceSum", [scalar(3.0)], {}),
    *((op, [X], {}) for op in ("ArgMax", "ArgMin")),
    *((op, [small(3, 1, 3, 1)], {"select_last_index": 1}) for op in ("ArgMax", "ArgMin")),
    *((op, [small(3, 1, 3, 1)], {"keepdims": 0}) for op in ("ArgMax", "ArgMin")),
    ("ArgMax", [X], {"axis": -1, "keepdims": 0}),
    ("TopK", [X, i(2)], {}, 2),
    ("TopK", [X, i(2)], {"axis": 1, "largest": 0}, 2),
    ("TopK", [small(1, 2, 2, 1, 2), i(4)], {}, 2),
    ("CumSum", [X, i(1)[0]], {}),
    ("CumSum", [X, i(-1)[0]], {"exclusive": 1, "reverse": 1}),
    *((op, [X], {}) for op in ("Softmax", "LogSoftmax")),
    *((op, [X], {"axis": 1}) for op in ("Softmax", "LogSoftmax")),
    ("BatchNormalization", [PICTURE, f(4), f(4), f(4), f(4, low=0.5)], {"epsilon": 1e-3}),
    ("LayerNormalization", [X, f(4), f(4)], {}),
    ("LayerNormalization", [X, f(3, 4)], {"axis": 1, "epsilon": 0.1}),
    ("RMSNormalization", [X, f(4)], {}, 1, 23),
    ("RMSNormalization", [X, f(3, 4)], {"axis": 1, "epsilon": 0.1}, 1, 23),
    ("InstanceNormalization", [PICTURE, f(4), f(4)], {}),
    ("InstanceNormalization", [X, f(3), f(3)], {"epsilon": 0.1}),
    ("GroupNormalization", [PICTURE, f(4), f(4)], {"num_groups": 2}),
    ("LpNormalization", [X], {}),
    ("LpNormalization", [X], {"axis": 1, "p": 1}),
    *(
        ("Attention", [f(2, 4, 3, 8), f(2, 2, 5, 8), f(2, 2, 5, 6), *given], attributes, 3, opset)
        for opset in (23, 24)
        for given, attributes in (
            ([], {}),
            ([], {"is_causal": 1, "scale": 0.3}),
            ([f(3, 5)], {"softcap": 1.5}),
            ([bits(2, 1, 3, 5) | np.eye(3, 5, dtype=bool)], {}),
            ([None, f(2, 2, 4, 8), f(2, 2, 4, 6)], {"is_causal": 1}),
        )
    ),
    ("Attention", [f(2, 3, 16), f(2, 5, 8), f(2, 5, 8)], {"q_num_heads": 4, "kv_num_heads": 2}, 3, 23),
    *(
        ("RotaryEmbedding", [f(2, 3, 4, 8), f(9, half), f(9, half), i(*range(8)).reshape(2, 4) % 5], more, 1, 23)
        for half, more in ((4, {}), (4, {"interleaved": 1}), (2, {"rotary_embedding_dim": 4}))
    ),
    ("RotaryEmbedding", [f(2, 4, 24), f(2, 4, 4), f(2, 4, 4)], {"num_heads": 3}, 1, 23),
    ("Swish", [X], {"alpha": 0.7}, 1, 24),
    ("Shape", [X], {}),
    ("Shape", [X], {"start": -2, "end": 2}),
    ("Size", [X], {}),
    ("Reshape", [X, i(0, -1)], {}),
    ("Reshape", [np.zeros((0, 3), np.float32), i(3, 0)], {"allowzero": 1}),
    ("Flatten", [X], {}),
    ("Flatten", [X], {"axis": -1}),
    ("Flatten", [X], {"axis": 0}),
    ("Transpose", [X], {}),
    ("Transpose", [X], {"perm": [1, 0, 2]}),
    ("Squeeze", [f(1, 3, 1)], {}),
    ("Squeeze", [f(1, 3, 1), i(-1)], {}),
    ("Unsqueeze", [X, i(-1, 0)], {}),
    ("Expand", [f(3, 1), i(2, 1, 4)], {}),
    ("Expand", [f(2, 3, 4), i(3, 1)], {}),
    ("Tile", [X, i(2, 1, 3)], {}),
    ("Concat", [X, f(2, 5, 4)], {"axis": -2}),
    ("Split", [X, i(1, 3)], {"axis": 2}, 2),
    ("Split", [f(7)], {"num_outputs": 3}, 3),
    ("Slice", [X, i(1, -3), i(3, 2**62), i(1, 2)], {}),
    ("Slice", [X, i(0, 1)[:1], i(1)], {}),
    ("Slice", [X, i(-1, 3), i(-(2**62), 0), i(1, -1), i(-1, -2)], {}),
    ("Pad", [X, i(0, 1, 2, 1, 0, 1)], {}),
    ("Pad", [X, i(1, -1, 2, 0), scalar(3.0), i(-1, 1)], {}),
    *(("Pad", [X, i(0, 1, 2, 1, 0, 3)], {"mode": mode}) for mode in ("reflect", "edge", "wrap")),
    ("Pad", [f(2, 5), i(0, -1, 0, 2)], {"mode": "edge"}),
    ("DepthToSpace", [f(1, 8, 2, 3)], {"blocksize": 2}),
    ("DepthToSpace", [f(1, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [f(1, 2, 4, 6)], {"blocksize": 2}),
    ("Range", [scalar(1.0), scalar(3.0), scalar(0.4)], {}),
    ("Range", [scalar(5, np.int32), scalar(1, np.int32), scalar(-2, np.int32)], {}),
    ("ConstantOfShape", [i(2, 3)], {}),
    ("Trilu", [f(4, 4)], {}),
    ("Trilu", [X, i(-1)[0]], {"upper": 0}),
    ("Gather", [X, i(1, -1, 0).reshape(1, 3)], {"axis": 1}),
    ("Gather", [X, i(1)[0]], {}),
    ("Gather", [f(3), i(1)[0]], {}),
    ("GatherElements", [X, i(*range(-1, 3)).reshape(1, 1, 4)], {"axis": 1}),
    ("GatherND", [X, i(0, 1, 1, -1).reshape(2, 2)], {}),
    ("GatherND", [X, i(1, -1).reshape(2, 1)], {"batch_dims": 1}),
    ("GatherND", [f(3), i(1)], {}),
    ("GatherND", [X, i(1, 2, 0, 1, 2, 3).reshape(2, 3)], {}),
    ("ScatterElements", [X, i(1, -1).reshape(1, 1, 2), f(1, 1, 2)], {"axis": 2}),
    *(
        ("ScatterElements", [X, i(1, 1).reshape(1, 1, 2), f(1, 1, 2)], {"axis": 2, "reduction": by})
        for by in ("add", "mul", "max", "min")
    ),
    ("ScatterND", [X, i(1, -1).reshape(1, 2), f(1, 4)], {}),
    *(("ScatterND", [X, i(1, 1).reshape(2, 1), f(2, 3, 4)], {"reduction": by}) for by in ("add", "mul", "max", "min")),
    ("OneHot", [i(1, -1, 7), scalar(4, np.int32), f(2)], {}),
    ("OneHot", [i(1, 2).reshape(2, 1), i(3)[0], i(5, 6)], {"axis": 0}),
    ("NonZero", [bits(3, 4)], {}),
    ("MatMul", [f(2, 1, 3, 4), f(3, 4, 5)], {}),
    ("MatMul", [f(4), f(3, 4, 5)], {}),
    ("MatMul", [f(3, 4), f(4)], {}),
    ("Gemm", [f(2, 3), f(3, 4)], {}),
    ("Gemm", [f(3, 2), f(4, 3), f(4)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 0.3}),
    ("Einsum", [f(2, 3, 4), f(2, 4, 5)], {"equation": "b i j, b j k -> b i k"}),
    ("Einsum", [f(2, 3, 3)], {"equation": "...ii->...i"}),
    ("Conv", [f(1, 2, 9), f(3, 2, 3), f(3)], {"pads": [2, 0], "strides": [2]}),
    ("Conv", [PICTURE, f(6, 2, 3, 2)], {"group": 2, "dilations": [2, 1], "pads": [0, 1, 2, 0]}),
    ("Conv", [f(1, 2, 4, 5, 6), f(3, 2, 2, 2, 2), f(3)], {}),
    *(
        ("Conv", [PICTURE, f(3, 4, 3, 2)], {"auto_pad": auto, "strides": [2, 2]})
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    ("ConvTranspose", [f(1, 2, 5), f(2, 3, 3), f(3)], {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    ("ConvTranspose", [PICTURE, f(4, 3, 3, 2)], {"group": 2, "dilations": [2, 1], "pads": [1, 0, 0, 1]}),
    ("ConvTranspose", [PICTURE, f(4, 3, 3, 3), f(3)], {"strides": [2, 3], "output_shape": [14, 18]}),
    *(
        ("ConvTranspose", [PICTURE, f(4, 3, 3, 4), f(3)], {"auto_pad": auto, "strides": [2, 2]})
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    *(
        (op, [PICTURE], {"kernel_shape": [3, 2], "strides": [2, 2], **more})
        for op in ("MaxPool", "AveragePool")
        for more in (
            {},
            {"pads": [1, 0, 1, 1]},
            {"pads": [1, 1, 0, 0], "ceil_mode": 1},
            {"ceil_mode": 1, "strides": [3, 4]},
            {"auto_pad": "SAME_UPPER"},
            {"auto_pad": "SAME_LOWER"},
            {"auto_pad": "VALID"},
        )
    ),
    ("MaxPool", [f(1, 2, 9)], {"kernel_shape": [3], "dilations": [2]}),
    ("MaxPool", [f(1, 2, 5, 5, 5)], {"kernel_shape": [2, 2, 2]}),
    ("AveragePool", [f(1, 2, 9)], {"kernel_shape": [3], "dilations": [2], "pads": [1, 0]}),
    ("AveragePool", [f(1, 2, 9)], {"kernel_shape": [3], "pads": [1, 1], "count_include_pad": 1}),
    (
        "AveragePool",
        [PICTURE],
        {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2], "count_include_pad": 1, "ceil_mode": 1},
    ),
    ("GlobalAveragePool", [PICTURE], {}),
    ("GlobalMaxPool", [PICTURE], {}),
    *(
        ("Resize", [PICTURE, None, None, i(2, 4, 11, 4)], {"coordinate_transformation_mode": by, "mode": mode})
        for by in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
        for mode in ("nearest", "linear")
    ),
    ("Resize", [PICTURE, None, np.array([1, 1, 1.7, 0.6], np.float32)], {"mode": "linear"}),
    *(
        ("Resize", [f(1, 1, 4, 5), None, None, i(1, 1, 6, 3)], {"nearest_mode": by, "mode": "nearest"})
        for by in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    ("Resize", [PICTURE, None, None, i(9, 9)], {"axes": [2, 3]}),
]


def name_of(number):
    op, inputs, attributes, *_ = CASES[number]
    return f"{number}-{op}-{len(inputs)}-" + ",".join(f"{name}={value}" for name, value in attributes.items())


@pytest.mark.parametrize("number", range(len(CASES)), ids=name_of)
def test_an_op_is_computed_as_onnx_runtime_does(number: int):
    model, feeds = one_op(*CASES[number])
    wanted, found = by_runtime(model, feeds), by_torch(model, feeds)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        largest = float(np.abs(b[np.isfinite(b)]).max(initial=1e-3)) if b.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("opset", [21, 25])
def test_kernels_take_every_attribute_of_their_op_with_its_default_but_a_few(opset: int):
    untaken = set()
    for op, kernel in KERNELS.items():
        if not onnx.defs.has(op, opset, ""):
            continue
        for name, attribute in onnx.defs.get_schema(op, opset, "").attributes.items():
            parameter = parameters_of(kernel).get(name)
            if parameter is None:
                untaken.add((op, name))
            elif attribute.default_value.name:
                assert parameter.default == pytest.approx(default_of(attribute)), (op, name)
    refused = {("Resize", name) for name in RESIZE_REFUSED}
    windows = {("Attention", f"{side}_window_size") for side in ("left", "right") if opset > 24}
    # the kernel of Gemm takes any attribute
    assert untaken == refused | windows | {("Gemm", name) for name in ("alpha", "beta", "transA", "transB")}


def parameters_of(kernel):
    """torch's own functions have no signature."""
    return {} if isinstance(kernel, BuiltinFunctionType) else inspect.signature(kernel).parameters


def default_of(attribute):
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else tuple(value) if isinstance(value, list) else value


def test_every_op_of_the_table_is_held_against_onnx_runtime():
    assert {op for op, *_ in CASES} == set(KERNELS)
