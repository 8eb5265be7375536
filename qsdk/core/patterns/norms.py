"""Norms that exporters write as arithmetic: LayerNorm, RMSNorm, InstanceNorm and GroupNorm in every spelling."""

from functools import partial
from math import prod

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.terms import (
    Anything,
    Captured,
    InputTensor,
    Node,
    Pattern,
    Term,
    amiss,
    any_of,
    number,
    op,
    stored,
)

_REDUCES = "ReduceMean|ReduceSum"
_EPSILON = number(0.0, 0.1, "an epsilon")


def _axes(graph: Graph, op_id: int) -> tuple[int, ...] | str:
    """Return the axes of a reduction, counted from the end where the rank is known; or why they are unknown."""
    result = graph.ops[op_id]
    axes = result.attributes.get("axes")
    if axes is None and len(result.inputs) > 1 and result.inputs[1] is not None:
        value = graph.value(result.inputs[1])
        if value is None:
            return "the axes of its mean are computed"
        axes = np.reshape(value, -1).tolist()
    shape = None if result.inputs[0] is None else graph.tensors[result.inputs[0]].shape
    if not axes and result.attributes.get("noop_with_empty_axes", 0):
        return "its mean runs over no axis"
    if shape is None:
        return tuple(sorted(axes or ()))
    return tuple(sorted({axis % len(shape) - len(shape) for axis in axes or range(len(shape))}))


def _accept_reduction(graph: Graph, op_id: int, tensor: int, captured: Captured, *, keeps: bool) -> Captured | str:
    """Accept a reduction over the same axes as all others of the norm; note the number of elements."""
    axes = _axes(graph, op_id)
    if isinstance(axes, str):
        return axes
    if bool(graph.ops[op_id].attributes.get("keepdims", 1)) is not keeps:
        return "its mean does not keep the axes it runs over"
    if captured.facts.get("axes", axes) != axes:
        return "its mean and its variance run over different axes"
    source = graph.ops[op_id].inputs[0]
    shape = None if source is None else graph.tensors[source].shape
    sizes = [None] if shape is None else [shape[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int)]
    count = prod(known) if len(known) == len(sizes) else None
    return captured.noting("axes", axes).noting("count", count).noting("rank", None if shape is None else len(shape))


