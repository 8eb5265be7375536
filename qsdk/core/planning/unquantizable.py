"""Tensors that no grid can serve: indices as floats, masks of infinities, divisors near 0, arithmetic on shapes."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import PERIODIC, RECURRENT, SHAPE_OPS
from qsdk.core.planning.lower_bounds import lower_bounds
from qsdk.core.planning.ties import JOINS, keeps_grid, moved_inputs

AN_INTEGER = "it becomes an integer, such as an index or a bucket: a grid would move it to another one"

_ARITHMETIC = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Log", "Exp", "Sqrt", "Pow", "Reciprocal", "Cast", "Where"}
    | {"Min", "Max", "Clip", "Floor", "Ceil", "Round", "Mod", "Sum", "CumSum", "Relu"}
)


def becomes_integers(graph: Graph) -> Mapping[int, str]:
    """Return the floats that are cast to integers, and those that only these depend on, each with the reason.

    Results of layers are not affected: an integer computed from one reads it in float, and nothing before it changes.
    """
    result: set[int] = set()
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            cast = any(_casts_to_integer(graph, graph.ops[reader]) for reader in graph.consumers[tensor])
            if graph.tensors[tensor].is_float and (
                cast or (_counts(graph, op) and _only_counts(graph, tensor, result))
            ):
                result.add(tensor)
    result.update(t for t in graph.inputs if graph.tensors[t].is_float and _only_counts(graph, t, result))
    return dict.fromkeys(result, AN_INTEGER)


def _casts_to_integer(graph: Graph, op: Op) -> bool:
    made = graph.tensors[op.outputs[0]].dtype if op.type == "Cast" and op.outputs else ""
    return made.startswith(("int", "uint"))


def _counts(graph: Graph, op: Op) -> bool:
    return op.type in _ARITHMETIC or keeps_grid(graph, op)


def _only_counts(graph: Graph, tensor: int, found: set[int]) -> bool:
    """Return whether everything that reads a tensor computes integers, or such numbers, from it."""
    readers = [graph.ops[reader] for reader in graph.consumers[tensor]]
    if not readers or tensor in graph.output_set:
        return False
    return all(
        _casts_to_integer(graph, op) or (_counts(graph, op) and found.issuperset(op.outputs) and op.outputs != ())
        for op in readers
    )


AN_INFINITY = "the model writes an infinity into it, as a mask does, and no grid has one"

Signs = frozenset[int]  # of the infinities that a tensor may hold

_BOTH = frozenset({-1, 1})
#: ops that give an infinity where they read one
_KEEP = frozenset({"Add", "Cast", "CastLike", "CumSum", "Trilu", "Pad", "ReduceSum", "ReduceMean", "Concat"})
#: ops of which this infinity does not come out
_END = {"Relu": -1, "Max": -1, "MaxPool": -1, "GlobalMaxPool": -1, "ReduceMax": -1, "Min": 1, "ReduceMin": 1}


def infinite_tensors(graph: Graph) -> Mapping[int, str]:
    """Return the computed floats that hold an infinity by a constant of the model, each with the reason.

    An op that is not known to keep one, such as an exponential of minus infinity, is taken to end it.
    """
    signs: dict[int, Signs] = {}
    for index, tensor in enumerate(graph.tensors):
        if tensor.value is not None and tensor.value.dtype.kind == "f" and bool(np.isinf(tensor.value).any()):
            signs[index] = frozenset(int(np.sign(x)) for x in tensor.value.ravel() if np.isinf(x))
    stored = set(signs)
    for op in graph.ops if stored else ():
        given = _given(graph, op, [frozenset() if t is None else signs.get(t, frozenset()) for t in op.inputs])
        if given:
            signs.update(dict.fromkeys(op.outputs, given))
    return dict.fromkeys(signs.keys() - stored, AN_INFINITY)


def _given(graph: Graph, op: Op, read: list[Signs]) -> Signs:
    """Return the signs of the infinities of an op's result; of its inputs they are `read`."""
    every = frozenset[int]().union(*read)
    if not every:
        return every
    if op.type == "Where":
        return read[1] | read[2]
    if op.type in ("Neg", "Sub"):
        return read[0] | _turned(read[1]) if op.type == "Sub" else _turned(read[0])
    if op.type in ("Mul", "Div"):
        return _BOTH if op.type == "Mul" or read[0] else frozenset()
    if op.type == "Clip":
        has = [(len(op.inputs) > at and op.inputs[at] is not None) or name in op.attributes for at, name in _BOUNDS]
        return read[0] - {sign for sign, bound in zip((-1, 1), has, strict=True) if bound}
    if op.type in _END:
        return every - {_END[op.type]}
    if op.type in _KEEP:
        return every
    moved = moved_inputs(op) if keeps_grid(graph, op) else []
    return frozenset[int]().union(*(signs for t, signs in zip(op.inputs, read, strict=True) if t in moved))


