"""Ties: tensors that share an encoding because the op between them keeps the grid (union-find)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import AVERAGES, MOVEMENTS, REPEATS, VIEWS

# Ops whose output holds values of their first input and nothing else.
PASS_THROUGH = MOVEMENTS | {"MaxPool", "GlobalMaxPool", "Dropout"}

# Ops that write values of one input over values of another one.
SCATTERS = frozenset({"ScatterND", "ScatterElements"})

# Ops whose output holds values of several inputs.
JOINS = SCATTERS | {"Concat"}

# By so many times values may be larger than others that share their grid of 8 bits.
_ALIKE = 16.0

# Ops whose output lies inside the range of their first input (and 0).
_INSIDE_RANGE = AVERAGES | {"Relu", "Clip", "Resize"}


class Classes:
    """Equivalence classes over tensor ids; the smallest id of a class represents it."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, item: int) -> int:
        """Return the representative of an item's class."""
        root = item
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(item, item) != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def union(self, left: int, right: int) -> None:
        """Put two items into one class."""
        low, high = sorted((self.find(left), self.find(right)))
        self._parent[high] = low


def find_ties(graph: Graph, groups: Mapping[int, object], untied: Collection[int] = ()) -> Classes:
    """Return the tie classes of all grid-preserving ops; `groups` maps a tensor id to what must be equal on both sides.

    A tensor absent from `groups` (float, or inside a supergroup) is never tied, so a tie ends there; the ops in
    `untied` tie nothing.
    """
    classes = Classes()
    reached = dict(groups)
    for index, op in enumerate(graph.ops):
        if index in untied:
            continue
        _carry_through_inner_tensors(graph, op, reached)
        for left, right in _pairs(graph, op, reached):
            if reached[left] == reached[right]:
                classes.union(left, right)
    return classes


def find_caches(graph: Graph, movers: Iterable[int]) -> dict[int, int]:
    """Return the tensors that hold values of a cache of keys and values: tensor id -> the Concat that extends it.

    A cache comes in as an input of the graph, is joined with new values, and goes out again; `movers` are the ops that
    keep the grid and are quantized one by one.
    """
    classes, movers = Classes(), list(movers)
    for index in movers:
        op = graph.ops[index]
        moved = moved_inputs(op)
        for tensor in (t for t in moved if graph.tensors[t].is_float and not graph.tensors[t].constant):
            for result in op.outputs:
                classes.union(tensor, result)
    came, leave = ({classes.find(tensor) for tensor in edge} for edge in (graph.inputs, graph.outputs))
    joined: dict[int, int] = {}
    for index in movers:
        op = graph.ops[index]
        if op.type == "Concat" and classes.find(op.outputs[0]) in came & leave:
            joined.setdefault(classes.find(op.outputs[0]), index)
    floats = (tensor for tensor, facts in enumerate(graph.tensors) if facts.is_float and not facts.constant)
    return {tensor: joined[classes.find(tensor)] for tensor in floats if classes.find(tensor) in joined}


def cache_edges(graph: Graph) -> tuple[list[int], list[int]]:
    """Return which inputs and which outputs of a graph hold values of a cache of keys and values, by their places."""
    found = find_caches(graph, [index for index, op in enumerate(graph.ops) if keeps_grid(graph, op)])
    places = [[at for at, tensor in enumerate(edge) if tensor in found] for edge in (graph.inputs, graph.outputs)]
    return places[0], places[1]


