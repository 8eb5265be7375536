"""The factors of all scale groups of a model together, the stored tensors that result from them, and report rows."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.channel_maps.flood import Ids
from qsdk.core.channel_maps.scale_groups import Edit, ScaleGroup
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Plan

FloatArray = npt.NDArray[np.float32]
Factors = npt.NDArray[np.float64]
_LARGEST = 1e6  # factor: beyond it products may overflow float32
_LARGEST_IN_FLOAT16 = 2.0**8  # the root of the largest number, so that neither side leaves the type's range at once
_TOP_OF_FLOAT16 = 2.0**15  # of scaled values; half of the largest number, since factors and data are samples


class Scalings:
    """The factors of each group, all 1 at first. Stored tensors are computed on demand and never kept.

    Attributes:
        graph: of the model.
        groups: those that are scaled.
        factors: one float64 array per group.
    """

    def __init__(
        self, graph: Graph, groups: Sequence[ScaleGroup], stored: Mapping[str, npt.NDArray[np.generic]]
    ) -> None:
        self.graph, self.groups, self._stored = graph, list(groups), stored
        self.factors: list[Factors] = [np.ones(group.channels) for group in groups]
        self._largest: dict[int, FloatArray] = {}
        self._edits: dict[int, list[tuple[int, Edit]]] = {}
        for number, group in enumerate(groups):
            for edit in group.edits:
                self._edits.setdefault(edit.root, []).append((number, edit))

    def multiply(self, number: int, by: Factors) -> Factors:
        """Multiply the factors of a group, as far as `bounded` allows; return what they were multiplied by."""
        applied = self.bounded(number, by)
        self.factors[number] = self.factors[number] * applied
        return applied

    def bounded(self, number: int, by: Factors, magnitudes: Mapping[int, Factors] | None = None) -> Factors:
        """Return factors to multiply a group's by, cut so that no scaled tensor overflows its type.

        `magnitudes` has the largest magnitude in each channel of activations, by tensor id, where it is known.
        """
        group, tensors = self.groups[number], self.graph.tensors
        narrow = {t for t in (*group.members, *(e.root for e in group.edits)) if tensors[t].dtype == "float16"}
        most = _LARGEST_IN_FLOAT16 if narrow else _LARGEST
        low, high = 1 / most / self.factors[number], most / self.factors[number]
        stored = [(edit.power, self._magnitudes(edit, group.channels)) for edit in group.edits if edit.root in narrow]
        known = magnitudes or {}
        held = [(member.power, known[t]) for t, member in group.members.items() if t in narrow and t in known]
        for power, magnitude in (*stored, *held):
            room = _TOP_OF_FLOAT16 / np.maximum(magnitude, 1 / _TOP_OF_FLOAT16)
            low, high = (low, np.minimum(high, room)) if power > 0 else (np.maximum(low, 1 / room), high)
        return np.clip(by, low, high)

    def _magnitudes(self, edit: Edit, channels: int) -> Factors:
        """Return the largest magnitude in each channel of an edit's stored tensor, scaled."""
        scaled = self.largest(edit.root) * self.multiplier(edit.root)
        return widest(scaled, edit.ids.reshape((1,) * (scaled.ndim - edit.ids.ndim) + edit.ids.shape), channels)

    def largest(self, root: int) -> FloatArray:
        """Return the largest magnitudes of an unscaled stored tensor, along the axes that no factor depends on."""
        if root not in self._largest:
            magnitudes = np.abs(self.stored(root))
            shape = np.broadcast_shapes(*(edit.ids.shape for _, edit in self._edits.get(root, ())))
            sizes = (1,) * (magnitudes.ndim - len(shape)) + shape
            flat = tuple(axis for axis, size in enumerate(sizes) if size == 1)
            self._largest[root] = np.asarray(magnitudes.max(axis=flat, keepdims=True))
        return self._largest[root]

    def stored(self, root: int) -> FloatArray:
        """Return a stored tensor as it is in the model now, unscaled until the factors are written."""
        return np.asarray(self._stored[self.graph.tensors[root].name], np.float32)

    def value(self, root: int) -> FloatArray:
        """Return a stored tensor, scaled."""
        result = self.stored(root)
        return np.asarray(result * self.multiplier(root), np.float32) if self.is_changed(root) else result

    def multiplier(self, root: int) -> Factors:
        """Return the product of all factors of a stored tensor; it broadcasts to its shape."""
        result = np.ones(())
        for number, edit in self._edits.get(root, ()):
            result = result * self.factors[number][edit.ids] ** edit.power
        return result

    def is_changed(self, root: int) -> bool:
        """Return whether a stored tensor changes."""
        return any(bool((self.factors[number] != 1).any()) for number, _ in self._edits.get(root, ()))

    def activation_factors(self, tensor: int, axis: int) -> Factors:
        """Return the factors of an activation along an axis; 1 where it is in no group."""
        result = np.ones(1)
        for group, factors in zip(self.groups, self.factors, strict=True):
            member = group.members.get(tensor)
            if member is not None:
                result = result * factors[np.moveaxis(member.ids, axis, -1).reshape(-1)] ** member.power
        return result

    def norms(self, norms: Mapping[str, FoldedNorm]) -> dict[str, FoldedNorm]:
        """Return the folded BatchNorms of scaled layers, adjusted to the factors."""
        result: dict[str, FoldedNorm] = {}
        for group, factors in zip(self.groups, self.factors, strict=True):
            for end in group.ends:
                owner = end.owner(self.graph)
                norm = result.get(owner, norms.get(owner))
                if norm is None or norm.before is not (end.reads is not None):
                    continue
                member = group.members[self.graph.ops[end.op].outputs[0] if end.reads is None else end.reads]
                by = factors[member.ids.reshape(-1)] ** member.power
                mean, std = ((values * by).astype(np.float32) for values in (norm.mean, norm.std))
                result[owner] = replace(norm, mean=mean, std=std)
        return result

    def changed(self) -> Iterator[int]:
        """Return the stored tensors that change."""
        return (root for root in self._edits if self.is_changed(root))


