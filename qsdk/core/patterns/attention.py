"""Parts of attention that exporters write as arithmetic: softmax under a mask, and rotary position embedding (RoPE)."""

from collections.abc import Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import REPEATS, SHAPE_OPS, VIEWS
from qsdk.core.patterns.norms import reduced
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.patterns.terms import Anything, Captured, InputTensor, Pattern, Term, any_of, number, op

#: a score this far below the others has a weight of 2e-9, which no grid of a softmax shows
HIDES = -20.0
_MOVES = VIEWS | REPEATS | {"Cast", "Slice", "Gather", "Concat", "Pad", "Trilu"}
_JOINS = frozenset({"Add", "Min"})
_DEPTH = 12  # ops between a mask and the constant that hides


def is_mask(graph: Graph, tensor: int) -> str | None:
    """Return None if a tensor that is added to scores is a mask, else why it is none."""
    if _sources(graph, tensor, _DEPTH) is not None:
        return None
    return "what is added to its scores is no mask of -20 or less"


def mask_tensors(graph: Graph, groups: Iterable[Supergroup]) -> frozenset[int]:
    """Return the computed tensors that hold a mask of a group, or a part of one, and that nothing else reads."""
    group_of = {op: group for group in groups if "mask" in group.tensors for op in group.ops}
    result: set[int] = set()
    for group in {id(group): group for group in group_of.values()}.values():
        result |= _sources(graph, group.tensors["mask"], _DEPTH) or set()
    result = {tensor for tensor in result if tensor not in graph.output_set and tensor in graph.producer}
    while True:
        read = {
            tensor
            for tensor in result
            if all(_only_hides(graph, tensor, op, result, group_of) for op in _readers(graph, tensor))
        }
        if read == result:
            return frozenset(result)
        result = read


def _readers(graph: Graph, tensor: int) -> list[int]:
    return [op for op in graph.consumers[tensor] if graph.ops[op].type not in SHAPE_OPS]


def _only_hides(graph: Graph, tensor: int, reader: int, masks: set[int], group_of: Mapping[int, Supergroup]) -> bool:
    group = group_of.get(reader)
    if group is not None:
        return True
    return all(output in masks for output in graph.ops[reader].outputs)


