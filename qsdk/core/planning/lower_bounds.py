"""Lower bounds: how small the values of a tensor can become, as far as the ops before it show."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import EXTREMES, PERIODIC
from qsdk.core.planning.ties import keeps_grid, moved_inputs

_UNKNOWN = -np.inf
#: bound of values that are never 0 in exact arithmetic, but may be arbitrarily small
_ABOVE_ZERO = float(np.finfo(np.float32).smallest_subnormal)

#: a share by which float32 may round
_ROUNDED = 2.0**-22

_POSITIVE = frozenset({"Sigmoid", "Softplus", "Softmax"})
_NOT_NEGATIVE = frozenset({"Relu", "HardSigmoid", "ThresholdedRelu", "Not"})
#: ops whose result is a magnitude: as far from 0 as their input
_SIZES = frozenset({"Abs", "ReduceL1", "ReduceL2", "ReduceSumSquare"})
#: ops whose result lies between the values of their first input, or above them where that is not negative
_INSIDE = EXTREMES | {"ReduceMean", "GlobalAveragePool", "Resize", "Cast"}
_OF_ONE = PERIODIC | {"Tanh", "Erf", "Softsign"}

_CODES = MappingProxyType(
    {
        f"{sign}{bits}": (low, low + 2**bits - 1)
        for bits in (2, 4, 8, 16)
        for sign, low in (("uint", 0), ("int", -(2 ** (bits - 1))))
    }
)

Bounds = Callable[[int | None], float]


def lower_bounds(graph: Graph) -> Mapping[int, float]:
    """Return tensor id -> a number that none of its values is below; tensors that nothing bounds are absent.

    A bound above 0 proves that a tensor is never 0: a sum with a guard, a clip, an exponential, and the exponentials of
    a softmax, of which one is 1. The graph may have pairs of QuantizeLinear and DequantizeLinear.
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


def never_above_zero(graph: Graph) -> frozenset[int]:
    """Return the tensors that are another one less its largest elements."""
    return frozenset(
        op.outputs[0] for op in graph.ops if op.type == "Sub" and _is_largest(graph, op.inputs[1], op.inputs[0])
    )


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
    return min(map(low, moved_inputs(op)), default=_UNKNOWN) if keeps_grid(graph, op) else _UNKNOWN


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


def _clipped(graph: Graph, op: Op, low: Bounds) -> float:
    given = op.attributes.get("min")
    least = low(op.inputs[1]) if len(op.inputs) > 1 else _UNKNOWN if given is None else float(given)
    return max(low(op.inputs[0]), least)


def _summed(graph: Graph, op: Op, low: Bounds) -> float:
    first = low(op.inputs[0])
    if first < 0.0:
        return _UNKNOWN  # of many as small as that
    return max(first, _largest_along(graph, op.inputs[0], graph.reduced_axes(op), low) * (1.0 - _ROUNDED))


def _exponential(graph: Graph, op: Op, low: Bounds) -> float:
    return max(float(np.exp(min(low(op.inputs[0]), 80.0))), _ABOVE_ZERO)


@dataclass(frozen=True)
class _Pair:
    """A QuantizeLinear and the DequantizeLinear that reads it, with one scale: what it quantizes, and its grid."""

    source: int | None
    scale: float
    zero: float
    codes: tuple[int, int]


def _pair(graph: Graph, op: Op | None) -> _Pair | None:
    """Return the pair that ends in an op, None if it ends none."""
    if op is None or op.type != "DequantizeLinear" or op.inputs[0] is None:
        return None
    quantize = graph.maker(op.inputs[0])
    if quantize is None or quantize.type != "QuantizeLinear":
        return None
    (scale, zero), written = ([graph.scalar(t) for t in (*end.inputs[1:3], None)[:2]] for end in (op, quantize))
    codes = _CODES.get(graph.tensors[op.inputs[0]].dtype)
    if scale is None or codes is None or [scale, zero] != written or (zero is None and len(op.inputs) > 2):
        return None
    return _Pair(quantize.inputs[0], scale, zero or 0.0, codes)


def _on_grid(graph: Graph, op: Op, low: Bounds) -> float:
    """Return the value on the grid of a pair that a lower bound of what it quantizes becomes at least."""
    pair = _pair(graph, op)
    if pair is None:
        return _UNKNOWN
    lowest, highest = (end - pair.zero for end in pair.codes)
    least = float(np.clip(np.floor(low(pair.source) / pair.scale), lowest, highest)) * pair.scale
    return least - abs(least) * _ROUNDED


def _largest_along(graph: Graph, tensor: int | None, axes: tuple[int, ...] | None, low: Bounds) -> float:
    """Return a number that the largest element of every row along some axes is not below."""
    op, least = graph.maker(tensor), low(tensor)
    if op is None or axes is None:
        return least
    if op.type == "Sub" and _is_largest(graph, op.inputs[1], op.inputs[0], axes):
        return max(least, 0.0)
    if op.type in ("Exp", "DequantizeLinear"):

        def along(source: int | None) -> float:
            return _largest_along(graph, source, axes, low)

        return max(least, (_exponential if op.type == "Exp" else _on_grid)(graph, op, along))
    return _largest_along(graph, op.inputs[0], axes, low) if op.type in ("Identity", "Cast") else least


def _is_largest(graph: Graph, tensor: int | None, of: int | None, axes: tuple[int, ...] | None = None) -> bool:
    """Return whether a tensor is the largest of another (along the axes), on the same grid or on none."""
    op, grid = graph.maker(tensor), _pair(graph, graph.maker(of))
    while op is not None and op.type in ("Reshape", "Unsqueeze", "Identity", "DequantizeLinear"):
        pair = _pair(graph, op)
        if op.type == "DequantizeLinear" and (
            pair is None or grid is None or replace(pair, source=grid.source) != grid
        ):
            return False
        op = graph.maker(op.inputs[0] if pair is None else pair.source)
    return op is not None and op.type == "ReduceMax" and op.inputs[0] == of and axes in (None, graph.reduced_axes(op))


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
        "Sqrt": lambda graph, op, low: float(np.sqrt(max(low(op.inputs[0]), 0.0))),
        "Reciprocal": lambda graph, op, low: _ABOVE_ZERO if low(op.inputs[0]) >= 0.0 else _UNKNOWN,
        "Clip": _clipped,
        "Max": lambda graph, op, low: max((low(t) for t in op.inputs), default=_UNKNOWN),
        "Min": lambda graph, op, low: _least(op, low),
        "Where": lambda graph, op, low: min(low(op.inputs[1]), low(op.inputs[2])),
        "ReduceSum": _summed,
        "Exp": _exponential,
        "DequantizeLinear": _on_grid,
        "Elu": _elu,
    }
)
