"""The layers on the page: the strip of the network, and for each layer a line that opens to its details."""

import math
from collections.abc import Sequence
from html import escape

from qsdk.verbs.analysis.page.facts import LayerFacts, ModelFacts, SiteFacts
from qsdk.verbs.analysis.page.plots import Artist
from qsdk.verbs.analysis.page.sentence import worst_layers
from qsdk.verbs.analysis.page.words import GROUPS, decibels, group_of, key, number, percent, size, table

_MUCH = 0.01  # of the values clipped


def strip(model: ModelFacts, ids: str) -> str:
    """Return the network in order, a column for each layer, coloured by its share of the noise or else by its dtype.

    Args:
        model: its layers.
        ids: in front of the number of a layer in its address on the page; "" where the layers are not listed.
    """
    noisy = model.worst_share > 0.0
    columns = []
    for place, layer in enumerate(model.layers):
        said = f"{layer.name}: {layer.op_type}, {layer.dtypes}"
        style = f"--c: {colour(layer, model)}"
        if noisy:
            said += f", {100 * (layer.share or 0.0):.1f} % of the noise"
            style += f"; --tall: {6 + 94 * _heat(layer, model):.0f}%"
        where = f'href="#{ids}{place}"' if ids else ""
        columns.append(f'<a {where} style="{style}" title="{escape(said)}" aria-label="{escape(said)}"></a>')
    ends = '<p class="ends muted"><span>input</span><span>output</span></p>'
    kind = "strip" if noisy else "strip flat"
    return f'<nav class="{kind}" aria-label="The network in order">' + "".join(columns) + f"</nav>{ends}{_key(model)}"


def _key(model: ModelFacts) -> str:
    if model.worst_share > 0.0:
        hot = f"{100 * model.worst_share:.0f} % of the noise at the outputs"
        return key([(hot, "var(--hot)"), ("none of it", "var(--cold)")])
    used = {group_of(layer.main_site.dtype) for layer in model.layers}
    return key([(name, value) for name, value in GROUPS.items() if name in used])


def colour(layer: LayerFacts, model: ModelFacts) -> str:
    """Return the CSS colour of a layer: by its share of the noise, or without data by its dtype."""
    if model.worst_share > 0.0:
        return f"color-mix(in oklab, var(--hot) {100 * _heat(layer, model):.0f}%, var(--cold))"
    return GROUPS[group_of(layer.main_site.dtype)]


def _heat(layer: LayerFacts, model: ModelFacts) -> float:
    return math.sqrt((layer.share or 0.0) / model.worst_share)


def layer_list(model: ModelFacts, ids: str, artist: Artist) -> str:
    """Return the layers, each as a line that opens to its values, precision and reasons.

    Args:
        model: its layers.
        ids: in front of the number of a layer in its address on the page.
        artist: draws the pictures.
    """
    noisy = {layer.name for layer in worst_layers(model.layers)}
    worst = max(model.layers, key=lambda layer: layer.share or 0.0, default=None)
    lines = []
    for place, layer in enumerate(model.layers):
        data = f'data-order="{place}" data-bytes="{layer.bytes}" data-tags="{_tags(layer, noisy)}"'
        for name, value in (
            ("share", layer.share),
            ("sqnr", layer.sqnr_db),
            ("ms", layer.ms),
            ("clipped", layer.clipped),
        ):
            data += "" if value is None else f' data-{name}="{value:.6g}"'
        opened = " open" if layer is worst else ""
        lines.append(
            f'<details class="layer" id="{ids}{place}" style="--c: {colour(layer, model)}" {data}{opened}>'
            f"<summary>{_summary(layer, model)}</summary>\n<div>{_details(layer, artist)}</div></details>"
        )
    return "\n".join(lines)


def _tags(layer: LayerFacts, noisy: set[str]) -> str:
    """Return what the filter of the page knows about a layer."""
    held = {site.state for site in layer.sites}
    facts = {
        "quantized": bool(held & {"quantized", "tied"}),
        "float": "float" in held,
        "noisy": layer.name in noisy,
        "weights": any(site.kind == "weight" for site in layer.sites),
        "clipped": (layer.clipped or 0.0) > _MUCH,
    }
    return " ".join(name for name, holds in facts.items() if holds)


