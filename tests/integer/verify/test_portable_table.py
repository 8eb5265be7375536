"""The table of exact ranges, derived again on the installed runtimes: an operator at a time, at extreme values."""

import numpy as np
import pytest
from every_runtime import onnxruntime, openvino
from onnx import helper, numpy_helper

from onnx_backend.integer.portable.numbers import FLOAT32, INT32, LIMITS
from onnx_backend.integer.reference.run import OPS

AXIS = {"axes": np.array([1])}
SHAPE = (4, 4, 4, 4)


def spread(limit, seed=0):
    """Numbers of every size up to a limit, ends included."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(1, limit.bit_length(), SHAPE)
    values = rng.integers(-(1 << 30), 1 << 30, SHAPE) % (1 << bits) * rng.choice([1, -1], SHAPE)
    values.reshape(-1)[:6] = [limit - 1, 1 - limit, limit - 2, 0, limit // 2 + 1, -limit // 2 - 1]
    return values.astype(np.int32)


def moved(**attributes):
    return lambda limit: ({"x": spread(limit)}, {}, attributes)


def with_constants(**constants):
    return lambda limit: ({"x": spread(limit)}, constants, {})


def pair(limit):
    """Two operands, so small that a sum of them stays in int32."""
    one, other = spread(limit, 1), spread(limit, 2)
    return {"x": one // 2, "y": other // 2}, {}, {}


def close(limit):
    """Numbers and their neighbours."""
    x = spread(limit)
    return {"x": x, "y": x + np.resize([1, 0, -1], SHAPE).astype(np.int32) * (np.abs(x) < limit - 1)}, {}, {}


def product(limit):
    x = spread(limit)
    return {"x": x, "y": ((limit - 1) // np.maximum(np.abs(x.astype(np.int64)), 1)).astype(np.int32)}, {}, {}


def bools(limit):
    return {"x": spread(9) > 2, "y": spread(9) > 0}, {}, {}


def codes(**attributes):
    return lambda limit: ({"x": (spread(256) & 255).astype(np.uint8)}, {}, attributes)


def matrices(limit):
    """Products whose sums end just below the limit, in steps of one."""
    side = int((limit // 4) ** 0.5) - 1
    return (
        {"x": np.full((4, 4), side, np.int32) - np.eye(4, dtype=np.int32)},
        {"y": np.full((4, 4), side, np.int32)},
        {},
    )


def depth(limit):
    return 254 if limit <= FLOAT32 else 4096


def matrix_of_codes(limit):
    x = np.full((3, depth(limit)), 255, np.uint8) - np.arange(3, dtype=np.uint8)[:, None]
    weight = np.full((depth(limit), 2), 255, np.uint8)
    weight[::7, 1] -= 1
    return {"x": x}, {"w": weight, "xz": np.uint8(0), "wz": np.uint8(0)}, {}


def layer(limit):
    feeds, constants, _ = matrix_of_codes(limit)
    constants["w"] = constants["w"].T.reshape(2, -1, 1, 1)
    return {"x": feeds["x"].reshape(3, -1, 1, 1)}, constants, {}


def sums(limit):
    return {"x": (spread(limit) // 4)}, AXIS, {}


def shifted(limit):
    """A right shift is a division of numbers whose low bits are 0; beyond 24 significant bits it is not exact."""
    x = np.abs(spread(INT32)) & (-128 if limit <= FLOAT32 else -1)
    return {"x": x.astype(np.uint32)}, {"by": np.uint32(7)}, {"direction": "RIGHT"}


def clipped(limit):
    """What counts is the size of the bounds."""
    bound = min(limit, FLOAT32 + 2) - 1
    return {"x": spread(INT32)}, {"lo": np.int32(-bound), "hi": np.int32(bound)}, {}


def divided(limit):
    feeds, _, _ = shifted(limit)
    return {"x": feeds["x"].astype(np.int32)}, {"by": np.int32(128)}, {}


PROBES = {
    **dict.fromkeys(("Abs", "Flatten", "Identity", "Shape"), moved()),
    **dict.fromkeys(("Add", "Sub", "BitwiseAnd", "BitwiseOr", "Max", "Min"), pair),
    **dict.fromkeys(("And", "Or", "Xor"), bools),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), close),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), with_constants(**AXIS)),
    **dict.fromkeys(("ArgMax", "ArgMin"), moved(axis=1, keepdims=0)),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), codes(blocksize=2)),
    **dict.fromkeys(("MatMulInteger",), matrix_of_codes),
    "BitShift": shifted,
    "Cast": moved(to=7),
    "Clip": clipped,
    "Concat": lambda limit: ({"x": spread(limit), "y": spread(limit, 1)}, {}, {"axis": 1}),
    "ConvInteger": layer,
    "CumSum": lambda limit: ({"x": spread(limit) // 4}, {"axis": np.int64(1)}, {}),
    "Div": divided,
    "Expand": with_constants(shape=np.array([2, *SHAPE])),
    "Gather": with_constants(index=np.array([[3, 0], [2, 2]])),
    "GatherElements": with_constants(index=np.zeros(SHAPE, np.int32)),
    "GatherND": with_constants(index=np.array([[1, 2], [3, 0]])),
    "MatMul": matrices,
    "MaxPool": codes(kernel_shape=[2, 2]),
    "Mul": product,
    "Not": lambda limit: ({"x": spread(9) > 2}, {}, {}),
    "Pad": lambda limit: (
        {"x": spread(INT32)},
        {"pads": np.array([0, 0, 1, 1, 0, 0, 0, 2]), "fill": np.int32(limit - 1)},
        {},
    ),
    "ReduceSum": sums,
    "Reshape": with_constants(shape=np.array([16, -1])),
    "Resize": lambda limit: (
        {"x": spread(limit)},
        {"": None, " ": None, "sizes": np.array([4, 4, 8, 9])},
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    "ScatterElements": with_constants(index=np.array([[[[2]]]]), updates=np.array([[[[INT32 - 1]]]], np.int32)),
    "ScatterND": with_constants(index=np.array([[1, 1, 1, 1]]), updates=np.array([1 - INT32], np.int32)),
    "Slice": with_constants(starts=np.array([1]), ends=np.array([4]), axes=np.array([2]), steps=np.array([2])),
    "Split": with_constants(sizes=np.array([4])),
    "Squeeze": lambda limit: ({"x": spread(limit)[:, :1]}, AXIS, {}),
    "Tile": with_constants(repeats=np.array([1, 2, 1, 1])),
    "TopK": lambda limit: ({"x": spread(limit)}, {"k": np.array([3])}, {"axis": 1}),
    "Transpose": moved(perm=[0, 2, 3, 1]),
    "Unsqueeze": with_constants(axes=np.array([0])),
    "Where": lambda limit: ({"c": spread(9) > 0, "x": spread(limit), "y": spread(limit, 1)}, {}, {}),
}
#: Operators that only tensors of codes reach have no beyond.
WITHOUT_BEYOND = ("MaxPool",)


def computed(op_type, limit):
    feeds, constants, attributes = PROBES[op_type](limit)
    stored = {name: value for name, value in constants.items() if name.strip()}
    inputs = [*feeds, *(name.strip() for name in constants)]
    node = helper.make_node(op_type, inputs, ["found"], **attributes)
    values = [feeds[name] if name in feeds else stored.get(name) for name in inputs]
    decoded = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    found = OPS[op_type](decoded, *values) if op_type in OPS else values[0]
    expected = found[0] if isinstance(found, tuple) else found
    edges = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in {**feeds, "found": expected}.items()
    ]
    if op_type == "TopK":
        node.output.append("places")
    graph = helper.make_graph(
        [node], "probe", edges[:-1], edges[-1:], [numpy_helper.from_array(v, n) for n, v in stored.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return expected, model, feeds


@pytest.mark.spread(30)
@pytest.mark.parametrize("op_type", sorted(LIMITS))
def test_every_operator_is_exact_within_its_limit_and_the_limit_is_no_smaller_than_it_is(op_type):
    limit = LIMITS[op_type]
    expected, model, feeds = computed(op_type, limit)
    for runtime in (onnxruntime, openvino):
        np.testing.assert_array_equal(runtime(model, feeds)[0], expected, err_msg=f"{op_type} in {runtime.__name__}")
    if limit == FLOAT32 and op_type not in WITHOUT_BEYOND:
        expected, model, feeds = computed(op_type, INT32)
        assert np.any(openvino(model, feeds)[0] != expected), f"{op_type} is exact on all of int32 now"


def test_codes_leave_exactly_with_their_zero_point_taken_off_as_an_integer():
    codes, scale = np.arange(-255, 256, dtype=np.int32), np.float32(0.0123457)
    node = helper.make_node("DequantizeLinear", ["x", "scale"], ["found"])
    edges = [helper.make_tensor_value_info("x", 6, [511]), helper.make_tensor_value_info("found", 1, [511])]
    graph = helper.make_graph([node], "probe", edges[:1], edges[1:], [numpy_helper.from_array(scale, "scale")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    for runtime in (onnxruntime, openvino):
        np.testing.assert_array_equal(runtime(model, {"x": codes})[0], codes.astype(np.float32) * scale)
