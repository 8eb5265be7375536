"""The factors of all regions of a model together, and the stored tensors that result from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.scaling.channels import Ids
from qsdk.core.scaling.edits import Edit
from qsdk.core.scaling.regions import Region

FloatArray = npt.NDArray[np.float32]
Factors = npt.NDArray[np.float64]
_LARGEST = 1e6  # factor: beyond it products may overflow float32
_LARGEST_IN_FLOAT16 = 2.0**8  # the root of the largest number, so that neither side leaves the type's range at once
_TOP_OF_FLOAT16 = 2.0**15  # of scaled values; half of the largest number, since factors and data are samples


class Scalings:
    """The factors of each region, all 1 at first. Stored tensors are computed on demand and never kept.

    Attributes:
        graph: of the model.
        regions: those that are scaled.
        factors: one float64 array per region.
    """

    def __init__(self, graph: Graph, regions: Sequence[Region], stored: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self.graph, self.regions, self._stored = graph, list(regions), stored
        self.factors: list[Factors] = [np.ones(region.channels) for region in regions]
        self._largest: dict[int, FloatArray] = {}
        self._edits: dict[int, list[tuple[int, Edit]]] = {}
        for number, region in enumerate(regions):
            for edit in region.edits:
                self._edits.setdefault(edit.root, []).append((number, edit))

    def multiply(self, number: int, by: Factors) -> Factors:
        """Multiply the factors of a region, as far as `bounded` allows; return what they were multiplied by."""
        applied = self.bounded(number, by)
        self.factors[number] = self.factors[number] * applied
        return applied

    def bounded(self, number: int, by: Factors, magnitudes: Mapping[int, Factors] | None = None) -> Factors:
        """Return factors to multiply a region's by, cut so that no scaled tensor overflows its type.

        Args:
            number: of the region.
            by: the factors.
            magnitudes: tensor id -> largest magnitude in each channel, for the activations where it is known.
        """
        region, tensors = self.regions[number], self.graph.tensors
        narrow = {t for t in (*region.members, *(e.root for e in region.edits)) if tensors[t].dtype == "float16"}
        most = _LARGEST_IN_FLOAT16 if narrow else _LARGEST
        low, high = 1 / most / self.factors[number], most / self.factors[number]
        stored = [(edit.power, self._magnitudes(edit, region.channels)) for edit in region.edits if edit.root in narrow]
        known = magnitudes or {}
        held = [(place.power, known[t]) for t, place in region.members.items() if t in narrow and t in known]
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
            flat = tuple(axis for axis, size in enumerate(self.multiplier_shape(root)) if size == 1)
            self._largest[root] = np.asarray(magnitudes.max(axis=flat, keepdims=True))
        return self._largest[root]

    def stored(self, root: int) -> FloatArray:
        """Return a stored tensor as it is in the model now, unscaled until the factors are written."""
        return np.asarray(self._stored[self.graph.tensors[root].name], np.float32)

    def value(self, root: int) -> FloatArray:
        """Return a stored tensor, scaled."""
        result = self.stored(root)
        if not self.is_changed(root):
            return result
        return np.asarray(result * self.multiplier(root), np.float32)

    def multiplier(self, root: int) -> Factors:
        """Return the product of all factors of a stored tensor; it broadcasts to its shape."""
        result = np.ones(())
        for number, edit in self._edits.get(root, ()):
            result = result * self.factors[number][edit.ids] ** edit.power
        return result

    def multiplier_shape(self, root: int) -> tuple[int, ...]:
        """Return the shape of `multiplier`, with the tensor's rank."""
        rank = len(self.graph.tensors[root].shape or ())
        shape = np.broadcast_shapes(*(edit.ids.shape for _, edit in self._edits.get(root, ())))
        return (1,) * (rank - len(shape)) + shape

    def is_changed(self, root: int) -> bool:
        """Return whether a stored tensor changes."""
        return any(bool((self.factors[number] != 1).any()) for number, _ in self._edits.get(root, ()))

    def activation_factors(self, tensor: int, axis: int) -> Factors:
        """Return the factors of an activation along an axis; 1 where it is in no region."""
        result = np.ones(1)
        for region, factors in zip(self.regions, self.factors, strict=True):
            place = region.members.get(tensor)
            if place is not None:
                result = result * factors[np.moveaxis(place.ids, axis, -1).reshape(-1)] ** place.power
        return result

    def norms(self, norms: Mapping[str, FoldedNorm]) -> dict[str, FoldedNorm]:
        """Return the folded BatchNorms of scaled layers, adjusted to the factors."""
        result: dict[str, FoldedNorm] = {}
        for region, factors in zip(self.regions, self.factors, strict=True):
            for end in region.ends:
                owner = end.owner(self.graph)
                norm = result.get(owner, norms.get(owner))
                if norm is None or norm.before is not (end.reads is not None):
                    continue
                tensor = self.graph.ops[end.op].outputs[0] if end.reads is None else end.reads
                place = region.members[tensor]
                by = factors[place.ids.reshape(-1)] ** place.power
                result[owner] = replace(norm, mean=_float32(norm.mean * by), std=_float32(norm.std * by))
        return result

    def changed(self) -> Iterator[int]:
        """Return the stored tensors that change."""
        return (root for root in self._edits if self.is_changed(root))


def _float32(values: npt.NDArray[np.floating]) -> FloatArray:
    return values.astype(np.float32)


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
