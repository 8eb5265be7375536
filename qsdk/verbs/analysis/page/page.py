"""The page of a report: what its template, `page.html` beside this file, asks of one model, or of two side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from qsdk.core.numerics.dtypes import tensor_dtype_named
from qsdk.core.report import EXACT_DB
from qsdk.verbs.analysis.page.facts import LayerFacts, ModelFacts, SiteFacts

_MUCH = 0.01  # of the values clipped
_NODES = "nodes and their names"
#: what stored bytes are of, and its colour in the style sheet, in the order in which they are drawn
_GROUPS: Mapping[str, str] = {
    "4 bits or fewer": "var(--bits4)",
    "8 bits": "var(--bits8)",
    "16 bits": "var(--bits16)",
    "int32": "var(--others)",
    "float": "var(--floats)",
    "scales and zero points": "var(--scales)",
    _NODES: "var(--line)",
}
_BITS = ((4, "4 bits or fewer"), (8, "8 bits"), (16, "16 bits"))
#: a site of one model, or its absence, and the name of the model
Held = tuple[str, SiteFacts | None]


def page(models: Sequence[ModelFacts], artist: Any) -> str:
    """Return the document, which loads nothing else, of one model or of two beside each other."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"decibels": _decibels, "number": _number, "percent": _percent, "size": _size}
    environment.filters["cells"] = lambda row: list(row.values())
    text = resources.files("qsdk.verbs.analysis.page").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(page=Page(models, artist), much=_MUCH)


@dataclass(frozen=True)
class Side:
    """A layer of one of the models, None where that has none of the name; `name` is A or B, empty for a model alone."""

    name: str
    model: ModelFacts
    layer: LayerFacts | None

    @property
    def noise(self) -> float:
        """Return the noise that the layer causes at the outputs, over the power of the outputs."""
        if self.layer is None or self.model.sqnr_db is None:
            return 0.0
        return float((self.layer.share or 0.0) * 10.0 ** (-self.model.sqnr_db / 10.0))

    @property
    def facts(self) -> tuple[str, ...]:
        """Return what a layer is compared by: dtypes, share of the noise, SQNR alone, bytes and milliseconds."""
        layer = self.layer
        if layer is None:
            return ("not there", "", "", "", "")
        noise = "" if layer.share is None else _percent(layer.share)
        sqnr = "" if layer.sqnr_db is None else _decibels(layer.sqnr_db)
        time = "" if layer.ms is None else f"{layer.ms:.3g}"
        return (layer.dtypes, noise, sqnr, f"{layer.bytes:,}" if layer.elements else "", time)

    @property
    def tags(self) -> list[str]:
        """Return what the filter of the page knows about the layer."""
        if self.layer is None:
            return []
        held = {site.state for site in self.layer.sites}
        facts = {
            "quantized": bool(held & {"quantized", "tied"}),
            "float": "float" in held,
            "noisy": self.layer.name in self.model.noisy,
            "weights": any(site.kind == "weight" for site in self.layer.sites),
            "clipped": (self.layer.clipped or 0.0) > _MUCH,
        }
        return [name for name, holds in facts.items() if holds]