def find_assemblies(graph: Graph, choices: Mapping[int, bool | None], bounds: Mapping[str, object]) -> dict[int, str]:
    """Return, by tensor id, why a Concat or Scatter of unlike parts that leaves the model stays float.

    No op of the model reads such a tensor, or what only moves its values on to the outputs, so nothing is lost if each
    part keeps its own encoding. With one scale for all, a detector's scores would round to 0 beside its boxes.

    Args:
        graph: of the model.
        choices: op id -> True (tie in any case), False (never), or None: untied where the parts are made by different
            kinds of op.
        bounds: op type -> the fixed range of its result; ops with the same range count as one kind.
    """
    leaving = _leaving(graph)
    result: dict[int, str] = {}
    makers: dict[int, frozenset[str]] = {}
    for index, op in enumerate(graph.ops):
        moves = keeps_grid(graph, op)
        data = moved_inputs(op)
        parts = [t for t in data if not graph.tensors[t].constant]
        carried = parts if moves else parts[: op.type in _INSIDE_RANGE]
        made = frozenset[str]().union(*(makers.get(t, {"Input"}) for t in carried)) or frozenset({op.type})
        makers.update(dict.fromkeys(op.outputs, made))
        if not moves or not leaving.issuperset(op.outputs):
            continue
        wanted, several = choices.get(index), op.type in JOINS and len(set(parts)) > 1
        # what was assigned by index is made of like parts, unless some of them alone have a fixed range
        kinds = {bounds.get(m, m if op.type == "Concat" else None) for m in made}
        if several and wanted is not True and (wanted is False or len(kinds) > 1):
            reason = (
                f"leaves the model as a {op.type} of parts ({', '.join(sorted(made))}) that keep their own encodings"
            )
            result.update(dict.fromkeys(op.outputs, reason))
        elif data and data[0] in result:
            result.update(dict.fromkeys(op.outputs, result[data[0]]))
    return result


def find_mixed_signs(graph: Graph, bounds: Mapping[str, tuple[float, float]]) -> set[int]:
    """Return the Concats of a Relu's result and a part that can be negative; `bounds`: op type -> fixed range.

    One grid for both has a zero point above its lowest code, with which no runtime computes the layer and its Relu as
    one op on codes (ONNX Runtime then computes them in floats); and half of its codes are lost to the Relu.
    """
    rectified, positive, mixed = set[int](), set[int](), set[int]()
    for index, op in enumerate(graph.ops):
        data = moved_inputs(op)
        if op.type == "Relu" or (op.type == "Clip" and len(op.inputs) > 1 and graph.scalar(op.inputs[1]) == 0):
            rectified.update(op.outputs)
            positive.update(op.outputs)
        elif keeps_grid(graph, op) or op.type in _INSIDE_RANGE:
            parts = [t for t in data if not graph.tensors[t].constant]
            if rectified.intersection(parts) and not positive.issuperset(parts):
                mixed.add(index)
            rectified.update(op.outputs if keeps_grid(graph, op) and rectified.issuperset(parts) else ())
            positive.update(op.outputs if positive.issuperset(parts) else ())
        elif bounds.get(op.type, (-1.0, 1.0))[0] == 0:
            positive.update(op.outputs)
    return mixed


def find_rescaled(graph: Graph) -> set[int]:
    """Return the Scatters whose new values are computed from those that they replace, and may be of another size.

    `y[:, :4] = y[:, :4] * 300`: one grid for both has steps in which the factor reads nothing but 0. Sums of them and
    what is up to `_ALIKE` times as large have about their range.
    """
    scatters = (index for index, op in enumerate(graph.ops) if op.type in SCATTERS)
    return {index for index in scatters if _is_rescaled(graph, *graph.ops[index].inputs[:3:2])}


def _is_rescaled(graph: Graph, data: int | None, updates: int | None) -> bool:
    replaced = _back(graph, [data], lambda op: moved_inputs(op) if keeps_grid(graph, op) else [])
    alike = _back(graph, [updates], lambda op: _read_at_their_size(graph, op))
    ends = [tensor for tensor in alike - replaced if tensor in graph.producer]
    opaque = [tensor for tensor in ends if not _read_at_their_size(graph, graph.ops[graph.producer[tensor]])]
    return bool(_back(graph, opaque, lambda op: op.inputs) & {t for t in replaced if not graph.tensors[t].constant})


def _read_at_their_size(graph: Graph, op: Op) -> Sequence[int | None]:
    """Return the operands of an op whose size its result has, within `_ALIKE`."""
    if op.type in ("Add", "Sub"):
        return op.inputs
    if op.type in ("Mul", "Div"):
        factors = [graph.scalar(tensor) for tensor in op.inputs]
        known = next((abs(factor) for factor in factors if factor is not None), 0.0)
        return [
            t for t, factor in zip(op.inputs, factors, strict=True) if factor is None and 1 / _ALIKE <= known <= _ALIKE
        ]
    return moved_inputs(op) if keeps_grid(graph, op) else op.inputs[: op.type in _INSIDE_RANGE]


