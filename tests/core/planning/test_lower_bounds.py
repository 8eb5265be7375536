"""Lower bounds of tensors: never above a value that ONNX Runtime computes, and as high as the ops in front show."""

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper
from qdq_models import LEVELS, make_model

from onnx_backend.opening.read_graph import read_graph
from qsdk.core.planning.lower_bounds import lower_bounds

STORED = {
    "none": np.zeros(1, np.float32),
    "little": np.full(1, 1e-3, np.float32),
    "some": np.full((1, 4), 0.5, np.float32),
    "minus": np.full(1, -0.25, np.float32),
    "two": np.full(1, 2.0, np.float32),
    "minus_one": np.full(1, -1.0, np.float32),
    "nine": np.full(1, 9.0, np.float32),
    "matrix": np.full((4, 4), 0.5, np.float32),
    "last": np.array([-1], np.int64),
    "sides": np.array([0, 1, 0, 0], np.int64),
    "scale": np.full((), 0.1, np.float32),
    "point": np.full((), 3, np.uint8),
}
ONE = [
    "Relu",
    "Abs",
    "Exp",
    "Sigmoid",
    "Softplus",
    "Softmax",
    "Tanh",
    "Sin",
    "Elu",
    "Sqrt",
    "Reciprocal",
    "Neg",
    "Identity",
]
TWO = ["Add", "Mul", "Div", "Max", "Min", "Sub", "Sum"]
OTHERS = ["Where", "Clip", "Pow", "Raised", "ReduceSum", "ReduceMean", "ReduceMax", "Pair", "Square", "Shifted"]


def nodes_of(kind: str, operands: list[str], result: str) -> list[NodeProto]:
    """The nodes that compute `result` from two tensors."""
    first, second = operands
    node = helper.make_node
    match kind:
        case "Where":
            return [
                node("Greater", ["x", "none"], [f"{result}_c"]),
                node("Where", [f"{result}_c", *operands], [result]),
            ]
        case "Clip":
            return [node("Clip", [first, "two"], [result])]
        case "Pow":
            return [node("Pow", [first, "two"], [result])]
        case "Raised":
            return [node("Pow", operands, [result])]
        case "Square":
            return [node("Mul", [first, first], [result])]
        case "Shifted":  # by its largest: never above 0, and 0 somewhere
            most = node("ReduceMax", [first, "last"], [f"{result}_m"], keepdims=1)
            return [most, node("Sub", [first, f"{result}_m"], [result])]
        case "ReduceSum" | "ReduceMean" | "ReduceMax":
            return [node(kind, [first, "last"], [result], keepdims=1)]
        case "Pair":
            codes = node("QuantizeLinear", [first, "scale", "point"], [f"{result}_q"])
            return [codes, node("DequantizeLinear", [f"{result}_q", "scale", "point"], [result])]
    return [node(kind, [first] if kind in ONE else [first, second], [result])]


@given(
    st.lists(
        st.tuples(st.sampled_from([*ONE, *TWO, *OTHERS]), st.integers(0, 99), st.integers(0, 99)),
        min_size=3,
        max_size=9,
    ),
    st.integers(0, 2**32 - 1),
)
def test_no_value_that_the_runtime_computes_is_below_its_bound(steps, seed):
    names, nodes = ["x", "y", "little", "some", "minus", "two", "minus_one", "nine"], []
    for number, (kind, one, two) in enumerate(steps):
        nodes += nodes_of(kind, [names[-1 - one % len(names)], names[two % len(names)]], f"t{number}")
        names.append(f"t{number}")
    made = {name: ["a", "b"] for name in names if name.startswith("t") and name != "two"}
    model = make_model(nodes, {"x": [3, 4], "y": [3, 4]}, {}, STORED)
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made)
    graph = read_graph(model)
    bounds = {graph.tensors[tensor].name: bound for tensor, bound in lower_bounds(graph).items()}
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = LEVELS[0], 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(seed)
    data = {name: (rng.normal(size=(3, 4)) * 10.0 ** rng.integers(-3, 2)).astype(np.float32) for name in ("x", "y")}
    for name, values in zip(made, session.run(list(made), data), strict=True):
        if np.isnan(values).any():  # the code of a NaN is any
            break
        finite = values[np.isfinite(values)]
        if name in bounds and finite.size:
            assert finite.min() >= bounds[name] - abs(bounds[name]) * 1e-5 - 1e-44, (name, finite.min(), bounds[name])


