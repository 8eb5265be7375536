"""What is computed while a file is opened is what the runtime computes."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.passes import fold_constants
from onnx_backend.passes.fold_constants import LARGEST, fold

node = helper.make_node
LEFT, RIGHT = np.array([-7, -6, -1, 0, 5, 7, 2**40, 9]), np.array([2, -4, 3, 5, -3, 7, 10, -2])
FLOATS = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49, -0.0, 7.7], np.float32)
GRID = np.arange(24).reshape(2, 3, 4)


def i(*values):
    return np.array(values, np.int64)


# node, its inputs by name
CASES = [
    *(
        (node(op, ["a", "b"], ["y"]), {"a": LEFT, "b": RIGHT})
        for op in ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min")
    ),
    *((node(op, ["a", "b"], ["y"]), {"a": LEFT, "b": RIGHT}) for op in ("Equal", "Greater", "LessOrEqual")),
    (node("Mod", ["a", "b"], ["y"], fmod=1), {"a": LEFT, "b": RIGHT}),
    *((node(op, ["a"], ["y"]), {"a": FLOATS}) for op in ("Round", "Floor", "Ceil", "Sign", "Abs", "Neg", "Exp", "Erf")),
    *((node("Cast", ["a"], ["y"], to=to), {"a": FLOATS}) for to in (TensorProto.INT64, TensorProto.BOOL, 10, 11)),
    (node("Cast", ["a"], ["y"], to=TensorProto.INT32), {"a": LEFT[:6]}),
    (node("Pow", ["a", "b"], ["y"]), {"a": FLOATS, "b": np.float32(2)}),
    (node("Pow", ["a", "b"], ["y"]), {"a": i(2, 3), "b": i(3, 2)}),
    (node("Gather", ["a", "b"], ["y"], axis=1), {"a": GRID, "b": i(-1, 0)}),
    (node("Slice", ["a", "s", "e", "x", "t"], ["y"]), {"a": GRID, "s": i(-1), "e": i(-9), "x": i(2), "t": i(-2)}),
    (node("Slice", ["a", "s", "e"], ["y"]), {"a": GRID, "s": i(0, 1), "e": i(1, 2**62)}),
    (node("Reshape", ["a", "s"], ["y"]), {"a": GRID, "s": i(0, -1)}),
    (node("Squeeze", ["a"], ["y"]), {"a": GRID[None]}),
    (node("Unsqueeze", ["a", "x"], ["y"]), {"a": GRID, "x": i(-1, 0)}),
    (node("Concat", ["a", "b"], ["y"], axis=-1), {"a": GRID, "b": GRID}),
    (node("Expand", ["a", "s"], ["y"]), {"a": i(1, 2).reshape(2, 1), "s": i(2, 1, 3)}),
    (node("Tile", ["a", "s"], ["y"]), {"a": GRID, "s": i(1, 2, 1)}),
    (node("Range", ["a", "b", "c"], ["y"]), {"a": np.int64(5), "b": np.int64(-4), "c": np.int64(-3)}),
    (node("Range", ["a", "b", "c"], ["y"]), {n: np.float32(v) for n, v in {"a": 0, "b": 1, "c": 0.3}.items()}),
    (node("ConstantOfShape", ["a"], ["y"], value=numpy_helper.from_array(i(7))), {"a": i(2, 3)}),
    (node("ReduceSum", ["a", "x"], ["y"], keepdims=0), {"a": GRID, "x": i(-1)}),
    (node("ReduceProd", ["a"], ["y"], keepdims=0), {"a": GRID + 1.0}),
    (node("ReduceMax", ["a", "x"], ["y"]), {"a": GRID, "x": i(0, 2)}),
    (node("Transpose", ["a"], ["y"], perm=[2, 0, 1]), {"a": GRID}),
    (node("Where", ["c", "a", "b"], ["y"]), {"c": LEFT > 0, "a": LEFT, "b": RIGHT}),
    (node("NonZero", ["a"], ["y"]), {"a": GRID % 3}),
    (node("Split", ["a", "s"], ["y", "z"], axis=1), {"a": GRID, "s": i(1, 2)}),
    (node("TopK", ["a", "k"], ["y", "z"]), {"a": FLOATS, "k": i(3)}),
    (node("OneHot", ["a", "d", "v"], ["y"]), {"a": i(0, -1, 5), "d": np.int64(3), "v": i(0, 1)}),
    (node("Pad", ["a", "p"], ["y"]), {"a": GRID, "p": i(0, 0, 1, 0, 1, 0)}),
    (node("CumSum", ["a", "x"], ["y"], reverse=1), {"a": GRID, "x": np.int64(1)}),
    (node("Trilu", ["a"], ["y"], upper=0), {"a": GRID}),
    (node("ScatterND", ["a", "j", "u"], ["y"]), {"a": i(1, 2, 3), "j": i(2).reshape(1, 1), "u": i(9)}),
    (node("Clip", ["a", "l", "h"], ["y"]), {"a": FLOATS, "l": np.float32(-1), "h": np.float32(2)}),
    (node("Size", ["a"], ["y"]), {"a": GRID}),
]


def by_runtime(only, values):
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in values.items()
    ]
    outputs = [helper.make_value_info(name, helper.make_tensor_type_proto(0, None)) for name in only.output]
    for value in outputs:
        value.type.Clear()
    graph = helper.make_graph([only], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, values)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_folded_node_holds_what_the_runtime_computes(number):
    only, values = CASES[number]
    values = {name: np.asarray(value) for name, value in values.items()}
    found = fold(only, values, {"": 21}, weights_stay=False)
    assert found is not None
    for name, wanted in zip(only.output, by_runtime(only, values), strict=True):
        assert found[name].dtype == wanted.dtype
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("only", "values"),
    [
        (node("ConstantOfShape", ["a"], ["y"]), {"a": i(2**20, 2**20, 2**20)}),
        (node("Expand", ["a", "s"], ["y"]), {"a": i(1), "s": i(2**50)}),
        (node("Tile", ["a", "s"], ["y"]), {"a": i(1), "s": i(2**40)}),
        (node("Range", ["a", "b", "c"], ["y"]), {"a": np.int64(0), "b": np.int64(2**60), "c": np.int64(1)}),
        (node("Range", ["a", "b", "c"], ["y"]), {"a": np.float32(0), "b": np.float32(1), "c": np.float32(0)}),
        (node("OneHot", ["a", "d", "v"], ["y"]), {"a": i(0), "d": np.int64(2**50), "v": i(0, 1)}),
        (node("Pad", ["a", "p"], ["y"]), {"a": i(0), "p": i(0, 2**50)}),
        (node("ConstantOfShape", ["a"], ["y"]), {"a": i(LARGEST + 1)}),
    ],
)
def test_what_would_be_large_is_never_computed(only, values, monkeypatch):
    asked = []
    monkeypatch.setattr(fold_constants, "ReferenceEvaluator", lambda *args, **options: asked.append(args))
    assert fold(only, values, {"": 21}, weights_stay=False) is None
    assert asked == []


def test_weights_stay_where_they_are_but_bounds_are_computed():
    weight, two = np.ones((4, 4), np.float32), np.ones(2, np.float32)
    turn = node("Transpose", ["a"], ["y"])
    assert fold(turn, {"a": weight}, {"": 21}, weights_stay=True) is None
    assert fold(turn, {"a": weight}, {"": 21}, weights_stay=False) is not None
    assert (
        fold(node("Concat", ["a", "b"], ["y"], axis=0), {"a": two, "b": two}, {"": 21}, weights_stay=True) is not None
    )
    assert fold(node("Mul", ["a", "a"], ["y"]), {"a": weight}, {"": 21}, weights_stay=True) is not None


@pytest.mark.parametrize(
    "only",
    [node("Relu", ["x"], ["y"]), node("RandomNormalLike", ["a"], ["y"]), node("Relu", ["a"], ["y"], domain="other")],
)
def test_what_is_not_constant_or_not_plain_is_no_constant(only):
    assert fold(only, {"a": FLOATS}, {"": 21, "other": 1}, weights_stay=False) is None


def test_an_expand_to_its_own_shape_is_no_larger_than_it_is():
    values = {"a": np.arange(40), "s": i(40)}
    found = fold(node("Expand", ["a", "s"], ["y"]), values, {"": 21}, weights_stay=False, limit=40)
    np.testing.assert_array_equal(found["y"], values["a"])
    assert (
        fold(node("Expand", ["a", "s"], ["y"]), {"a": i(1), "s": i(41)}, {"": 21}, weights_stay=False, limit=40) is None
    )
