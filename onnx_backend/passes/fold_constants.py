"""The values of ops whose inputs are all stored: small ones, and views of weights."""

import math
from collections.abc import Mapping

import numpy as np
from onnx import NodeProto, TensorProto
from onnx.reference import ReferenceEvaluator

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes
from qsdk.core.arrays import Array
from qsdk.core.graph.op_facts import RESHAPES

_REARRANGING = (RESHAPES - {"Flatten"}) | {"Slice", "Split", "Concat", "Transpose"}


def fold_rearranged(
    node: NodeProto, stored: Mapping[str, TensorProto], opsets: Mapping[str, int], weights: Mapping[str, Array]
) -> dict[str, Array] | None:
    """Return the results of a node that only moves stored values, whatever their size, or None.

    A module reads a part of a packed weight (attention's queries), or arranges several (a recurrent layer's gates),
    before it marks what it reads: the mark belongs on a stored tensor. `weights` has the values that `stored` lacks.
    """
    if node.op_type not in _REARRANGING or any(name and name not in stored for name in node.input):
        return None
    values = {name: weights[name] if name in weights else array(stored[name]) for name in node.input if name}
    size = sum(value.size for value in values.values())
    return fold(node, values, opsets, weights_stay=False, limit=size)


def is_full_slice(node: NodeProto, small: Mapping[str, Array]) -> bool:
    """Return True if a Slice keeps everything (`x[:, 0]` is traced with one)."""
    if (
        node.op_type != "Slice"
        or node.domain not in ("", "ai.onnx")
        or any(n and n not in small for n in node.input[1:])
    ):
        return False
    starts, ends = (small[name] for name in node.input[1:3])
    steps = small[node.input[4]] if len(node.input) > 4 and node.input[4] else np.ones(1)
    return not starts.any() and bool((ends >= np.iinfo(np.int32).max).all()) and bool((steps == 1).all())


LARGEST = 1024  # elements of a constant that may be folded
_FEW = 8  # elements of a float constant that is a scale or a bound, not a weight
_ELEMENTWISE = frozenset(
    {"Abs", "Add", "Ceil", "Clip", "Cos", "Div", "Erf", "Exp", "Floor", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Pow"}
    | {"Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sqrt", "Sub", "Sum", "Tanh", "Where"}
    | {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
    | {"BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"}
)
_VIEWS = RESHAPES | {"Cast"}
_MOVES = frozenset(
    {"ArgMax", "ArgMin", "CastLike", "Concat", "ConstantOfShape", "CumSum", "Expand", "EyeLike", "Gather", "GatherND"}
    | {"GatherElements", "Identity", "NonZero", "OneHot", "Pad", "Range", "ReduceMax", "ReduceMean", "ReduceMin"}
    | {"ReduceProd", "ReduceSum", "ScatterElements", "ScatterND", "Shape", "Size", "Slice", "Split", "Tile", "TopK"}
    | {"Transpose", "Trilu", "Unique"}
)
_FOLDED = _ELEMENTWISE | _VIEWS | _MOVES
_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"})


def fold(
    node: NodeProto, small: Mapping[str, Array], opsets: Mapping[str, int], *, weights_stay: bool, limit: int = LARGEST
) -> dict[str, Array] | None:
    """Return the values of a node all of whose inputs are small constants, or None.

    `weights_stay` leaves stored float tensors as they are: they are weights, planned as they are stored. A result has
    up to `limit` elements.
    """
    if node.op_type not in _FOLDED or node.domain not in ("", "ai.onnx"):
        return None
    if weights_stay and node.op_type in _MOVES and any(_is_weight(small[name]) for name in node.input if name in small):
        return None
    return evaluate(node, small, opsets, limit=limit)


def evaluate(
    node: NodeProto, known: Mapping[str, Array], opsets: Mapping[str, int], *, limit: int
) -> dict[str, Array] | None:
    """Return the values of a deterministic node of any operator, or None.

    It is None for a node of another domain, and where an input is not known.
    """
    names = [name for name in node.input if name]
    if not names or any(name not in known for name in names):
        return None
    if node.op_type in _RANDOM or node.domain not in ("", "ai.onnx"):
        return None
    values = {name: known[name] for name in names}
    try:
        if _result_size(node, [values.get(name) for name in node.input]) > limit:
            return None
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(node, opsets=dict(opsets)).run(None, values)
    except Exception:  # it stays a node, and the runtime reports the error
        return None
    found = {}
    for name, value in zip([name for name in node.output if name], results, strict=False):
        result = np.asarray(value)
        if isinstance(value, list | dict) or result.dtype.kind in "OUS" or result.size > limit:
            return None
        found[name] = result
    return found


def is_view(node: NodeProto) -> bool:
    """Return True if a node returns the same elements in another shape or type."""
    return node.op_type in _VIEWS and node.domain in ("", "ai.onnx")


def _is_weight(value: Array) -> bool:
    return value.dtype.kind not in "iub" and value.size > _FEW


def _result_size(node: NodeProto, values: list[Array | None]) -> float:
    """Return the number of elements of a node's result, where that is more than its inputs have."""
    first, second = (np.asarray(value) if value is not None else np.zeros(0) for value in (*values, None, None)[:2])
    if node.op_type == "ConstantOfShape":
        return math.prod(float(n) for n in first.reshape(-1))
    if node.op_type == "Expand":
        return math.prod(float(n) for n in np.broadcast_shapes(first.shape, tuple(int(n) for n in second.reshape(-1))))
    if node.op_type == "Tile":
        return max(1.0, float(first.size)) * math.prod(max(1.0, float(n)) for n in second.reshape(-1))
    if node.op_type == "Range" and values[2] is not None:
        step = float(values[2])
        return abs((float(second) - float(first)) / step) if step else math.inf
    if node.op_type == "OneHot":
        return float(first.size) * abs(float(second.reshape(-1)[0]))
    if node.op_type == "Pad":
        pads = second if second.size else np.asarray(attributes(node).get("pads", []))
        return math.prod(float(n) + float(np.abs(pads).sum()) for n in first.shape)
    return 0.0
