"""Scaled products of queries and keys, a softmax and a product with values, as one pattern."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.patterns.terms import Anything, Captured, InputTensor, Pattern, Term, any_of, number, op

_ANY = number(-math.inf, math.inf, "a factor")
_FACTOR = "factor of op "  # facts of a match: the name of one, before the number of its op
_MATRIX = 2  # axes of a product
_CACHED = 4  # axes of queries with heads
_DEPTH = 12  # ops between a mask and the numbers that it is made of


def _number_of(graph: Graph, node: Op) -> float:
    return next(value for value in map(graph.scalar, node.inputs) if value is not None)


def _note_factor(graph: Graph, op_id: int, _: int, captured: Captured) -> Captured | str:
    """Note a factor of the scores under its op: a guarded softmax is matched twice."""
    node = graph.ops[op_id]
    if node.type == "Div":
        divisor = graph.scalar(node.inputs[1])
        return captured.noting(f"{_FACTOR}{op_id}", 1 / divisor) if divisor else "it is divided by 0"
    return captured.noting(f"{_FACTOR}{op_id}", _number_of(graph, node))


def _note_cap(graph: Graph, op_id: int, _: int, captured: Captured) -> Captured | str:
    """Note c of c tanh(x / c): what stands inside is x / c."""
    cap = _number_of(graph, graph.ops[op_id])
    if cap <= 0:
        return "the cap of its scores is not positive"
    return captured.noting("softcap", cap).noting(f"{_FACTOR}{op_id}", cap)


def scale_of(facts: Mapping[str, Any]) -> float:
    """Return the product of the factors of the scores."""
    return math.prod(float(fact) for name, fact in facts.items() if name.startswith(_FACTOR))


def _note_guard(_: Graph, __: int, ___: int, captured: Captured) -> Captured:
    return captured.noting("guarded", True)


def _over_last_axis(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    shape = graph.shape_of(tensor)
    axis = graph.ops[op_id].attributes.get("axis", -1)
    if shape is None or axis % len(shape) != len(shape) - 1:
        return "its softmax is not over the last axis"
    return captured


def _note_permutation(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    rank = len(graph.shape_of(tensor) or ())
    order = graph.ops[op_id].attributes.get("perm") or [*reversed(range(rank))]
    return captured.noting("perm", tuple(order))


def _repeats(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    """Accept a repetition of heads one by one: [b, h, s, d] -> [b, h, 1, s, d] -> [b, h, n, s, d] -> [b, hn, s, d]."""
    wide = graph.ops[op_id].inputs[0]
    expand = graph.maker(wide)
    apart = None if expand is None else expand.inputs[0]
    unsqueeze = graph.maker(apart)
    shapes = [graph.shape_of(t) for t in (None if unsqueeze is None else unsqueeze.inputs[0], apart, wide, tensor)]
    if any(shape is None for shape in shapes):
        return "the shapes of its repeated heads are unknown"
    given, alone, repeated, joined = (shape or () for shape in shapes)
    if (len(given), len(alone), len(repeated), len(joined)) != (4, 5, 5, 4):
        return "its heads are not repeated along an axis of their own"
    heads, count = repeated[1:3]
    if not isinstance(heads, int) or not isinstance(count, int) or heads != given[1] or alone[2] != 1:
        return "its heads are not repeated one by one"
    same = all(not _differ(a, b) for a, b in zip((given[0], *given[2:]), (joined[0], *joined[2:]), strict=True))
    return captured if same and joined[1] == heads * count else "its repeated heads are joined in another order"


def _differ(a: int | str | None, b: int | str | None) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _scaled(t: Term | str) -> Term:
    """Return the term for a tensor, or that times or over a number."""
    once = any_of(op("Mul", t, _ANY, where=_note_factor), op("Div", t, _ANY, where=_note_factor))
    return any_of(once, t)


def _repeated(name: str) -> Term:
    wide = op("Expand|Tile", op("Unsqueeze|Reshape", name), Anything())
    return any_of(op("Reshape", wide, Anything(), where=_repeats), name)


def _attention() -> Pattern:
    keys = _scaled(op("Transpose", _scaled(_repeated("k")), where=_note_permutation))
    scores = _scaled(_scaled(op("MatMul", _scaled("q"), keys)))
    capped = any_of(op("Mul", op("Tanh", scores), _ANY, where=_note_cap), scores)
    masked = any_of(op("Add", capped, InputTensor("mask", "statistic")), capped)
    softmax = op("Softmax", masked, where=_over_last_axis)
    guarded = any_of(op("Where", op("IsNaN", softmax), 0.0, softmax, where=_note_guard), softmax)
    return Pattern("Attention", op("MatMul", guarded, _repeated("v")), check, near=("Softmax", "MatMul"))


def check(graph: Graph, captured: Captured) -> str | None:
    """Return why a match of the structure is no attention that the operator computes, or None."""
    shapes = [graph.shape_of(captured.tensors[name]) for name in ("q", "k", "v")]
    if any(shape is None or len(shape) not in (3, _CACHED) for shape in shapes) or len({*map(len, shapes)}) > 1:  # type: ignore[arg-type]
        return "its queries, keys and values do not have three or four axes"
    query, key, value = (shape or () for shape in shapes)
    if scale_of(captured.facts) <= 0:
        return "the factor of its scores is not positive"
    order = [*captured.facts["perm"]]
    order[-_MATRIX:] = reversed(order[-_MATRIX:])
    key = tuple(key[axis] for axis in order)
    if any(_differ(query[0], shape[0]) for shape in (key, value)):
        return "its batches are repeated"
    if len(query) == _CACHED:
        if not all(isinstance(shape[1], int) for shape in (query, key, value)):
            return "the number of its heads is open"
        if key[1] != value[1] or int(query[1]) % int(key[1]):  # type: ignore[arg-type]
            return "its keys and values do not have the same heads"
    return None


def least_of_mask(graph: Graph, tensor: int) -> float | None:
    """Return the least of the stored numbers that a mask is made of, or None where there are none."""
    seen, waiting, least = set[int](), [(tensor, _DEPTH)], math.inf
    while waiting:
        current, depth = waiting.pop()
        value = graph.value(current)
        if value is not None and np.size(value) and np.issubdtype(value.dtype, np.floating):
            least = min(least, float(np.min(value)))
        node = graph.maker(current)
        if node is None or current in seen or not depth or not graph.tensors[current].is_float:
            continue
        seen.add(current)
        waiting += [(one, depth - 1) for one in node.inputs if one is not None]
    return None if math.isinf(least) and least > 0 else least


def keys_order(permutation: Sequence[int]) -> list[int] | None:
    """Return how keys [batch, heads, step, size] come of what a Transpose of them reads; None if they are that."""
    order = [*permutation]
    order[-_MATRIX:] = reversed(order[-_MATRIX:])
    return None if order == [*range(len(order))] else order


ATTENTION = _attention()
