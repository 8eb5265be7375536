"""Activation functions written as arithmetic, and layers with the activation behind them."""

import math

import numpy as np
import pytest
from norm_models import quantized_tensors
from onnx import helper
from qdq_models import convnet, make_model, mlp, run, weights

from onnx_backend.opening.read_graph import read_graph
from qsdk import w4a8, w8a8, w8a16
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.supergroup import Supergroup

SHAPE = [2, 8]
INPUT = np.linspace(-6, 6, 16, dtype=np.float32).reshape(SHAPE)


class Tape:
    """Writes the nodes of an expression over x: `tape("Mul", "x", 0.5)`."""

    def __init__(self):
        self.nodes, self.stored = [], {}

    def __call__(self, type, *operands, **attributes):
        names = [self._name(operand) for operand in operands]
        self.nodes.append(helper.make_node(type, names, [f"t{len(self.nodes)}"], f"n{len(self.nodes)}", **attributes))
        return f"t{len(self.nodes) - 1}"

    def _name(self, operand):
        if isinstance(operand, str):
            return operand
        name = f"c{len(self.stored)}"
        self.stored[name] = np.float32(operand)
        return name

    def model(self):
        self.nodes[-1].output[0] = "y"
        return make_model(self.nodes, {"x": SHAPE}, {"y": SHAPE}, self.stored)


def groups(model) -> list[Supergroup]:
    found = match_supergroups(read_graph(model))
    assert found.near_misses == ()
    return list({group.ops: group for _, group in sorted(found.groups.items())}.values())


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def hard_swish(x):
    return x * np.clip(x + 3, 0, 6) / 6


def mish(x):
    return x * np.tanh(np.log1p(np.exp(x)))


def rise(t, by="Div"):
    return t("Add", 1.0, t("Erf", t("Div", "x", math.sqrt(2)) if by == "Div" else t("Mul", "x", math.sqrt(0.5))))


def cube(t, how):
    if how == "Pow":
        return t("Mul", 0.044715, t("Pow", "x", 3.0))
    if how == "x x x":
        return t("Mul", t("Mul", "x", t("Mul", "x", "x")), 0.044715)
    return t("Mul", t("Mul", t("Mul", 0.044715, "x"), "x"), "x")


def curve(t, how):
    if how == "factored":
        factor = t("Add", 1.0, t("Mul", t("Mul", 0.044715, "x"), "x"))
        return t("Tanh", t("Mul", t("Mul", "x", 0.7978845608), factor))
    return t("Tanh", t("Mul", 0.7978845608, t("Add", "x", cube(t, how))))


def relu6(t, how="Clip"):
    moved = t("Add", "x", 3.0)
    if how == "Clip":
        return t("Clip", moved, 0.0, 6.0)
    return t("Min", t("Max", moved, 0.0) if how == "Max" else t("Relu", moved), 6.0)