def _summary(layer: LayerFacts, model: ModelFacts) -> str:
    cells = [
        f'<span class="name">{escape(layer.name)}<small>{escape(layer.op_type)}</small></span>',
        f'<span class="fact">{escape(layer.dtypes)}</span>',
    ]
    if model.sqnr_db is not None:
        part = f"{100 * (layer.share or 0.0):.1f}%"
        meter = f'<span class="meter"><i style="--part: {part}"></i></span>'
        cells.append(
            f'<span class="fact" title="share of the noise at the outputs">{meter}{escape(percent(layer.share))}</span>'
        )
        said = "SQNR of the outputs with this layer alone quantized"
        cells.append(f'<span class="fact" title="{said}">{decibels(layer.sqnr_db)}</span>')
    cells.append(f'<span class="fact" title="stored values">{size(layer.bytes) if layer.elements else ""}</span>')
    if model.ms is not None:
        cells.append(f'<span class="fact">{number(layer.ms, " ms")}</span>')
    return "".join(cells)


def _details(layer: LayerFacts, artist: Artist) -> str:
    parts = []
    if layer.shares:
        shares = ", ".join(f"{escape(kind)} {escape(percent(share))}" for kind, share in layer.shares.items())
        parts.append(f"<p>Of the noise at the outputs: {shares}.</p>")
    pictures = [picture for site in layer.sites if layer.drawn for picture in _pictures(site, artist)]
    if pictures:
        parts.append(f'<div class="plots">{"".join(pictures)}</div>')
    parts.append(_sites(layer.sites))
    reasons = "".join(f"<li>{escape(site.why)}</li>" for site in layer.sites)
    parts.append(f'<ul class="why">{reasons}</ul>')
    return "\n".join(parts)


def _pictures(site: SiteFacts, artist: Artist) -> list[str]:
    """Return the histogram of a site's values, and its scales where there are several."""
    found = []
    if site.values is not None and site.values.sample.size:
        picture = artist.histogram(site.values, site.encoding, escape(f"Histogram of {site.site}"))
        found.append(f"<figure>{picture}<figcaption>{_caption(site)}</figcaption></figure>")
    if site.encoding is not None and site.encoding.scale.size > 1 and site.kind == "weight":
        picture = artist.scales(site.encoding, escape(f"Scales of {site.site}"))
        count = site.encoding.scale.size
        what = "block" if site.encoding.block_size else "channel"
        caption = f"<b>{escape(site.site)}</b>: scale of each {what}, {count:,} in all"
        found.append(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>")
    return found


def _caption(site: SiteFacts) -> str:
    values, encoding = site.values, site.encoding
    assert values is not None
    text = f"<b>{escape(site.site)}</b>: {values.low:.4g} to {values.high:.4g}"
    if encoding is None:
        return f"{text}; {escape(site.dtype)}, no range"
    widest = " (widest)" if encoding.scale.size > 1 else ""
    text += f"; range {float(encoding.low.min()):.4g} to {float(encoding.high.max()):.4g}{widest}"
    if encoding.dtype.is_integer:
        text += f", {round(encoding.dtype.hi - encoding.dtype.lo) + 1:,} steps"
    if values.clipped is not None:
        clipped = escape(f"{percent(values.clipped)} clipped")
        text += f'; <span class="warn">{clipped}</span>' if values.clipped > _MUCH else f"; {clipped}"
    return text


def _sites(sites: Sequence[SiteFacts]) -> str:
    names = (
        "site",
        "kind",
        "state",
        "dtype",
        "granularity",
        "smallest scale",
        "largest scale",
        "zero point",
        "own SQNR, dB",
    )
    rows = []
    for site in sites:
        encoding = site.encoding
        scales = (float(encoding.scale.min()), float(encoding.scale.max())) if encoding is not None else (None, None)
        zero = (
            int(encoding.zero_point.reshape(-1)[0]) if encoding is not None and encoding.zero_point.size == 1 else None
        )
        own = site.values.sqnr_db if site.values else None
        rows.append((site.site, site.kind, site.state, site.dtype, site.granularity, *scales, zero, own))
    return table(names, rows)
