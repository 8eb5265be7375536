"""Factors from the statistics of activations: SmoothQuant (Xiao et al. 2023) and AWQ (Lin et al. 2024)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import Spec
from qsdk.core.scaling.channel_observer import ChannelObserver
from qsdk.core.scaling.edits import End
from qsdk.core.scaling.layers import ObservedLayer, observed_layer, output_error
from qsdk.core.scaling.regions import Region
from qsdk.core.scaling.scalings import Factors, Scalings, balance, center, widest


@dataclass(frozen=True)
class FactorChoice:
    """The result of a search for one region.

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


class ObservedRegions:
    """Regions with the statistics of their tensors.

    Attributes:
        scalings: the factors so far.
        observers: tensor id -> statistics before any scaling.
        specs: site -> its spec.
        blocks: weight site -> channels of each scale with which its layers round their input.
    """

    def __init__(
        self,
        scalings: Scalings,
        observers: Mapping[int, ChannelObserver],
        specs: Mapping[str, Spec],
        blocks: Mapping[str, int],
    ) -> None:
        self.scalings, self.observers, self.specs, self.blocks = scalings, observers, specs, blocks
        self.graph: Graph = scalings.graph

    def layers(self, region: Region) -> list[tuple[End, ObservedLayer]]:
        """Return the layers that read a region's tensors and were observed."""
        known = (self.specs, self.blocks)
        result = ((end, observed_layer(self.graph, end.op, *known)) for end in region.consumers if end.linear)
        return [(end, layer) for end, layer in result if layer is not None and layer.tensor in self.observers]

    def shrinking(self, number: int, *, mean: bool = False) -> Factors:
        """Return the largest (or mean) magnitude per channel of what the factors divide."""
        region = self.scalings.regions[number]
        read = [end.reads for end in region.consumers if end.reads is not None]
        tensors = read or [t for t, place in region.members.items() if place.power == -1 and t in self.observers]
        return self._of_activations(number, tensors, mean=mean)

    def growing(self, number: int) -> Factors:
        """Return the largest magnitude per channel of what the factors multiply: weights, or the other operand."""
        region = self.scalings.regions[number]
        partners = [t for t, place in region.members.items() if place.power == 1 and t in self.observers]
        result = self._of_activations(number, partners)
        for end in region.consumers:
            for edit in end.edits:
                if edit.role == "weight":
                    weight = np.abs(self.scalings.value(edit.root))
                    result = np.maximum(result, widest(weight, edit.ids, region.channels))
        return result

    def _of_activations(self, number: int, tensors: Sequence[int], *, mean: bool = False) -> Factors:
        region, result = self.scalings.regions[number], np.zeros(self.scalings.regions[number].channels)
        for tensor in tensors:
            look, place = self.observers.get(tensor), region.members[tensor]
            if look is not None:
                flat = place.ids.reshape(-1)
                values = (look.mean_magnitude if mean else look.amax) * self.scalings.factors[number][
                    flat
                ] ** place.power
                np.maximum.at(result, flat, values)
        return result

    def bounded(self, number: int, factors: Factors) -> Factors:
        """Return factors cut so that neither stored tensors nor the observed activations overflow their type."""
        members = self.scalings.regions[number].members
        known = {t: self._of_activations(number, [t]) for t in members if t in self.observers}
        return self.scalings.bounded(number, factors, known)

    def error(self, number: int, factors: Factors) -> float:
        """Return the mean relative error of the outputs of a region's readers, with these factors applied on top."""
        region = self.scalings.regions[number]
        whole = factors * self.scalings.factors[number]
        errors = []
        for end, layer in self.layers(region):
            edit = next(edit for edit in end.edits if edit.root == layer.root)
            place = region.members[layer.tensor]
            others = self.scalings.value(layer.root)
            by = factors[edit.ids] ** edit.power
            rows_by = whole[place.ids.reshape(-1)] ** -place.power
            errors.append(output_error(layer, others, self.observers[layer.tensor], rows_by, by))
        if not errors:
            errors.append(self._product_error(number, whole))
        return float(np.mean(errors))

    def _product_error(self, number: int, factors: Factors) -> float:
        """Return the error that quantizing both operands adds to a product of computed tensors, up to a constant."""
        region = self.scalings.regions[number]
        noise: dict[int, float] = {}
        power: dict[int, float] = {}
        for tensor, place in region.members.items():
            look = self.observers.get(tensor)
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


def search_smooth_quant(seen: ObservedRegions, number: int, alphas: Sequence[float]) -> FactorChoice:
    """Return the factors `amax(X)^alpha / amax(W)^(1 - alpha)` of the alpha with the least error.

    Args:
        seen: the regions.
        number: of the one.
        alphas: a single one is used in any case; of several the best, or none if all are worse than no scaling.
    """
    shrinking, growing = seen.shrinking(number), seen.growing(number)
    before = seen.error(number, np.ones_like(shrinking))
    tried = []
    for alpha in alphas:
        factors = seen.bounded(number, center(balance(shrinking, growing, alpha)))
        tried.append(FactorChoice(factors, alpha, before, seen.error(number, factors)))
    return _best(tried, before, forced=len(alphas) == 1)


def search_awq(seen: ObservedRegions, number: int, grid: int) -> FactorChoice:
    """Return the factors `mean(|X|)^alpha`, alpha from 0 to 1 in `grid` steps, with the least output error."""
    magnitude = seen.shrinking(number, mean=True)
    before = seen.error(number, np.ones_like(magnitude))
    tried = []
    for step in range(1, grid + 1):
        alpha = step / grid
        factors = seen.bounded(number, center(np.where(magnitude > 0, np.maximum(magnitude, 1e-4), 1.0) ** alpha))
        tried.append(FactorChoice(factors, alpha, before, seen.error(number, factors)))
    return _best(tried, before, forced=False)


def _best(tried: Sequence[FactorChoice], before: float, *, forced: bool) -> FactorChoice:
    best = min(tried, key=lambda chosen: chosen.error_after)
    if forced or best.error_after < before:
        return best
    return FactorChoice(np.ones_like(best.factors), None, before, before)