def widest(magnitudes: npt.NDArray[np.floating], ids: Ids, channels: int) -> Factors:
    """Return the largest magnitude of each channel in a tensor with this map."""
    others = tuple(axis for axis, size in enumerate(ids.shape) if size == 1 and magnitudes.shape[axis] > 1)
    reduced = magnitudes.max(axis=others, keepdims=True) if others else magnitudes
    result = np.zeros(channels)
    np.maximum.at(result, np.broadcast_to(ids, reduced.shape).reshape(-1), reduced.reshape(-1))
    return result


def balance(shrinking: Factors, growing: Factors, alpha: float = 0.5) -> Factors:
    """Return `shrinking^alpha / growing^(1 - alpha)`, 1 where either is 0."""
    alive = (shrinking > 0) & (growing > 0)
    one = np.where(alive, shrinking, 1.0) ** alpha
    return np.where(alive, one / np.where(alive, growing, 1.0) ** (1 - alpha), 1.0)


def center(factors: Factors) -> Factors:
    """Return the same factors around 1: only the balance between channels matters."""
    result: Factors = factors / np.exp(np.log(factors).mean())
    return result


def spread(ranges: Factors) -> float:
    """Return the largest range over the geometric mean of the ranges; 1 where all are equal."""
    alive = ranges[ranges > 0]
    return float(alive.max() / np.exp(np.log(alive).mean())) if alive.size else 1.0


# --- what of a sim may be changed, and its rows in reports ------------------------------------------------------------


def specs_of(plan: Plan) -> dict[str, Spec]:
    """Return the spec of every quantized site."""
    return {site: d.spec for site, d in plan.decisions.items() if d.quantized and d.spec is not None}


def obstacle(
    roots: Sequence[int],
    members: Iterable[int],
    graph: Graph,
    plan: Plan,
    own: Mapping[str, Encoding],
    stored: Container[str],
) -> str:
    """Return why stored tensors cannot be changed along with the computed tensors between them, or "".

    `own` are the encodings of the sim, and `stored` the names of the tensors that can be changed.
    """
    fixed = next((graph.tensors[root].name for root in roots if graph.tensors[root].name not in stored), None)
    if fixed is not None:
        return f"{fixed} is no parameter of its own that could be changed"
    sites = [graph.tensors[tensor].site for tensor in (*roots, *members)]
    decisions = [plan.decisions[site] for site in sites if site is not None and site in plan.decisions]
    for decision in decisions:
        if decision.encoding_site in own and own[decision.encoding_site].frozen:
            return f"the encoding of {decision.site} is frozen"
    if not any(decision.quantized or decision.dynamic for decision in decisions if decision.kind != "bias"):
        return "nothing in it is quantized"
    return ""


def row(group: ScaleGroup, graph: Graph, factors: Factors, **facts: Any) -> dict[str, Any]:
    """Return the report row of a scaled group."""
    ends = {"smallest_factor": float(np.min(factors)), "largest_factor": float(np.max(factors))}
    return {"group": group.label(graph), **facts, **ends, "reason": ""}


def blocked_row(group: ScaleGroup, graph: Graph, names: Sequence[str]) -> dict[str, Any]:
    """Return the report row of a group that is not scaled; `names` are the columns that it leaves empty."""
    seed = graph.tensors[group.seed]
    name = group.label(graph) if group.channels else seed.site or seed.name
    return {"group": name, **dict.fromkeys(names), "reason": group.blocked}
