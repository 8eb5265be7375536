"""Factors by what activations look like: SmoothQuant (Xiao et al. 2023) and AWQ (Lin et al. 2024)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import Spec
from qsdk.core.scaling.channel_observer import Look
from qsdk.core.scaling.edits import End
from qsdk.core.scaling.layers import SeenLayer, output_error, seen_layer
from qsdk.core.scaling.regions import Region
from qsdk.core.scaling.scalings import Factors, Scalings, balanced, centred, widest


@dataclass(frozen=True)
class Chosen:
    """What a search found for one region.

    Attributes:
        factors: float64, one per channel.
        alpha: the exponent that they come from; None where the region stays as it is.
        error_before: relative error of the outputs of the layers that read it, by the sample.
        error_after: the same with these factors.
    """

    factors: Factors
    alpha: float | None
    error_before: float
    error_after: float


class Seen:
    """Regions with what was seen of them.

    Attributes:
        scalings: the factors so far.
        looks: tensor id -> look, as the tensors were before any scaling.
        specs: site -> what it is quantized to.
    """

    def __init__(self, scalings: Scalings, looks: Mapping[int, Look], specs: Mapping[str, Spec]) -> None:
        self.scalings, self.looks, self.specs = scalings, looks, specs
        self.graph: Graph = scalings.graph

    def layers(self, region: Region) -> list[tuple[End, SeenLayer]]:
        """Return the layers that read a region's tensors and were looked at."""
        found = ((end, seen_layer(self.graph, end.op, self.specs)) for end in region.consumers if end.linear)
        return [(end, layer) for end, layer in found if layer is not None and layer.tensor in self.looks]

    def shrinking(self, number: int, *, mean: bool = False) -> Factors:
        """Return the largest (or mean) magnitude of each channel of what is divided by the factors."""
        region = self.scalings.regions[number]
        read = [end.reads for end in region.consumers if end.reads is not None]
        tensors = read or [t for t, place in region.places.items() if place.power == -1 and t in self.looks]
        return self._of_activations(number, tensors, mean=mean)

    def growing(self, number: int) -> Factors:
        """Return the largest magnitude per channel of what the factors multiply: weights, or the other operand."""
        region = self.scalings.regions[number]
        partners = [t for t, place in region.places.items() if place.power == 1 and t in self.looks]
        found = self._of_activations(number, partners)
        for end in region.consumers:
            for edit in end.edits:
                if edit.role == "weight":
                    weight = np.abs(self.scalings.value(edit.root))
                    found = np.maximum(found, widest(weight, edit.ids, region.channels))
        return found

    def _of_activations(self, number: int, tensors: Sequence[int], *, mean: bool = False) -> Factors:
        region, found = self.scalings.regions[number], np.zeros(self.scalings.regions[number].channels)
        for tensor in tensors:
            look, place = self.looks.get(tensor), region.places[tensor]
            if look is not None:
                flat = place.ids.reshape(-1)
                values = (look.mean_magnitude if mean else look.amax) * self.scalings.factors[number][
                    flat
                ] ** place.power
                np.maximum.at(found, flat, values)
        return found

    def error(self, number: int, factors: Factors) -> float:
        """Return the mean relative error of the outputs of a region's readers, with these factors applied on top."""
        region = self.scalings.regions[number]
        whole = factors * self.scalings.factors[number]
        errors = []
        for end, layer in self.layers(region):
            edit = next(edit for edit in end.edits if edit.root == layer.root)
            place = region.places[layer.tensor]
            others = self.scalings.value(layer.root)
            by = factors[edit.ids] ** edit.power
            rows_by = whole[place.ids.reshape(-1)] ** -place.power
            errors.append(output_error(layer, others, self.looks[layer.tensor], rows_by, by))
        if not errors:
            errors.append(self._product_error(number, whole))
        return float(np.mean(errors))

    def _product_error(self, number: int, factors: Factors) -> float:
        """What rounding both sides of a product of two computed tensors adds to it, relative, up to a constant."""
        region = self.scalings.regions[number]
        noise: dict[int, float] = {}
        power: dict[int, float] = {}
        for tensor, place in region.places.items():
            look = self.looks.get(tensor)
            spec = self.specs.get(self.graph.tensors[tensor].site or "")
            if look is None:
                continue
            by = factors[place.ids.reshape(-1)] ** place.power
            width = max(float((look.high * by).max()), 0.0) - min(float((look.low * by).min()), 0.0)
            steps = (spec.dtype.hi - spec.dtype.lo) if spec is not None and spec.dtype.is_quantized else np.inf
            noise[place.power] = noise.get(place.power, 0.0) + (width / steps) ** 2 / 12
            power[place.power] = float((look.mean_square * by**2).sum())
        if len(power) < 2 or 0.0 in power.values():
            return 0.0
        return float(noise[-1] / power[-1] + noise[1] / power[1])


def smoothed(seen: Seen, number: int, alphas: Sequence[float]) -> Chosen:
    """Factors `amax(X)^alpha / amax(W)^(1 - alpha)` of the alpha with the least error; none is better than a worse one.

    Args:
        seen: the regions.
        number: of the one.
        alphas: one is taken as it is; of several the best, or none.
    """
    shrinking, growing = seen.shrinking(number), seen.growing(number)
    before = seen.error(number, np.ones_like(shrinking))
    tried = []
    for alpha in alphas:
        factors = centred(balanced(shrinking, growing, alpha))
        tried.append(Chosen(factors, alpha, before, seen.error(number, factors)))
    return _best(tried, before, forced=len(alphas) == 1)


def activation_aware(seen: Seen, number: int, grid: int) -> Chosen:
    """Factors `mean(|X|)^alpha`, alpha from 0 to 1 in `grid` steps, by the error of the outputs."""
    magnitude = seen.shrinking(number, mean=True)
    before = seen.error(number, np.ones_like(magnitude))
    tried = []
    for step in range(1, grid + 1):
        alpha = step / grid
        factors = centred(np.where(magnitude > 0, np.maximum(magnitude, 1e-4), 1.0) ** alpha)
        tried.append(Chosen(factors, alpha, before, seen.error(number, factors)))
    return _best(tried, before, forced=False)


def _best(tried: Sequence[Chosen], before: float, *, forced: bool) -> Chosen:
    best = min(tried, key=lambda chosen: chosen.error_after)
    if forced or best.error_after < before:
        return best
    return Chosen(np.ones_like(best.factors), None, before, before)