def _accept_restored_axes(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    """Accept a reshape that restores the reduced axes with size 1."""
    shape, axes = graph.tensors[tensor].shape, captured.facts["axes"]
    if shape is None or len(shape) != captured.facts["rank"] or any(shape[axis] != 1 for axis in axes):
        return "its mean does not keep the axes it runs over"
    return captured


def _accept_division_by_count(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    """Accept a sum that is divided by the number of its elements."""
    count, op_node = captured.facts["count"], graph.ops[op_id]
    divisors = [graph.scalar(operand) for operand in op_node.inputs]
    values = [1 / v if op_node.type == "Mul" else v for v in divisors if v]
    if count is None or len(values) != 1 or abs(values[0] - count) > 1e-3 * count:
        return "its sum is not divided by the number of elements"
    return captured


def _dropped(t: Term | str, type: str = "ReduceMean") -> Term:
    return op(type, t, where=partial(_accept_reduction, keeps=False))


def _restored(t: Term) -> Term:
    shaped = op("Reshape|Unsqueeze", t, where=_accept_restored_axes)
    # an Expand to its own shape, which torch writes where a dimension is dynamic
    return any_of(shaped, op("Expand", shaped, where=_accept_restored_axes))


def reduced(t: Term | str, type: str) -> Term:
    """Return the term for a reduction that keeps its axes, or has them restored, along the same ones as all others."""
    kept = op(type, t, where=partial(_accept_reduction, keeps=True))
    return any_of(kept, _restored(_dropped(t, type)))


def _mean(t: Term | str) -> Term:
    summed = op("Div|Mul", reduced(t, "ReduceSum"), Anything(), where=_accept_division_by_count)
    return any_of(reduced(t, "ReduceMean"), summed)


def _square(t: Term | str) -> Term:
    return any_of(op("Pow", t, 2.0), op("Mul", t, t))


def _centred(t: Term | str) -> Term:
    return any_of(op("Sub", t, _mean(t)), op("Add", t, op("Neg", _mean(t))))


def _unbiased(squared: Term) -> Term:
    """Return the term for a variance that is multiplied by N and divided by N - 1."""
    reason = "its variance is divided by N - 1, not by N"
    inner = op("Div", op("Mul", _dropped(squared), Anything()), Anything())
    kept = op("Div", op("Mul", _mean(squared), Anything()), Anything())
    return any_of(amiss(kept, reason), _restored(amiss(inner, reason)))


def _spread(difference: Term) -> Term:
    """Return the term for the mean of the squares, with spellings that are often confused with it."""
    squared = _square(difference)
    absolute = amiss(op("Abs", difference), "its mean is of |x|, not of the square")
    return any_of(_mean(any_of(squared, absolute)), _unbiased(squared))


def _variance(t: Term | str) -> Term:
    """Return the term for the mean squared distance, or E[x^2] - E[x]^2 with or without a floor of 0."""
    difference = op("Sub", _mean(_square(t)), _square(_mean(t)))
    floored = any_of(op("Relu", difference), op("Max", difference, 0.0), op("Clip", difference, 0.0), difference)
    return any_of(_spread(_centred(t)), floored)


class _Spelling:
    """The spellings of the factor that a variance becomes."""

    def __init__(self, variance: Term) -> None:
        inside = any_of(op("Add", variance, _EPSILON), variance)
        root = any_of(op("Sqrt", inside), op("Pow", inside, 0.5))
        late = amiss(op("Add", root, _EPSILON), "the epsilon is added after the Sqrt")
        turned = any_of(op("Reciprocal", inside), op("Div", 1.0, inside))
        self.root = any_of(root, late)
        self.inverse = any_of(
            op("Reciprocal", self.root),
            op("Div", 1.0, self.root),
            op("Pow", self.root, -1.0),
            op("Pow", inside, -0.5),
            op("Sqrt", turned),
        )

    def normed(self, t: Term | str) -> Term:
        """Return the term for the distance over the root."""
        return any_of(op("Div", t, self.root), op("Mul", t, self.inverse))

    def scaled(self, t: Term | str) -> Term:
        """Return the term for the normed distance times gamma, multiplied in anywhere."""
        gamma, root, inverse = _GAMMA, self.root, self.inverse
        return any_of(
            op("Mul", self.normed(t), gamma),
            op("Div", op("Mul", t, gamma), root),
            op("Mul", op("Mul", t, gamma), inverse),
            op("Mul", t, self.factor),
            self.normed(t),
        )

    @property
    def factor(self) -> Term:
        """Return the term for gamma over the root."""
        return any_of(op("Mul", self.inverse, _GAMMA), op("Div", _GAMMA, self.root))


_GAMMA = any_of(stored("gamma"), op("Add", stored("gamma"), 1.0))
_BETA = stored("beta", "statistic")


def _shifted(t: Term) -> Term:
    return any_of(op("Add", t, _BETA), t)


def _folded(t: Term | str, spelling: _Spelling) -> Term:
    """Return the term for `x * k + (beta - mean * k)`, as TensorFlow writes it."""
    factor = any_of(spelling.factor, spelling.inverse)
    moved = op("Mul", _mean(t), factor)
    return any_of(op("Add", op("Mul", t, factor), op("Sub", _BETA, moved)), op("Sub", op("Mul", t, factor), moved))


def _varied(graph: Graph, tensor: int | None) -> set[int] | None:
    """Return the axes, from the end, along which a stored tensor varies; None where its shape is unknown."""
    shape = () if tensor is None else graph.tensors[tensor].shape
    return None if shape is None else {axis - len(shape) for axis, size in enumerate(shape) if size != 1}


def _check_affine(graph: Graph, captured: Captured) -> str | None:
    """Return None if the addend can be a beta (along the normalised axes, one axis, or as gamma), else why not."""
    beta, gamma = _varied(graph, captured.tensors.get("beta")), _varied(graph, captured.tensors.get("gamma"))
    axes = set(captured.facts.get("axes", ()))
    if beta is None or gamma is None or len(beta) <= 1 or beta <= axes or beta <= gamma:
        return None
    return f"{graph.tensors[captured.tensors['beta']].name!r} is added along more axes than a beta has"


def _layer_or_instance(graph: Graph, captured: Captured) -> str:
    axes = set(captured.facts.get("axes", ()))
    varied = (_varied(graph, captured.tensors.get("gamma")) or set()) | (
        _varied(graph, captured.tensors.get("beta")) or set()
    )
    outside = varied - axes if all(axis < 0 for axis in axes) else set()
    return "LayerNorm" if not outside else "GroupNorm" if varied & axes else "InstanceNorm"


def _check_groups(graph: Graph, captured: Captured) -> str | None:
    """Return None if the norm between the two Reshapes is plain and the second undoes the first, else why not."""
    for name, plain in (("scale", 1.0), ("bias", 0.0)):
        op_node = graph.value(captured.tensors.get(name))
        if op_node is not None and not np.all(op_node == plain):
            return f"the {name} of its InstanceNormalization is not {plain:g}"
    before, after = (graph.tensors[t].shape for t in (captured.tensors["x"], captured.facts["back"]))
    if before is None or after is None or any(not isinstance(n, int) for n in (*before, *after)) or before == after:
        return _check_affine(graph, captured)
    return "its second Reshape does not give the shape back"


def _group_norm() -> Pattern:
    """Return the pattern of a norm by groups: a Reshape, a norm without gamma, and a Reshape back."""
    grouped = op("Reshape", "x")
    instance = op("InstanceNormalization", grouped, stored("scale", "statistic"), stored("bias", "statistic"))
    spelled = _Spelling(_variance(grouped)).normed(_centred(grouped))
    back: Node = op(
        "Reshape", any_of(instance, spelled), where=lambda g, _, tensor, captured: captured.noting("back", tensor)
    )
    return Pattern("GroupNorm", _shifted(any_of(op("Mul", back, _GAMMA), back)), _check_groups)


def _layer_norm() -> Pattern:
    spelling = _Spelling(_variance("x"))
    output = any_of(_shifted(spelling.scaled(_centred("x"))), _folded("x", spelling))
    return Pattern("LayerNorm", output, _check_affine, _layer_or_instance, ("Sub|Neg", _REDUCES, "Sqrt|Pow"))


def _rms_norm() -> Pattern:
    output = _shifted(_Spelling(_spread(InputTensor("x"))).scaled("x"))
    return Pattern("RMSNorm", output, _check_affine, None, (_REDUCES, "Sqrt|Pow"))


#: `(x - mean) / sqrt(variance + epsilon)` alone, without a gain or a bias.
STANDARDIZED = Pattern("standardized", _Spelling(_variance("x")).normed(_centred("x")))
#: `x / sqrt(mean of x**2 + epsilon)` alone.
UNCENTRED = Pattern("uncentred", _Spelling(_spread(InputTensor("x"))).normed("x"))

NORMS = (_group_norm(), _layer_norm(), _rms_norm())