def _sources(graph: Graph, tensor: int | None, depth: int) -> set[int] | None:
    """Return the tensors through which a tensor hides scores, itself included; None if it hides none.

    Scores are hidden by a constant of -20 or less, from a Where or a product.
    """
    if tensor is None or depth == 0:
        return None
    value = graph.value(tensor)
    if value is not None:
        # zeros are a mask that hides nothing; a trace has one where nothing is padded
        return {tensor} if np.size(value) and (float(np.min(value)) <= HIDES or not np.any(value)) else None
    op = graph.maker(tensor)
    if op is None:
        return None
    if op.type == "Where":
        return _chosen(graph, tensor, op.inputs[1:], depth)
    if op.type == "Mul":
        hides = any((graph.scalar(operand) or 0.0) <= HIDES for operand in op.inputs)
        return {tensor} if hides else None
    parts = op.inputs if op.type in _JOINS else op.inputs[:1] if op.type in _MOVES else ()
    # halved, since a sum of two masks doubles the work at every step
    result = [_sources(graph, part, depth - 1 if op.type in _MOVES else depth // 2) for part in parts]
    hiding = [part for part in result if part is not None]
    return {tensor}.union(*hiding) if hiding else None


def _chosen(graph: Graph, tensor: int, branches: Iterable[int | None], depth: int) -> set[int] | None:
    """Return the sources of a Where with a branch that hides; the other one is a number, a mask or a bias."""
    result = [_sources(graph, branch, depth - 1) for branch in branches]
    hiding = [part for part in result if part is not None]
    return {tensor}.union(*hiding) if hiding else None


#: What is added to a sum that is 1 at least.
LARGEST_GUARD = 1e-6


def _accept_bound(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    """Accept a Clip that has no upper bound."""
    clip = graph.ops[op_id]
    if "max" in clip.attributes or len(clip.inputs) > 2:
        return "its sum is clipped from above"
    return captured


def _shares(t: Term | str) -> Term:
    """Return the term for exponentials over their sum, with or without the largest taken off first.

    Only where it is taken off, a guard may stand in the divisor: it is 1 at least.
    """
    powers, below = op("Exp", t), op("Exp", _below(t))
    total, guarded = reduced(powers, "ReduceSum"), reduced(below, "ReduceSum")
    least = number(0.0, 1.0, "a bound of 1 or less")
    guarded = any_of(
        op("Add", guarded, number(0.0, LARGEST_GUARD, "an epsilon")),
        op("Max", guarded, least),
        op("Clip", guarded, least, where=_accept_bound),
        guarded,
    )
    return any_of(_quotient(below, guarded), _quotient(powers, total))


def _largest(t: Term | str) -> Term:
    largest = reduced(t, "ReduceMax")
    return any_of(op("Max", largest, number(-inf, -1e30, "minus infinity")), largest)


def _below(t: Term | str) -> Term:
    return any_of(op("Sub", t, _largest(t)), op("Add", t, op("Neg", _largest(t))))


def _log_shares(t: Term | str) -> Term:
    """Return the term for the scores below the largest less the logarithm of the sum of their exponentials."""
    total = op("Log", reduced(op("Exp", _below(t)), "ReduceSum"))
    return any_of(op("Sub", _below(t), total), op("Sub", t, op("Add", total, _largest(t))))


def _quotient(dividend: Term, divisor: Term) -> Term:
    inverse = any_of(op("Reciprocal", divisor), op("Div", 1.0, divisor))
    return any_of(op("Div", dividend, divisor), op("Mul", dividend, inverse))


def _softmax(t: Term | str) -> Term:
    return any_of(op("Softmax", t), _shares(t))


def _masked_softmax() -> Term:
    hidden = number(-inf, HIDES, "a fill of -20 or less")
    lowest = op("ReduceMin", "x")
    fill = any_of(hidden, op("Add", lowest, hidden), op("Sub", lowest, number(-HIDES, inf, "20 or more")))
    chosen = any_of(op("Where", Anything(), "x", fill), op("Where", Anything(), fill, "x"))
    softmax = _softmax(any_of(chosen, op("Add", "x", InputTensor("mask", "statistic", is_mask))))
    return any_of(_guarded(softmax), softmax)


def _guarded(softmax: Term) -> Term:
    """Return the term for a softmax whose rows of NaN become 0: those in which everything is hidden."""
    return op("Where", op("IsNaN", softmax), 0.0, softmax)


# rotary position embedding: a tensor is cut in two parts along an axis, (a, b) -> (a cos - b sin, b cos + a sin)


def _axis(graph: Graph, tensor: int | None, axis: int) -> int:
    shape = graph.shape_of(tensor)
    return axis % len(shape) - len(shape) if shape else axis


def _size(graph: Graph, tensor: int | None, axis: int) -> int | None:
    shape = graph.shape_of(tensor)
    size = None if shape is None else shape[axis]
    return size if isinstance(size, int) else None


def _bound(graph: Graph, op_id: int, position: int, default: int | None = None) -> Any:
    """Return a bound of a Slice: its value if it is constant, else the id of the tensor that computes it."""
    inputs = graph.ops[op_id].inputs
    given = inputs[position] if len(inputs) > position else None
    if given is None:
        return default
    value = graph.scalar(given)
    return ("computed", given) if value is None else int(value)


def _accept_slice(graph: Graph, op_id: int, tensor: int, captured: Captured, *, part: int) -> Captured | str:
    """Accept a Slice that takes the first or the second half, or the even or the odd elements."""
    source = graph.ops[op_id].inputs[0]
    start, end, axis, step = (_bound(graph, op_id, i, default) for i, default in ((1, None), (2, None), (3, 0), (4, 1)))
    if not isinstance(axis, int) or not isinstance(step, int):
        return "the axis or the step of its Slice is computed"
    axis = _axis(graph, source, axis)
    size = _size(graph, source, axis)
    if step == 2:
        return _cut(captured, ("pairs", axis)) if start == part else "its Slice does not start at the right element"
    cut = start if part else end
    if part == 0 and start != 0:
        return "its first Slice does not start at 0"
    if part == 1 and isinstance(end, int) and (end < 0 or (size is not None and end < size)):
        return "its second Slice stops before the end"
    if isinstance(cut, int):
        cut = cut % size if size is not None else abs(cut)
        if size is not None and 2 * cut != size:
            return "its Slices do not cut in halves"
    return _cut(captured, ("halves", axis, cut)) if step == 1 else f"its Slice takes steps of {step}"


def _accept_split(graph: Graph, op_id: int, tensor: int, captured: Captured, *, part: int) -> Captured | str:
    op_node = graph.ops[op_id]
    axis = _axis(graph, op_node.inputs[0], op_node.attributes.get("axis", 0))
    sizes = graph.value(op_node.inputs[1]) if len(op_node.inputs) > 1 else op_node.attributes.get("split")
    uneven = sizes is not None and (len(sizes) != 2 or sizes[0] != sizes[1])
    if len(op_node.outputs) != 2 or op_node.outputs.index(tensor) != part or uneven:
        return "its Split does not cut in halves in order"
    return _cut(captured, ("halves", axis, None))


def _accept_gather(graph: Graph, op_id: int, tensor: int, captured: Captured, *, part: int) -> Captured | str:
    op_node = graph.ops[op_id]
    axis = _axis(graph, op_node.inputs[0], op_node.attributes.get("axis", 0))
    index = graph.scalar(op_node.inputs[1]) if len(op_node.inputs) > 1 else None
    if index != part or axis != -1 or _size(graph, op_node.inputs[0], -1) not in (2, None):
        return "its Gather does not take one of two elements"
    return _cut(captured, ("pairs", axis))


def _cut(captured: Captured, cut: tuple[Any, ...]) -> Captured | str:
    known = captured.facts.get("cut", cut)
    return captured.noting("cut", cut) if known == cut else "its two parts are cut in different ways"


def _accept_join(graph: Graph, op_id: int, tensor: int, captured: Captured, *, layout: str) -> Captured | str:
    """Accept a Concat (with a Reshape behind it for pairs) that puts the parts back where they were cut."""
    axis = captured.facts["cut"][1]
    if captured.facts["cut"][0] != layout:
        return "its parts are cut one way and put together another way"
    if layout == "halves" and _axis(graph, tensor, graph.ops[op_id].attributes.get("axis", 0)) != axis:
        return "its parts are cut along one axis and put together along another"
    return captured


def _part(part: int) -> Term:
    pairs = op("Reshape", "x")
    return any_of(
        op("Slice", "x", where=partial(_accept_slice, part=part)),
        op("Split", "x", where=partial(_accept_split, part=part)),
        op("Gather", pairs, where=partial(_accept_gather, part=part)),
    )


def _both(first: Term, second: Term) -> Term:
    halves = op("Concat", first, second, where=partial(_accept_join, layout="halves"))
    stacked = op("Concat", op("Unsqueeze", first), op("Unsqueeze", second))
    return any_of(halves, op("Reshape|Flatten", stacked, where=partial(_accept_join, layout="pairs")))


def _rope() -> Term:
    """Return the term for rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""
    cos, sin = InputTensor("cos", "constant"), InputTensor("sin", "constant")
    first, second = _part(0), _part(1)
    turned = _both(any_of(op("Neg", second), op("Mul", second, -1.0)), first)
    by_parts = _both(
        op("Sub", op("Mul", first, cos), op("Mul", second, sin)),
        op("Add", op("Mul", second, cos), op("Mul", first, sin)),
    )
    return any_of(op("Add", op("Mul", turned, sin), op("Mul", "x", cos)), by_parts)


#: A softmax written by hand, and its logarithm.
SHARES, LOG_SHARES = Pattern("Softmax", _shares("x")), Pattern("LogSoftmax", _log_shares("x"))

ATTENTION = (
    Pattern("MaskedSoftmax", _masked_softmax(), near=("Softmax", "Where")),
    Pattern("GuardedSoftmax", _guarded(_softmax("x"))),
    SHARES,
    LOG_SHARES,
    Pattern("RoPE", _rope(), near=("Concat", "Neg", "Add")),
)