@dataclass(frozen=True)
class Row:
    """The layers of one name."""

    sides: Sequence[Side]

    @property
    def present(self) -> list[Side]:
        """Return the sides that have the layer."""
        return [side for side in self.sides if side.layer is not None]

    @property
    def layers(self) -> list[LayerFacts]:
        """Return the layers that are there."""
        return [side.layer for side in self.sides if side.layer is not None]

    @property
    def differs(self) -> bool:
        """Return whether two models have other facts about the layer, or one does not have it."""
        return len({side.facts for side in self.sides}) > 1

    @property
    def tags(self) -> list[str]:
        """Return what the filter of the page knows."""
        tags = [tag for side in self.sides for tag in side.tags]
        return list(dict.fromkeys([*tags, *(["differs"] if self.differs else [])]))

    @property
    def numbers(self) -> dict[str, float]:
        """Return what the page sorts by, where it is known; of two models the worse."""
        facts = {"share": ("share", max), "sqnr": ("sqnr_db", min), "ms": ("ms", max), "clipped": ("clipped", max)}
        known = {
            name: (choose, [value for layer in self.layers if (value := getattr(layer, fact)) is not None])
            for name, (fact, choose) in facts.items()
        }
        return {name: choose(values) for name, (choose, values) in known.items() if values}

    @property
    def sites(self) -> list[list[Held]]:
        """Return the sites of the layer, each as the models have it."""
        held = [
            (side.name, {site.site: site for site in side.layer.sites} if side.layer else {}) for side in self.sides
        ]
        names = dict.fromkeys(name for _, sites in held for name in sites)
        return [[(side, sites.get(name)) for side, sites in held] for name in names]

    @property
    def cells(self) -> list[list[Any]]:
        """Return the table of the sites, with the model in front where there are two."""
        return [
            [*([side] if len(self.sides) > 1 else []), *_site_cells(site)]
            for held in self.sites
            for side, site in held
            if site is not None
        ]

    @property
    def reasons(self) -> Iterator[tuple[str, str]]:
        """Yield why each site is as it is, and in which model; of both at once where it is the same."""
        for held in self.sites:
            found = [(side, site.why) for side, site in held if site is not None]
            alike = len(found) == len(self.sides) and len({why for _, why in found}) == 1
            yield from [("", found[0][1])] if alike else found


def _site_cells(site: SiteFacts) -> list[Any]:
    encoding = site.encoding
    scales = (float(encoding.scale.min()), float(encoding.scale.max())) if encoding is not None else (None, None)
    zero = int(encoding.zero_point.reshape(-1)[0]) if encoding is not None and encoding.zero_point.size == 1 else None
    return [site.site, site.kind, site.state, site.dtype, site.granularity, *scales, zero, site.sqnr_db]