def _back(graph: Graph, tensors: Iterable[int | None], step: Callable[[Op], Sequence[int | None]]) -> set[int]:
    """Return tensors, and all that they are computed from, as far as `step` goes from an op to its operands."""
    found, waiting = set[int](), [tensor for tensor in tensors if tensor is not None]
    while waiting:
        tensor = waiting.pop()
        if tensor not in found:
            found.add(tensor)
            op = graph.maker(tensor)
            waiting += [t for t in (step(op) if op is not None else ()) if t is not None]
    return found


def _leaving(graph: Graph) -> set[int]:
    """Return the tensors whose values only leave the model: the ops that read them only move them to an output."""
    outputs, result, moving = frozenset(graph.outputs), set[int](), set[int]()
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        for tensor in op.outputs:
            readers = graph.consumers[tensor]
            if (readers or tensor in outputs) and moving.issuperset(readers):
                result.add(tensor)
        if keeps_grid(graph, op) and result.issuperset(op.outputs):
            moving.add(index)
    return result


def _carry_through_inner_tensors(graph: Graph, op: Op, reached: dict[int, object]) -> None:
    """Pass the class of an op's input on to results inside a module or function (`x[:, 1:]` is two Slices)."""
    if op.type == "Concat" or not keeps_grid(graph, op):
        return
    data = [tensor for tensor in moved_inputs(op) if not (op.type in SCATTERS and _is_zero(graph, tensor))]
    if data and reached.keys() >= set(data) and len({reached[tensor] for tensor in data}) == 1:
        inner = [output for output in op.outputs if graph.tensors[output].site is None]
        reached.update({output: reached[data[0]] for output in inner if output not in reached})


def moved_inputs(op: Op) -> list[int]:
    """Return the tensors whose values the result of an op holds that keeps the grid."""
    data = op.inputs if op.type == "Concat" else op.inputs[:3:2] if op.type in SCATTERS else op.inputs[:1]
    return [tensor for tensor in data if tensor is not None]


def keeps_grid(graph: Graph, op: Op) -> bool:
    """Return whether an op's outputs hold only values of its data inputs (see `moved_inputs`), or 0."""
    if op.type == "Pad":
        return _pads_inside(graph, op)
    if op.type in SCATTERS:
        return op.attributes.get("reduction", "none") in ("none", b"none")
    return op.type in PASS_THROUGH or op.type == "Concat" or _resizes_nearest(op) or _casts_floats(graph, op)


def _pairs(graph: Graph, op: Op, sites: Collection[int]) -> list[tuple[int, int]]:
    data = op.inputs[0] if op.inputs else None
    if data is None:
        return []
    if op.type in JOINS and keeps_grid(graph, op):
        # a stored operand keeps its own encoding: it was quantized as a weight
        members = [t for t in moved_inputs(op) if t in sites and not graph.tensors[t].constant]
        return [(member, output) for output in op.outputs if output in sites for member in members]
    if keeps_grid(graph, op):
        return [(data, output) for output in op.outputs if data in sites and output in sites]
    return []


def _is_zero(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor holds zeros alone, which are on every grid."""
    root = graph.constant_root(tensor)
    value = graph.value(tensor if root is None else root)
    if value is not None:
        return not np.any(value)
    op = graph.maker(tensor)
    if op is not None and op.type == "ConstantOfShape":
        return not np.any(op.attributes.get("value", 0.0))
    return op is not None and op.type in VIEWS | REPEATS and op.inputs[0] is not None and _is_zero(graph, op.inputs[0])


def _pads_inside(graph: Graph, op: Op) -> bool:
    """Return whether a Pad adds only values that its input's range holds: copies of it, or 0."""
    mode = op.attributes.get("mode", "constant")
    if mode not in ("constant", b"constant"):
        return True
    absent = len(op.inputs) < 3 or op.inputs[2] is None
    return absent or graph.scalar(op.inputs[2]) == 0.0


def _casts_floats(graph: Graph, op: Op) -> bool:
    """Return whether an op turns one float type into another: the codes of its values stay the same."""
    return op.type == "Cast" and all(t is not None and graph.tensors[t].is_float for t in (*op.inputs, *op.outputs))


def _resizes_nearest(op: Op) -> bool:
    return op.type == "Resize" and op.attributes.get("mode", "nearest") in ("nearest", b"nearest")
