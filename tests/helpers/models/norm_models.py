"""Norms written as arithmetic, in every spelling that exporters use, beside what they mean in NumPy."""

from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from qdq_models import make_model

from onnx_backend.opening.read_graph import read_graph
from qsdk import QuantConfig, w8a8
from qsdk.core.planning.make_plan import make_plan

SHAPE = (2, 6, 4, 8)
EPSILON = 1e-3
SQUARES = ("Pow", "Mul")
DIVISIONS = ("Div", "Reciprocal", "1/x", "Pow -0.5")


@dataclass(frozen=True)
class Norm:
    """One spelling: which norm, how each step is written, and what is wrong with it, if anything is."""

    kind: str = "layer"
    square: str = "Pow"
    divide: str = "Div"
    gamma: str | None = "right"
    beta: str | None = "right"
    axes: tuple[int, ...] = (-1,)
    opset: int = 17
    epsilon: str = "inside"
    centred: str = "once"
    variance: str = "squares"
    exponent: float = 2.0
    vectors: bool = False
    casts: str = ""
    gamma_shape: tuple[int, ...] | None = None


class _Nodes:
    """Writes nodes one after another."""

    def __init__(self, norm: Norm) -> None:
        self.norm, self.nodes, self.stored = norm, [], {}
        self.last = "x"

    def __call__(self, type, *operands, **attributes):
        names = [o if isinstance(o, str) else self.constant(o) for o in operands]
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(type, names, [output], f"node{len(self.nodes)}", **attributes))
        return output

    def constant(self, value):
        name = f"c{len(self.stored)}"
        if isinstance(value, float):
            value = np.full((1,) if self.norm.vectors else (), value, np.float32)
        self.stored[name] = np.asarray(value)
        return name

    def reduce(self, type, x):
        axes = list(self.norm.axes)
        by_attribute = self.norm.opset < (13 if type == "ReduceSum" else 18)
        given = {"axes": axes} if by_attribute else {}
        return self(type, x, *([] if by_attribute else [np.asarray(axes, np.int64)]), keepdims=1, **given)

    def cast(self, x, dtype):
        return self("Cast", x, to=dtype)


def _square(n: _Nodes, x: str) -> str:
    if n.norm.square == "Mul":
        return n("Mul", x, x)
    return n("Pow", x, n.norm.exponent)


def _centred(n: _Nodes, x: str) -> str:
    if n.norm.kind == "rms":
        return x
    if n.norm.centred == "negated":
        return n("Add", n("Neg", n.reduce("ReduceMean", x)), x)
    return n("Sub", x, n.reduce("ReduceMean", x))


def _variance(n: _Nodes, x: str, centred: str) -> str:
    if n.norm.variance == "difference":
        mean = n.reduce("ReduceMean", x)
        return n("Sub", n.reduce("ReduceMean", _square(n, x)), _square(n, mean))
    if n.norm.variance == "absolute":
        return n.reduce("ReduceMean", n("Abs", centred))
    if n.norm.variance == "sum":
        count = float(np.prod([SHAPE[axis] for axis in n.norm.axes]))
        return n("Div", n.reduce("ReduceSum", _square(n, centred)), count)
    if n.norm.variance == "unbiased":
        squares = n.reduce("ReduceMean", _square(n, centred))
        return n("Div", n("Mul", squares, 8.0), 7.0)
    return n.reduce("ReduceMean", _square(n, centred))


def _with_epsilon(n: _Nodes, x: str) -> str:
    if n.norm.epsilon == "none":
        return x
    value = 10.0 if n.norm.epsilon == "huge" else EPSILON
    return n("Add", n.constant(value), x) if n.norm.epsilon == "first" else n("Add", x, value)


def _divided(n: _Nodes, x: str, variance: str) -> str:
    late = n.norm.epsilon == "late"
    inside = variance if late else _with_epsilon(n, variance)
    if n.norm.divide == "Pow -0.5":
        return n("Mul", x, n("Pow", inside, -0.5))
    root = n("Sqrt", inside)
    root = _with_epsilon(n, root) if late else root
    if n.norm.divide == "Div":
        return n("Div", x, root)
    return n("Mul", x, n("Reciprocal", root) if n.norm.divide == "Reciprocal" else n("Div", 1.0, root))


def _affine(n: _Nodes, x: str, type: str, name: str, side: str | None) -> str:
    if side is None:
        return x
    return n(type, name, x) if side == "left" else n(type, x, name)


def build(norm: Norm) -> ModelProto:
    """The model: x -> y, with stored `gamma` and `beta`."""
    n = _Nodes(norm)
    x = n.cast("x", TensorProto.DOUBLE) if "in" in norm.casts else "x"
    y = normed(n, x)
    y = n.cast(y, TensorProto.FLOAT) if "between" in norm.casts else y
    y = _affine(n, y, "Mul", "gamma", norm.gamma)
    y = _affine(n, y, "Add", "beta", norm.beta)
    if "out" in norm.casts:
        n.cast(y, TensorProto.FLOAT)
    n.nodes[-1].output[0] = "y"
    shape = norm.gamma_shape or SHAPE[norm.axes[0] :]
    dtype = np.float64 if "in" in norm.casts and "between" not in norm.casts else np.float32
    rng = np.random.default_rng(0)
    affine = {name: rng.normal(size=shape).astype(dtype) for name in ("gamma", "beta") if getattr(norm, name)}
    if "in" in norm.casts:
        n.stored = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in n.stored.items()}
    return make_model(
        n.nodes, {"x": SHAPE}, {"y": SHAPE}, {**n.stored, **affine}, norm.opset, 8 if norm.opset < 19 else 10
    )


def normed(n: _Nodes, x: str) -> str:
    centred = _centred(n, x)
    twice = n.norm.centred == "twice" and n.norm.variance != "difference"  # which needs no distance
    again = _centred(n, x) if twice else centred
    return _divided(n, centred, _variance(n, x, again))


def meaning(norm: Norm, x, gamma=None, beta=None):
    """What the norm is by definition, in float64."""
    x = x.astype(np.float64)
    difference = x - x.mean(norm.axes, keepdims=True) if norm.kind == "layer" else x
    epsilon = 0.0 if norm.epsilon == "none" else EPSILON
    y = difference / np.sqrt((difference**2).mean(norm.axes, keepdims=True) + epsilon)
    return y * (1 if gamma is None else gamma) + (0 if beta is None else beta)


def error_of(model: ModelProto, norm: Norm) -> float:
    """The largest difference between the model, run by onnx's reference, and the meaning."""
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    x = np.random.default_rng(1).normal(1.0, 2.0, SHAPE).astype(np.float32)
    (y,) = ReferenceEvaluator(model).run(None, {"x": x})
    return float(np.abs(y - meaning(norm, x, stored.get("gamma"), stored.get("beta"))).max())


W8A8 = w8a8()


def quantized_tensors(model: ModelProto, config: QuantConfig = W8A8) -> set[str]:
    """The names of the tensors that a config quantizes, the default one if none is given."""
    graph = read_graph(model)
    plan = make_plan(graph, config)
    return {graph.tensors[graph.sites[site]].name for site, d in plan.decisions.items() if d.quantized}


def at(norm: Norm, opset: int) -> Norm:
    """The same spelling at another opset."""
    return replace(norm, opset=opset)
