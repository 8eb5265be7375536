"""One model, or two beside each other: their layers by name, and one scale for the noise of both."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from qsdk.verbs.analysis.page.facts import LayerFacts, ModelFacts
from qsdk.verbs.analysis.page.words import GROUPS, group_of

_NAMES = ("A", "B")


@dataclass(frozen=True)
class Side:
    """A layer of one of the models.

    Attributes:
        name: A or B; "" where there is one model.
        model: whose layer it is.
        layer: the layer; None where the model has none of that name.
    """

    name: str
    model: ModelFacts
    layer: LayerFacts | None


@dataclass(frozen=True)
class Sides:
    """The models of a page: one, or two that are compared.

    Attributes:
        models: one or two.
    """

    models: Sequence[ModelFacts]

    @property
    def names(self) -> Sequence[str]:
        """Return A and B, or "" for a model alone."""
        return _NAMES if len(self.models) > 1 else ("",)

    @cached_property
    def rows(self) -> list[list[Side]]:
        """Return the layers of all models by name, in the order of the networks.

        A layer that only the second model has stands behind the layer that it follows there.
        """
        held = [{layer.name: layer for layer in model.layers} for model in self.models]
        order = list(held[0])
        for names in held[1:]:
            place = 0
            for name in names:
                if name in held[0]:
                    place = order.index(name) + 1
                else:
                    order.insert(place, name)
                    place += 1
        pairs = list(zip(self.names, self.models, held, strict=True))
        return [[Side(side, model, layers.get(name)) for side, model, layers in pairs] for name in order]

    @cached_property
    def worst(self) -> Side | None:
        """Return the layer that causes most noise; None without data."""
        known = [side for row in self.rows for side in present(row)]
        worst = max(known, key=_noise, default=None)
        return worst if worst is not None and _noise(worst) > 0.0 else None

    def heat(self, side: Side) -> float:
        """Return the root of a layer's noise over that of the worst layer of all models."""
        return 0.0 if self.worst is None else math.sqrt(_noise(side) / _noise(self.worst))

    def colour(self, side: Side) -> str:
        """Return the CSS colour of a layer: by its noise, or without data by its dtype."""
        if self.worst is not None:
            return f"color-mix(in oklab, var(--hot) {100 * self.heat(side):.0f}%, var(--cold))"
        return "transparent" if side.layer is None else GROUPS[group_of(side.layer.main_site.dtype)]


def present(row: Sequence[Side]) -> Iterator[Side]:
    """Yield the sides that have the layer."""
    yield from (side for side in row if side.layer is not None)


def layers_of_row(row: Sequence[Side]) -> list[LayerFacts]:
    """Return the layers of the sides that have one."""
    return [side.layer for side in row if side.layer is not None]


def _noise(side: Side) -> float:
    """Return the noise that a layer causes at the outputs, over the power of the outputs."""
    if side.layer is None or side.model.sqnr_db is None:
        return 0.0
    return float((side.layer.share or 0.0) * 10.0 ** (-side.model.sqnr_db / 10.0))