_BOUNDS = ((1, "min"), (2, "max"))


def _turned(signs: Signs) -> Signs:
    return frozenset(-sign for sign in signs)


_ANGLE_OPS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Exp", "Neg", "Reciprocal", "Sqrt", "Cast", "Floor", "Mod", "Where", "CumSum"}
    | {
        "Concat",
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Expand",
        "Transpose",
        "Slice",
        "Split",
        "Tile",
        "Identity",
        "Range",
    }
    | {"ConstantOfShape", "MatMul", "Gather"}
)


def steering_tensors(graph: Graph, masks: Collection[int]) -> Mapping[int, str]:
    """Return the floats made of shapes and integers that no quantized op computes with, each with the reason.

    They only become other such tensors, bools, integers or masks, or are the initial state of a recurrent layer, which
    computes in float; or they are the angles of positions, of which Sin and Cos need every digit. A table of positions
    made of shapes is data: it is added to quantized tensors.
    """
    steering = _only_read_by(graph, _made_of_integers(graph), masks, RECURRENT)
    angles = _only_read_by(graph, _made_as_angles(graph), steering | frozenset(masks), PERIODIC)
    result = dict.fromkeys(angles, "an angle made of positions: Sin and Cos need all its digits")
    return result | dict.fromkeys(steering, "made of shapes and integers: no quantized op computes with it")


def _made_of_integers(graph: Graph) -> set[int]:
    """Return the tensors that depend on integers, bools, shapes and single numbers alone."""
    result = {index for index in range(len(graph.tensors)) if _is_counted(graph, index) or _is_number(graph, index)}
    for op in graph.ops:
        read = [t for t in op.inputs[: 1 if op.type == "CastLike" else None] if t is not None]
        if op.type in SHAPE_OPS or (read and result.issuperset(read)):
            result.update(op.outputs)
    return result


def _made_as_angles(graph: Graph) -> set[int]:
    """Return the tensors computed from integers and stored numbers by the arithmetic of positions, not from a table."""
    result = {index for index, facts in enumerate(graph.tensors) if _is_counted(graph, index) or facts.constant}
    for index, op in enumerate(graph.ops):
        read = [t for t in op.inputs if t is not None]
        if op.type in _ANGLE_OPS and result.issuperset(read) and not _takes_from_data(graph, index):
            result.update(op.outputs)
    return result


def _takes_from_data(graph: Graph, op_id: int) -> bool:
    """Return whether an op reads a stored table or mixes the features of one, which is no arithmetic of positions."""
    op = graph.ops[op_id]
    if op.type == "Gather":
        return op.inputs[0] is None or graph.origin(op.inputs[0]) is not None
    if op.type != "MatMul" or op.inputs[0] is None:
        return False
    # positions times frequencies is an outer product
    return (graph.tensors[op.inputs[0]].shape or (None,))[-1] != 1


def _only_read_by(graph: Graph, made: Collection[int], others: Collection[int], sinks: Collection[str]) -> set[int]:
    """Return those of `made` that are computed in floating point and read only by these ops or by steering ops."""
    result = {t for t in made if graph.tensors[t].is_float and t not in graph.output_set and t in graph.producer}
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            readers = graph.consumers[tensor]
            if tensor in result and not all(_steers(graph, graph.ops[r], result, others, sinks) for r in readers):
                result.discard(tensor)
    return result


def _is_counted(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor holds integers or bools, from any source."""
    return graph.tensors[tensor].dtype != "" and not graph.tensors[tensor].is_float


def _is_number(graph: Graph, tensor: int) -> bool:
    facts = graph.tensors[tensor]
    return facts.constant and not any(n != 1 for n in facts.shape or ())


def _steers(graph: Graph, op: Op, found: Collection[int], others: Collection[int], sinks: Collection[str]) -> bool:
    made = [t for t in op.outputs if graph.tensors[t].is_float and t not in found and t not in others]
    return not made or op.type in sinks


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
            op = graph.maker(tensor)
            if op is None:
                continue
            read = [t for t in op.inputs if t is not None and graph.tensors[t].is_float]
            if _makes_positive(graph, op, low):
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
    op = graph.maker(tensor)
    if tensor is None or op is None or graph.sole_consumer(tensor) is None:
        return []
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
