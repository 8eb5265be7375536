"""Lower bounds: how small the values of a tensor can become, as far as the ops before it show."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import EXTREMES, PERIODIC
from qsdk.core.planning.ties import keeps_grid

_UNKNOWN = -np.inf
#: bound of values that are never 0 in exact arithmetic, but may be arbitrarily small
_ABOVE_ZERO = float(np.finfo(np.float32).smallest_subnormal)

_POSITIVE = frozenset({"Exp", "Sigmoid", "Softplus", "Softmax"})
_NOT_NEGATIVE = frozenset({"Relu", "HardSigmoid", "ThresholdedRelu", "Not"})
#: ops whose result is a magnitude: as far from 0 as their input
_SIZES = frozenset({"Abs", "ReduceL1", "ReduceL2", "ReduceSumSquare"})
#: ops whose result lies between the values of their first input, or above them where that is not negative
_INSIDE = EXTREMES | {"ReduceMean", "GlobalAveragePool", "Resize", "Cast"}
_OF_ONE = PERIODIC | {"Tanh", "Erf", "Softsign"}

Bounds = Callable[[int | None], float]


def lower_bounds(graph: Graph) -> Mapping[int, float]:
    """Return tensor id -> a number that none of its values is below; tensors that nothing bounds are absent.

    A bound above 0 proves that a tensor is never 0: a sum with a guard, a clip, an exponential.
    """
    result: dict[int, float] = {}

    def low(tensor: int | None) -> float:
        return _UNKNOWN if tensor is None else result.get(tensor, _UNKNOWN)

    for index, facts in enumerate(graph.tensors):
        if facts.constant and facts.value is not None and facts.value.size and facts.value.dtype.kind in "fiub":
            smallest = float(np.min(facts.value))
            result.update({index: smallest} if np.isfinite(smallest) else {})
        elif facts.dtype in ("bool", "uint8", "uint16", "uint32", "uint64"):
            result[index] = 0.0
    for op in graph.ops:
        bound = _bound(graph, op, low)
        if bound > _UNKNOWN:
            result.update({t: max(bound, low(t)) for t in op.outputs})
    return result


def _bound(graph: Graph, op: Op, low: Bounds) -> float:
    known = _BOUNDS.get(op.type)
    if known is not None:
        return known(graph, op, low)
    first = low(op.inputs[0]) if op.inputs else _UNKNOWN
    if op.type in _POSITIVE:
        return _ABOVE_ZERO
    if op.type in _NOT_NEGATIVE or op.type in _SIZES:
        return max(0.0, first)
    if op.type in _OF_ONE:
        return 0.0 if first >= 0.0 and op.type not in PERIODIC else -1.0
    if op.type in _INSIDE:
        return first
    if op.type == "Pad":
        return min(first, 0.0) if keeps_grid(graph, op) else _UNKNOWN
    return _least(op, low) if op.type == "Concat" else first if keeps_grid(graph, op) else _UNKNOWN


def _least(op: Op, low: Bounds) -> float:
    return min((low(t) for t in op.inputs if t is not None), default=_UNKNOWN)


def _added(graph: Graph, op: Op, low: Bounds) -> float:
    return sum(low(t) for t in op.inputs)


def _multiplied(graph: Graph, op: Op, low: Bounds) -> float:
    left, right = low(op.inputs[0]), low(op.inputs[1])
    if op.inputs[0] == op.inputs[1]:
        return _of_product(abs(max(left, 0.0)), abs(max(right, 0.0)))
    return _of_product(left, right)


def _of_product(left: float, right: float) -> float:
    if min(left, right) < 0.0:
        return _UNKNOWN
    return max(left * right, _ABOVE_ZERO if min(left, right) > 0.0 else 0.0)


def _divided(graph: Graph, op: Op, low: Bounds) -> float:
    divisor = graph.scalar(op.inputs[1])
    left, right = low(op.inputs[0]), low(op.inputs[1])
    if divisor is not None and divisor > 0.0:
        return left / divisor
    return (_ABOVE_ZERO if left > 0.0 else 0.0) if left >= 0.0 <= right else _UNKNOWN


def _raised(graph: Graph, op: Op, low: Bounds) -> float:
    exponent, base = graph.scalar(op.inputs[1]), low(op.inputs[0])
    if base > 0.0:
        return max(base**exponent, _ABOVE_ZERO) if exponent is not None and 0.0 < exponent < 8.0 else _ABOVE_ZERO
    return 0.0 if base >= 0.0 or (exponent is not None and exponent % 2 == 0) else _UNKNOWN


def _root(graph: Graph, op: Op, low: Bounds) -> float:
    return float(np.sqrt(max(low(op.inputs[0]), 0.0)))


def _inverse(graph: Graph, op: Op, low: Bounds) -> float:
    return _ABOVE_ZERO if low(op.inputs[0]) >= 0.0 else _UNKNOWN


def _clipped(graph: Graph, op: Op, low: Bounds) -> float:
    given = op.attributes.get("min")
    least = low(op.inputs[1]) if len(op.inputs) > 1 else _UNKNOWN if given is None else float(given)
    return max(low(op.inputs[0]), least)


def _largest(graph: Graph, op: Op, low: Bounds) -> float:
    return max((low(t) for t in op.inputs), default=_UNKNOWN)


def _smallest(graph: Graph, op: Op, low: Bounds) -> float:
    return _least(op, low)


def _chosen(graph: Graph, op: Op, low: Bounds) -> float:
    return min(low(op.inputs[1]), low(op.inputs[2]))


def _summed(graph: Graph, op: Op, low: Bounds) -> float:
    first = low(op.inputs[0])
    return first if first >= 0.0 else _UNKNOWN  # of many as small as that


def _products(graph: Graph, op: Op, low: Bounds) -> float:
    return 0.0 if _least(op, low) >= 0.0 else _UNKNOWN


def _elu(graph: Graph, op: Op, low: Bounds) -> float:
    first = low(op.inputs[0])
    return first if first >= 0.0 else -float(op.attributes.get("alpha", 1.0))


_BOUNDS: Mapping[str, Callable[[Graph, Op, Bounds], float]] = MappingProxyType(
    {
        **dict.fromkeys(("Add", "Sum"), _added),
        **dict.fromkeys(("MatMul", "Einsum"), _products),
        "Mul": _multiplied,
        "Div": _divided,
        "Pow": _raised,
        "Sqrt": _root,
        "Reciprocal": _inverse,
        "Clip": _clipped,
        "Max": _largest,
        "Min": _smallest,
        "Where": _chosen,
        "ReduceSum": _summed,
        "Elu": _elu,
    }
)