@pytest.mark.parametrize(
    ("steps", "bound"),
    [
        ([("Square", "x", "x"), ("Add", "t0", "some")], 0.5),
        ([("Pow", "x", "x"), ("Add", "t0", "little"), ("Sqrt", "t1", "x")], 1e-3**0.5),
        ([("Exp", "x", "x"), ("Max", "x", "some"), ("Max", "x", "little"), ("Where", "t1", "t2")], 1e-3),
        ([("Square", "x", "x"), ("Add", "t0", "some"), ("Mul", "t1", "t1")], 0.25),
        ([("Square", "x", "x"), ("Add", "t0", "some"), ("Div", "t1", "two")], 0.25),
        ([("Square", "x", "x"), ("Add", "t0", "some"), ("Pow", "t1", "two")], 0.25),
        ([("Square", "x", "x"), ("Add", "t0", "some"), ("Raised", "t1", "minus_one")], 1e-45),
        ([("Square", "x", "x"), ("Add", "t0", "some"), ("Raised", "t1", "y")], 1e-45),
        ([("Abs", "x", "x"), ("Raised", "t0", "y")], 0.0),
        ([("Abs", "x", "x"), ("MatMul", "t0", "matrix")], 0.0),
        ([("MatMul", "x", "matrix")], None),
        ([("Exp", "x", "x"), ("ReduceSum", "t0", "x")], 1e-45),
        ([("Shifted", "x", "x"), ("Exp", "t0", "x"), ("ReduceSum", "t1", "x")], 1.0),
        ([("Clip", "x", "x"), ("Min", "t0", "some")], 0.5),
        ([("Max", "x", "little")], 1e-3),
        ([("Elu", "x", "x")], -1.0),
        ([("Tanh", "x", "x")], -1.0),
        ([("Abs", "x", "x"), ("Tanh", "t0", "x")], 0.0),
        ([("Abs", "x", "x"), ("Sin", "t0", "x")], -1.0),
        ([("Clip", "x", "x"), ("Pair", "t0", "x")], 1.9),
        ([("Pair", "x", "x")], -0.3),
        ([("Neg", "x", "x")], None),
        ([("Add", "x", "some")], None),
        ([("Sub", "some", "x")], None),
    ],
)  # fmt: skip
def test_the_bound_is_as_high_as_the_ops_in_front_show(steps, bound):
    nodes = [n for number, (kind, *operands) in enumerate(steps) for n in nodes_of(kind, operands, f"t{number}")]
    last = f"t{len(steps) - 1}"
    graph = read_graph(make_model(nodes, {"x": [3, 4], "y": [3, 4]}, {last: None}, STORED))
    found = lower_bounds(graph).get(next(i for i, t in enumerate(graph.tensors) if t.name == last))
    assert found == (None if bound is None else pytest.approx(bound, rel=1e-5, abs=1e-45))


def test_what_pads_with_zeros_is_bounded_by_0():
    pad = helper.make_node("Pad", ["t1", "sides"], ["p"])
    square = [*nodes_of("Square", ["x", "x"], "t0"), *nodes_of("Add", ["t0", "some"], "t1")]
    graph = read_graph(make_model([*square, pad], {"x": [3, 4]}, {"p": [3, 5]}, STORED))
    assert lower_bounds(graph)[next(i for i, t in enumerate(graph.tensors) if t.name == "p")] == 0.0


def test_a_row_of_random_numbers_less_the_largest_has_a_0():
    node = helper.make_node
    nodes = [node("RandomUniform", [], ["r"], shape=[3, 4]), node("ReduceMax", ["r", "last"], ["most"])]
    nodes += [
        node("Sub", ["r", "most"], ["less"]),
        node("Exp", ["less"], ["e"]),
        node("ReduceSum", ["e", "last"], ["s"]),
    ]
    graph = read_graph(make_model(nodes, {"x": [3, 4]}, {"s": [3, 1]}, STORED))
    found = {graph.tensors[tensor].name: bound for tensor, bound in lower_bounds(graph).items()}
    assert found["s"] == pytest.approx(1.0)