@dataclass(frozen=True)
class Page:
    """One model, or two beside each other: their layers by name, one scale for the noise of both, and pictures."""

    models: Sequence[ModelFacts]
    artist: Any

    @property
    def names(self) -> Sequence[str]:
        """Return A and B, or an empty name for a model alone."""
        return ("A", "B") if len(self.models) > 1 else ("",)

    @cached_property
    def rows(self) -> list[Row]:
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
        return [Row([Side(side, model, layers.get(name)) for side, model, layers in pairs]) for name in order]

    @cached_property
    def worst(self) -> Side | None:
        """Return the layer that causes most noise; None without data."""
        worst = max((side for row in self.rows for side in row.present), key=lambda side: side.noise, default=None)
        return worst if worst is not None and worst.noise > 0.0 else None

    def heat(self, side: Side) -> float:
        """Return the root of a layer's noise over that of the worst layer of all models."""
        return 0.0 if self.worst is None else math.sqrt(side.noise / self.worst.noise)

    def colour(self, side: Side) -> str:
        """Return the CSS colour of a layer: by its noise, or without data by its dtype."""
        if self.worst is not None:
            return f"color-mix(in oklab, var(--hot) {100 * self.heat(side):.0f}%, var(--cold))"
        return "transparent" if side.layer is None else _GROUPS[_group_of(side.layer.main_site.dtype)]

    def colour_of(self, row: Row) -> str:
        """Return the colour of the worse layer of a row."""
        return self.colour(max(row.present, key=self.heat))

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Return the groups of dtypes that the layers have, and their colours."""
        return _used({_group_of(layer.main_site.dtype) for row in self.rows for layer in row.layers})

    @property
    def sizes(self) -> tuple[str, list[tuple[str, str]]]:
        """Return a picture of each file's kilobytes by what takes them, beside those in float32, and its key."""
        whole = self.models[0].sizes.summary
        nodes = whole["bytes"] - whole["stored_bytes"]
        in_float = {"float": (whole["as_float32_bytes"] - nodes) / 1000, _NODES: nodes / 1000}
        bars: list[tuple[str, list[tuple[str, float]]]] = [("in float32", list(in_float.items()))]
        for side, model in zip(self.names, self.models, strict=True):
            held = dict.fromkeys(_GROUPS, 0.0)
            for row in model.sizes.rows:
                held[_group_of_bytes(row)] += row["bytes"] / 1000
            held[_NODES] = (model.sizes.summary["bytes"] - model.sizes.summary["stored_bytes"]) / 1000
            bars.append((side or "this model", [(group, count) for group, count in held.items() if count]))
        used = _used({group for _, parts in bars for group, _ in parts})
        return self.artist.sizes(bars, dict(used)), used

    @property
    def drawn(self) -> int:
        """Return the number of layers with pictures."""
        return sum(any(layer.drawn for layer in row.layers) for row in self.rows)

    @property
    def differing(self) -> list[int]:
        """Return the places of the layers that differ."""
        return [place for place, row in enumerate(self.rows) if row.differs]

    @property
    def differences(self) -> tuple[list[str], list[list[Any]]]:
        """Return the heads and rows of a table of the layers of both models; what is the same is said once."""
        heads = ("dtypes", "share of noise", "SQNR alone", "bytes", "ms")
        facts = [list(zip(*(side.facts for side in row.sides), strict=True)) for row in self.rows]
        used = [place for place in range(len(heads)) if any(any(row[place]) for row in facts)]
        cells = [
            [row.layers[0].name, *(self._both(values[place]) for place in used)]
            for row, values in zip(self.rows, facts, strict=True)
        ]
        return ["layer", *(heads[place] for place in used)], cells

    def _both(self, values: Sequence[str]) -> str | list[str]:
        if len(set(values)) == 1:
            return values[0]
        return [f"{side} {value}" for side, value in zip(self.names, values, strict=True) if value]

    def pictures(self, row: Row) -> Iterator[tuple[str, str, SiteFacts, str]]:
        """Yield the pictures of a layer: what it shows or why there is none, the model, the site, and the SVG.

        They are the histograms of each site's values, and its scales where there are several; for both models on the
        same axes.
        """
        for held in row.sites if any(layer.drawn for layer in row.layers) else ():
            sites = [site for _, site in held if site is not None]
            seen = [(s.values, s.encoding) for s in sites if s.values is not None]
            for side, site in held if seen else ():
                if site is None or site.values is None:
                    yield "no values", side, sites[0], ""
                    continue
                label = _label("Histogram", site, side)
                yield "values", side, site, self.artist.histogram(site.values, site.encoding, label, beside=seen)
            scaled = [
                s.encoding for s in sites if s.encoding is not None and s.encoding.scale.size > 1 and s.kind == "weight"
            ]
            for side, site in held if scaled else ():
                if site is None or site.encoding is None or not any(site.encoding is one for one in scaled):
                    is_float = site is None or site.encoding is None
                    yield "float" if is_float else "one scale", side, sites[0], ""
                    continue
                label = _label("Scales", site, side)
                yield "scales", side, site, self.artist.scales(site.encoding, label, beside=scaled)


def _label(what: str, site: SiteFacts, side: str) -> str:
    return f"{what} of {site.site}{f' in {side}' if side else ''}"


def _used(groups: set[str]) -> list[tuple[str, str]]:
    return [(group, colour) for group, colour in _GROUPS.items() if group in groups]


def _group_of(dtype: str) -> str:
    """Return the group of a dtype in `_GROUPS`."""
    found = tensor_dtype_named(dtype)
    if not found.is_quantized:
        return "float"
    return next((name for bits, name in _BITS if found.bits <= bits), "int32")


def _group_of_bytes(row: Mapping[str, Any]) -> str:
    """Return the group of a row of `onnx_backend.proto.sizes`."""
    if row["what"] in ("scales", "zero points"):
        return "scales and zero points"
    return _group_of(str(row["dtype"])) if row["what"] == "codes" else "float"


def _number(value: float) -> str:
    """Return a number of a table: integers with commas, others with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _decibels(value: float | None) -> str:
    """Return an SQNR; what is exact has none."""
    return "-" if value is None else "exact" if value >= EXACT_DB else f"{value:.1f} dB"


def _percent(share: float | None) -> str:
    """Return a share in percent."""
    if share is None:
        return "-"
    return "<0.1 %" if 0.0 < share < 0.0005 else f"{100 * share:.1f} %"


def _size(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
