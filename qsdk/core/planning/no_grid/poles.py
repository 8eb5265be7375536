"""Divisors: tensors that must not become 0, because a Div, a logarithm or a negative power reads them.

Also the arguments of roots that a model keeps above 0: at 0 the root has a value, but its slope is infinite.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.planning.no_grid.lower_bounds import lower_bounds
from qsdk.core.planning.ties import JOINS, keeps_grid

A_DIVISOR = "a divisor that is never 0: its grid would hold 0"
A_PART = "a sum in a divisor that a guard keeps above 0: a grid would round what is small to 0"
A_RECIPROCAL = "the reciprocal of a divisor that a guard keeps above 0: its range would be that of the guard"
A_LOGARITHM = "never 0, and a logarithm reads it: its grid would hold 0"
A_ROOT = "never 0, and a root reads it: its grid would hold 0, where the slope of a root has no bound"

_SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare"})
_OF_SUMS = frozenset({"Sqrt", "Abs", "Cast"})


def divisors(graph: Graph) -> Mapping[int, str]:
    """Return the computed tensors that ops divide by, or take a logarithm of, with the reason, by tensor id."""
    result: dict[int, str] = {}
    for op in graph.ops:
        for tensor, reason in _read_as_divisors(graph, op):
            if graph.tensors[tensor].is_float and graph.origin(tensor) is None:
                result.setdefault(tensor, reason)
    return result


def guarded_divisors(graph: Graph) -> Mapping[int, str]:
    """Return the divisors that the model keeps above 0, and the tensors they depend on alone, with the reason.

    The range of an activation contains 0, so a guard such as `sum + 1e-5` is lost as soon as it is quantized, and the
    root of the result is 0 as well. Training needs the guard of a root too: its gradient at 0 is infinite.
    """
    low, result = lower_bounds(graph), dict[int, str]()
    for divisor, reason in {**_under_roots(graph), **divisors(graph)}.items():
        waiting = [divisor]
        while waiting:
            tensor = waiting.pop()
            if low.get(tensor, 0.0) <= 0.0 or tensor in result or graph.constant_root(tensor) is not None:
                continue
            result[tensor] = reason
            maker = graph.producer.get(tensor)
            if maker is None:
                continue
            read = [t for t in graph.ops[maker].inputs if t is not None and graph.tensors[t].is_float]
            if _makes_positive(graph, graph.ops[maker], low):
                result.update(dict.fromkeys(_summed_up(graph, read), A_PART))
            else:
                waiting += read
    return result | dict.fromkeys(_reciprocals(graph, result), A_RECIPROCAL)


def _under_roots(graph: Graph) -> dict[int, str]:
    """Return the computed tensors that ops take a root of, with the reason, by tensor id."""
    result: dict[int, str] = {}
    for op in graph.ops:
        exponent = graph.value(op.inputs[1]) if op.type == "Pow" else None
        root = op.type == "Sqrt" or (exponent is not None and bool(np.any((exponent > 0) & (exponent < 1))))
        tensor = op.inputs[0] if root else None
        if tensor is not None and graph.tensors[tensor].is_float and graph.origin(tensor) is None:
            result[tensor] = A_ROOT
    return result


def _reciprocals(graph: Graph, guarded: Mapping[int, str]) -> set[int]:
    """Return the reciprocals of guarded divisors, moved or not.

    Where a sum is 0, they are as large as that of the guard.
    """
    result: set[int] = set()
    for op in graph.ops:
        one = op.type == "Div" and op.inputs[0] is not None and graph.scalar(op.inputs[0]) is not None
        inverted = any(t in guarded and reason is A_DIVISOR for t, reason in _read_as_divisors(graph, op))
        moved = op.type not in JOINS and bool(op.inputs) and keeps_grid(graph, op) and op.inputs[0] in result
        if moved or (inverted and (one or op.type != "Div")):
            result.update(op.outputs)
    return result


def _summed_up(graph: Graph, read: Iterable[int]) -> Iterator[int]:
    """Yield the sums, and roots of sums, that only a guard reads: a grid would round small ones to 0."""
    for operand in read:
        tensor: int | None = operand
        chain: list[int] = []
        while tensor is not None and tensor in graph.producer and graph.sole_consumer(tensor) is not None:
            op = graph.ops[graph.producer[tensor]]
            chain.append(tensor)
            if op.type in _SUMS:
                yield from chain + _squares(graph, op.inputs[0])
                break
            moved = op.type not in JOINS and keeps_grid(graph, op)
            tensor = op.inputs[0] if op.type in _OF_SUMS or moved else None


def _squares(graph: Graph, tensor: int | None) -> list[int]:
    """Return the squares that a sum adds up, where nothing else reads them; a grid would lose those of small values."""
    maker = None if tensor is None else graph.producer.get(tensor)
    if tensor is None or maker is None or graph.sole_consumer(tensor) is None:
        return []
    op = graph.ops[maker]
    return [tensor] if op.type == "Pow" or (op.type == "Mul" and op.inputs[0] == op.inputs[1]) else []


def _makes_positive(graph: Graph, op: Op, low: Mapping[int, float]) -> bool:
    """Return whether an op's result is above 0 even if its inputs were 0."""
    if op.type in ("Add", "Sum", "Max"):
        return any(t is not None and graph.constant_root(t) is not None and low.get(t, 0.0) > 0.0 for t in op.inputs)
    if op.type == "Clip":
        least = op.inputs[1] if len(op.inputs) > 1 else None
        return float(op.attributes.get("min", 0.0)) > 0.0 or (least is not None and low.get(least, 0.0) > 0.0)
    return op.type in ("Exp", "Sigmoid", "Softplus", "Softmax")


def _read_as_divisors(graph: Graph, op: Op) -> Iterator[tuple[int, str]]:
    place, reason = {"Div": (1, A_DIVISOR), "Reciprocal": (0, A_DIVISOR), "Log": (0, A_LOGARITHM)}.get(
        op.type, (None, A_DIVISOR)
    )
    if op.type == "ReduceLogSum":
        place, reason = 0, A_LOGARITHM
    if op.type == "Pow":
        exponent = graph.value(op.inputs[1])
        place = 0 if exponent is not None and bool(np.any(exponent < 0)) else None
    tensor = None if place is None or place >= len(op.inputs) else op.inputs[place]
    if tensor is not None:
        yield tensor, reason