SPELLINGS = {
    "Gelu": (
        gelu,
        [
            lambda t: t("Mul", t("Mul", "x", 0.5), rise(t)),
            lambda t: t("Mul", rise(t, "Mul"), t("Div", "x", 2.0)),
            lambda t: t("Mul", t("Mul", "x", rise(t)), 0.5),
            lambda t: t("Mul", 0.5, t("Mul", rise(t), "x")),
            lambda t: t("Mul", "x", t("Mul", 0.5, rise(t))),
            lambda t: t("Mul", "x", t("Div", rise(t), 2.0)),
            lambda t: t("Div", t("Mul", "x", rise(t)), 2.0),
            lambda t: t("Mul", "x", t("Add", 0.5, t("Mul", 0.5, t("Erf", t("Div", "x", math.sqrt(2)))))),
            lambda t: t("Mul", t("Mul", "x", 0.5), t("Add", curve(t, "Pow"), 1.0)),
            lambda t: t("Mul", 0.5, t("Mul", "x", t("Add", 1.0, curve(t, "x x x")))),
            lambda t: t("Mul", "x", t("Mul", t("Add", 1.0, curve(t, "left to right")), 0.5)),
            lambda t: t("Mul", t("Mul", 0.5, "x"), t("Add", 1.0, curve(t, "factored"))),
        ],
    ),
    "SiLU": (
        lambda x: x * sigmoid(x),
        [
            lambda t: t("Mul", "x", t("Sigmoid", "x")),
            lambda t: t("Mul", t("Sigmoid", "x"), "x"),
            lambda t: t("Div", "x", t("Add", 1.0, t("Exp", t("Neg", "x")))),
        ],
    ),
    "QuickGelu": (
        lambda x: x * sigmoid(1.702 * x),
        [lambda t: t("Mul", "x", t("Sigmoid", t("Mul", 1.702, "x")))],
    ),
    "Swish": (lambda x: x * sigmoid(3 * x), [lambda t: t("Mul", "x", t("Sigmoid", t("Mul", "x", 3.0)))]),
    "HardSwish": (
        hard_swish,
        [
            lambda t: t("Mul", "x", t("HardSigmoid", "x", alpha=1 / 6, beta=0.5)),
            lambda t: t("Mul", "x", t("Div", relu6(t), 6.0)),
            lambda t: t("Div", t("Mul", "x", relu6(t)), 6.0),
            lambda t: t("Mul", t("Mul", relu6(t, "Max"), "x"), 1 / 6),
            lambda t: t("Mul", t("Div", "x", 6.0), relu6(t, "Relu")),
            lambda t: t("Mul", t("Clip", t("Add", t("Mul", "x", 1 / 6), 0.5), 0.0, 1.0), "x"),
        ],
    ),
    "HardSigmoid": (
        lambda x: np.clip(x + 3, 0, 6) / 6,
        [lambda t: t("Div", relu6(t), 6.0), lambda t: t("Mul", 1 / 6, relu6(t, "Relu"))],
    ),
    "Mish": (
        mish,
        [
            lambda t: t("Mul", "x", t("Tanh", t("Softplus", "x"))),
            lambda t: t("Mul", t("Tanh", t("Log", t("Add", 1.0, t("Exp", "x")))), "x"),
        ],
    ),
    "Softplus": (
        lambda x: np.log1p(np.exp(x)),
        [
            lambda t: t("Log", t("Add", t("Exp", "x"), 1.0)),
            lambda t: t("Where", t("Greater", "x", 20.0), "x", t("Softplus", "x")),
        ],
    ),
    "LogSigmoid": (lambda x: -np.log1p(np.exp(-x)), [lambda t: t("Log", t("Sigmoid", "x"))]),
    "Tanhshrink": (lambda x: x - np.tanh(x), [lambda t: t("Sub", "x", t("Tanh", "x"))]),
    "Softsign": (lambda x: x / (1 + np.abs(x)), [lambda t: t("Div", "x", t("Add", 1.0, t("Abs", "x")))]),
}
CASES = [(name, index) for name, (_, spellings) in SPELLINGS.items() for index in range(len(spellings))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_each_spelling_is_one_op_and_means_its_name(name, index):
    meaning, spellings = SPELLINGS[name]
    tape = Tape()
    spellings[index](tape)
    model = tape.model()
    (group,) = groups(model)
    assert (group.name, len(group.ops)) == (name, len(model.graph.node))
    assert quantized_tensors(model) == {"x", "y"}
    (y,) = run(model, {"x": INPUT})
    np.testing.assert_allclose(y, meaning(INPUT.astype(np.float64)), atol=1e-3)


NONE = {
    "a gate": lambda t: t("Mul", "x", t("Sigmoid", t("Relu", "x"))),
    "another slope": lambda t: t("Mul", "x", t("HardSigmoid", "x", alpha=0.2, beta=0.5)),
    "another bound": lambda t: t("Mul", "x", t("Div", t("Clip", t("Add", "x", 3.0), 0.0, 5.0), 6.0)),
    "another shift": lambda t: t("Mul", "x", t("Div", t("Clip", t("Add", "x", 2.0), 0.0, 6.0), 6.0)),
    "another softsign": lambda t: t("Div", "x", t("Add", 2.0, t("Abs", "x"))),
    "another threshold": lambda t: t("Where", t("Greater", "x", 2.0), "x", t("Softplus", "x")),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_none_of_them_is_left_alone(name):
    tape = Tape()
    NONE[name](tape)
    assert all("+" in group.name for group in groups(tape.model()))


def test_a_gelu_with_another_divisor_is_a_near_miss():
    tape = Tape()
    tape("Mul", tape("Mul", "x", 0.5), tape("Add", 1.0, tape("Erf", tape("Div", "x", 2.0))))
    found = match_supergroups(read_graph(tape.model()))
    assert [str(miss) for miss in found.near_misses] == [
        "Gelu-like, not fused: 2 stands where 1.41421 was expected",
    ]


def test_a_sigmoid_that_is_read_elsewhere_is_no_silu():
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"], "sigmoid"),
        helper.make_node("Mul", ["x", "s"], ["y"], "mul"),
        helper.make_node("Tanh", ["s"], ["z"], "tanh"),
    ]
    model = make_model(nodes, {"x": SHAPE}, {"y": SHAPE, "z": SHAPE}, {})
    found = match_supergroups(read_graph(model))
    assert found.groups == {}
    assert [str(miss) for miss in found.near_misses] == [
        "SiLU-like, not fused: 's' inside it is read by Tanh 'tanh' outside it"
    ]
    assert quantized_tensors(model) == {"x", "s", "y", "z"}


# layers with their activation


@pytest.mark.parametrize("activation", ["Relu", "Clip"])
@pytest.mark.parametrize("head", ["Add", "Sub", "Mul"])
def test_arithmetic_of_two_tensors_takes_its_activation_in(head, activation):
    nodes = [helper.make_node(head, ["x", "z"], ["s"], "head")]
    bounds = ["low", "high"] if activation == "Clip" else []
    nodes.append(helper.make_node(activation, ["s", *bounds], ["y"], "activation"))
    stored = {name: np.float32(value) for name, value in zip(bounds, (0.0, 6.0), strict=False)}
    model = make_model(nodes, {"x": SHAPE, "z": SHAPE}, {"y": SHAPE}, stored)
    assert [group.name for group in groups(model)] == [f"{head}+{activation}"]
    assert quantized_tensors(model) == {"x", "z", "y"}


@pytest.mark.parametrize(
    ("type", "slope", "grouped"), [("LeakyRelu", 0.1, True), ("LeakyRelu", -0.1, False), ("LeakyRelu", 0.0, False)]
)
def test_a_positive_slope_is_taken_in(type, slope, grouped):
    nodes = [helper.make_node("Add", ["x", "z"], ["s"], "sum"), helper.make_node(type, ["s"], ["y"], alpha=slope)]
    model = make_model(nodes, {"x": SHAPE, "z": SHAPE}, {"y": SHAPE}, {})
    assert [group.name for group in groups(model)] == (["Add+LeakyRelu"] if grouped else [])


@pytest.mark.parametrize(
    ("slope", "reshaped", "grouped"), [(0.2, False, True), (0.2, True, True), (-0.2, False, False)]
)
def test_a_prelu_with_a_stored_slope_is_taken_in_and_its_slope_quantized(slope, reshaped, grouped):
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv")]
    if reshaped:
        nodes.append(helper.make_node("Reshape", ["slope", "shape"], ["r"], "reshape"))
    nodes.append(helper.make_node("PRelu", ["c", "r" if reshaped else "slope"], ["y"], "prelu"))
    stored = weights(w=(4, 3, 1, 1)) | {"slope": np.full((4,) if reshaped else (4, 1, 1), slope, np.float32)}
    stored |= {"shape": np.array([4, 1, 1])} if reshaped else {}
    model = make_model(nodes, {"x": [1, 3, 4, 4]}, {"y": [1, 4, 4, 4]}, stored)
    assert [group.name for group in groups(model)] == (["Conv+PRelu"] if grouped else [])
    found = quantized_tensors(model, w8a8().for_dialect("openvino"))
    assert ("c" in found) is not grouped
    assert "slope" in found


SLOPE = {"LeakyRelu": ["s"], "PRelu": ["s", "slope"]}


@pytest.mark.parametrize("slope", SLOPE)
@pytest.mark.parametrize(
    ("head", "config", "apart"),
    [
        ("Conv", w8a8(), True),
        ("Conv", w8a8().for_dialect("onnxruntime"), True),
        ("Conv", w8a8().for_dialect("openvino"), False),
        ("Conv", w8a8().for_dialect("tensorrt"), False),
        ("Conv", w8a8().override(op_type=("LeakyRelu", "PRelu"), supergroup=True), False),
        # without 8 bits on all sides, ONNX Runtime has no integer kernel that a pair could help
        ("Conv", w8a16(), False),
        ("Conv", w4a8(), False),
        ("Conv", w8a8().skip("head:weight"), False),
        ("Conv", w8a8().override(dynamic_activations=True), False),
        ("Conv", w8a16().for_dialect("qnn"), True),
        *((head, w8a8(), False) for head in ("MatMul", "MatMul+Add", "Add")),
        *((head, w8a8().for_dialect("qnn"), True) for head in ("MatMul", "MatMul+Add", "Add")),
    ],
)
def test_whether_a_slope_is_one_op_with_its_layer_depends_on_the_runtime(slope, head, config, apart):
    shape = [1, 8, 8] if "MatMul" in head else [1, 8, 4, 4]
    stored = weights(w=(8, 8) if "MatMul" in head else (8, 8, 1, 1), b=(8,)) | {"slope": np.full((1,), 0.1, np.float32)}
    second = {"Add": "x", "Conv": "w"}.get(head, "w")
    nodes = [helper.make_node(head.split("+")[0], ["x", second], ["p" if "+" in head else "s"], "head")]
    nodes += [helper.make_node("Add", ["p", "b"], ["s"], "bias")] if "+" in head else []
    nodes.append(helper.make_node(slope, SLOPE[slope], ["y"], "slope"))
    found = quantized_tensors(make_model(nodes, {"x": shape}, {"y": shape}, stored), config)
    assert ("s" in found) is apart
    assert "p" not in found  # a bias stays with its layer


def test_a_clip_with_computed_bounds_is_an_op_of_its_own():
    nodes = [
        helper.make_node("Add", ["x", "z"], ["s"], "head"),
        helper.make_node("Clip", ["s", "low"], ["y"], "clip"),
    ]
    model = make_model(nodes, {"x": SHAPE, "z": SHAPE, "low": []}, {"y": SHAPE}, {})
    assert groups(model) == []
    assert "s" in quantized_tensors(model)


def test_layers_of_ordinary_networks():
    assert [group.name for group in groups(mlp())] == ["MatMul+Add+Relu", "MatMul+Add"]
    assert [group.name for group in groups(convnet())] == ["Conv+Relu", "SiLU"]


def test_a_batch_norm_that_was_not_folded_stands_apart_from_its_convolution():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"], "bn"),
        helper.make_node("Relu", ["n"], ["y"], "relu"),
    ]
    stored = weights(w=(4, 3, 1, 1), g=(4,), b=(4,), m=(4,)) | {"v": np.ones(4, np.float32)}
    model = make_model(nodes, {"x": [1, 3, 4, 4]}, {"y": [1, 4, 4, 4]}, stored)
    # an unfolded BatchNormalization is a site of its own, so that a rule can keep it in float16
    assert [group.name for group in groups(model)] == ["BatchNormalization+Relu"]
    assert quantized_tensors(model) == {"x", "w", "c", "y"}
