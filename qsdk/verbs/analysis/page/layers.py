"""The layers on the page: the strip of the network, and for each layer a line that opens to its details."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from qsdk.verbs.analysis.page.facts import LayerFacts, SiteFacts
from qsdk.verbs.analysis.page.plots import Artist
from qsdk.verbs.analysis.page.sentence import worst_layers
from qsdk.verbs.analysis.page.sides import Side, Sides, layers_of_row, present
from qsdk.verbs.analysis.page.words import GROUPS, decibels, group_of, key, number, percent, size, table

_MUCH = 0.01  # of the values clipped
_ID = "layer-"  # in front of the number of a layer in its address on the page
#: a site of one model, or its absence, and the name of the model
_Held = tuple[str, SiteFacts | None]


def strip(sides: Sides) -> str:
    """Return the network in order, a column for each layer, coloured by its noise or else by its dtype.

    Two models stand one above the other, with one scale for both.
    """
    kind = "strip" if sides.worst is not None else "strip flat"
    navs = []
    for which, name in enumerate(sides.names):
        columns = "".join(_column(sides, row[which], place) for place, row in enumerate(sides.rows))
        label = f"The network in order{f', model {name}' if name else ''}"
        below = " below" if which else ""
        navs.append(f'<nav class="{kind}{below}" aria-label="{label}">{columns}</nav>')
        if name:
            navs[-1] = f'<b class="side">{name}</b>{navs[-1]}'
    strips = navs[0] if len(navs) == 1 else f'<div class="twin" style="--n: {len(sides.rows)}">{"".join(navs)}</div>'
    return f'{strips}<p class="ends muted"><span>input</span><span>output</span></p>{_key(sides)}'


def _column(sides: Sides, side: Side, place: int) -> str:
    layer = side.layer
    if layer is None:
        return "<i></i>"
    said = f"{layer.name}: {layer.op_type}, {layer.dtypes}"
    style = f"--c: {sides.colour(side)}"
    if sides.worst is not None:
        said += f", {100 * (layer.share or 0.0):.1f} % of the noise{f' of {side.name}' if side.name else ''}"
        style += f"; --tall: {6 + 94 * sides.heat(side):.0f}%"
    said = escape(said)
    return f'<a href="#{_ID}{place}" style="{style}" title="{said}" aria-label="{said}"></a>'


def _key(sides: Sides) -> str:
    worst = sides.worst
    if worst is not None and worst.layer is not None:
        whose = f" of {worst.name}" if worst.name else ""
        hot = f"{100 * (worst.layer.share or 0.0):.0f} % of the noise{whose} at the outputs"
        return key([(hot, "var(--hot)"), ("none of it", "var(--cold)")])
    used = {group_of(layer.main_site.dtype) for row in sides.rows for layer in layers_of_row(row)}
    return key([(name, value) for name, value in GROUPS.items() if name in used])


def layer_list(sides: Sides, artist: Artist) -> str:
    """Return the layers, each as a line that opens to its values, precision and reasons.

    Args:
        sides: the models.
        artist: draws the pictures.
    """
    noisy = [{layer.name for layer in worst_layers(model.layers)} for model in sides.models]
    lines = []
    for place, row in enumerate(sides.rows):
        layers = layers_of_row(row)
        tags = dict.fromkeys(tag for side, names in zip(row, noisy, strict=True) for tag in _tags(side, names))
        tags |= {"differs": None} if differ(row) else {}
        data = f'data-order="{place}" data-bytes="{max(layer.bytes for layer in layers)}"'
        data += f' data-tags="{" ".join(tags)}"'
        facts: tuple[tuple[str, Callable[[LayerFacts], float | None], Callable[..., float]], ...] = (
            ("share", lambda layer: layer.share, max),
            ("sqnr", lambda layer: layer.sqnr_db, min),
            ("ms", lambda layer: layer.ms, max),
            ("clipped", lambda layer: layer.clipped, max),
        )
        for name, value, choose in facts:
            known = [found for layer in layers if (found := value(layer)) is not None]
            data += f' data-{name}="{choose(known):.6g}"' if known else ""
        opened = " open" if sides.worst is not None and sides.worst in row else ""
        colour = sides.colour(max(present(row), key=sides.heat))
        lines.append(
            f'<details class="layer" id="{_ID}{place}" style="--c: {colour}" {data}{opened}>'
            f"<summary>{_summary(row)}</summary>\n<div>{_details(row, artist)}</div></details>"
        )
    return "\n".join(lines)


def differ(row: Sequence[Side]) -> bool:
    """Return whether two models have other facts about a layer, or one does not have it."""
    return len({None if side.layer is None else tuple(facts_of(side)) for side in row}) > 1


def facts_of(side: Side) -> list[str]:
    """Return what a layer is compared by: dtypes, share of the noise, SQNR alone, bytes and milliseconds."""
    layer = side.layer
    if layer is None:
        return ["not there", "", "", "", ""]
    noise = "" if layer.share is None else percent(layer.share)
    sqnr = "" if layer.sqnr_db is None else decibels(layer.sqnr_db)
    time = "" if layer.ms is None else f"{layer.ms:.3g}"
    return [layer.dtypes, noise, sqnr, f"{layer.bytes:,}" if layer.elements else "", time]


def _tags(side: Side, noisy: set[str]) -> list[str]:
    """Return what the filter of the page knows about a layer."""
    layer = side.layer
    if layer is None:
        return []
    held = {site.state for site in layer.sites}
    facts = {
        "quantized": bool(held & {"quantized", "tied"}),
        "float": "float" in held,
        "noisy": layer.name in noisy,
        "weights": any(site.kind == "weight" for site in layer.sites),
        "clipped": (layer.clipped or 0.0) > _MUCH,
    }
    return [name for name, holds in facts.items() if holds]


def _summary(row: Sequence[Side]) -> str:
    first = layers_of_row(row)[0]
    cells = [
        f'<span class="name">{escape(first.name)}<small>{escape(first.op_type)}</small></span>',
        _fact(row, "", lambda layer: escape(layer.dtypes)),
    ]
    if any(side.model.sqnr_db is not None for side in row):
        cells.append(_fact(row, "share of the noise at the outputs", _meter))
        said = "SQNR of the outputs with this layer alone quantized"
        cells.append(_fact(row, said, lambda layer: decibels(layer.sqnr_db)))
    cells.append(_fact(row, "stored values", lambda layer: size(layer.bytes) if layer.elements else ""))
    if any(side.model.ms is not None for side in row):
        cells.append(_fact(row, "", lambda layer: number(layer.ms, " ms")))
    return "".join(cells)


def _fact(row: Sequence[Side], title: str, shown: Callable[[LayerFacts], str]) -> str:
    """Return a cell of a layer's line, with a line of its own for each of two models."""
    lines = []
    for side in row:
        text = "not there" if side.layer is None else shown(side.layer)
        lines.append(f'<span class="of"><b>{side.name}</b> {text}</span>' if side.name and text else text)
    said = f' title="{title}"' if title else ""
    return f'<span class="fact"{said}>{"".join(lines)}</span>'


def _meter(layer: LayerFacts) -> str:
    part = f"{100 * (layer.share or 0.0):.1f}%"
    return f'<span class="meter"><i style="--part: {part}"></i></span>{escape(percent(layer.share))}'


def _details(row: Sequence[Side], artist: Artist) -> str:
    parts = []
    for side in present(row):
        if side.layer is not None and side.layer.shares:
            shares = ", ".join(f"{escape(kind)} {escape(percent(share))}" for kind, share in side.layer.shares.items())
            whose = f"{side.name}: of the noise of {side.name}" if side.name else "Of the noise"
            parts.append(f"<p>{whose} at the outputs: {shares}.</p>")
    drawn = any(layer.drawn for layer in layers_of_row(row))
    pictures = [picture for held in _by_site(row) for picture in _pictures(held, artist)] if drawn else []
    if pictures:
        kind = "plots" if len(row) == 1 else "plots beside"
        parts.append(f'<div class="{kind}">{"".join(pictures)}</div>')
    parts.append(_sites(row))
    parts.append(f'<ul class="why">{"".join(_reasons(row))}</ul>')
    return "\n".join(parts)


def _by_site(row: Sequence[Side]) -> list[list[_Held]]:
    """Return the sites of a layer, each as the models have it."""
    held = [(side.name, {} if side.layer is None else {site.site: site for site in side.layer.sites}) for side in row]
    names = dict.fromkeys(name for _, sites in held for name in sites)
    return [[(side, sites.get(name)) for side, sites in held] for name in names]


def _pictures(held: Sequence[_Held], artist: Artist) -> Iterator[str]:
    """Yield the histograms of a site's values, and its scales where there are several, on the same axes for both."""
    sites = [site for _, site in held if site is not None]
    seen = [(s.values, s.encoding) for s in sites if s.values is not None and s.values.sample.size]
    if seen:
        for side, site in held:
            if site is None or site.values is None or not site.values.sample.size:
                yield _nothing(side, sites[0], "no values")
                continue
            label = escape(f"Histogram of {site.site}{f' in {side}' if side else ''}")
            yield _figure(artist.histogram(site.values, site.encoding, label, beside=seen), side, _caption(site))
    scaled = [s.encoding for s in sites if s.encoding is not None and s.encoding.scale.size > 1 and s.kind == "weight"]
    if scaled:
        for side, site in held:
            if site is None or site.encoding is None or not any(site.encoding is one for one in scaled):
                quantized = site is not None and site.encoding is not None
                yield _nothing(side, sites[0], "one scale" if quantized else "float")
                continue
            label = escape(f"Scales of {site.site}{f' in {side}' if side else ''}")
            what = "block" if site.encoding.block_size else "channel"
            caption = f"<b>{escape(site.site)}</b>: scale of each {what}, {site.encoding.scale.size:,} in all"
            yield _figure(artist.scales(site.encoding, label, beside=scaled), side, caption)


def _figure(picture: str, side: str, caption: str) -> str:
    whose = f"<b>{side}</b> " if side else ""
    return f"<figure>{picture}<figcaption>{whose}{caption}</figcaption></figure>"


def _nothing(side: str, site: SiteFacts, why: str) -> str:
    """Return what stands beside the picture of the other model."""
    return f'<figure class="none"><figcaption><b>{side}</b> {escape(site.site)}: {why}</figcaption></figure>'


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


def _sites(row: Sequence[Side]) -> str:
    names = ["site", "kind", "state", "dtype", "granularity", "smallest scale", "largest scale", "zero point"]
    names.append("own SQNR, dB")
    compared = len(row) > 1
    rows = []
    for held in _by_site(row):
        for side, site in held:
            if site is not None:
                rows.append([*([side] if compared else []), *_site_cells(site)])
    return table([*(["model"] if compared else []), *names], rows)


def _site_cells(site: SiteFacts) -> list[str | float | int | None]:
    encoding = site.encoding
    scales = (float(encoding.scale.min()), float(encoding.scale.max())) if encoding is not None else (None, None)
    zero = int(encoding.zero_point.reshape(-1)[0]) if encoding is not None and encoding.zero_point.size == 1 else None
    own = site.values.sqnr_db if site.values else None
    return [site.site, site.kind, site.state, site.dtype, site.granularity, *scales, zero, own]


def _reasons(row: Sequence[Side]) -> Iterator[str]:
    """Yield why each site is as it is; once where both models have the same reason."""
    for held in _by_site(row):
        reasons = {side: site.why for side, site in held if site is not None}
        if len(reasons) == len(row) and len(set(reasons.values())) == 1:
            reasons = {"": next(iter(reasons.values()))}
        for side, why in reasons.items():
            yield f"<li>{f'<b>{side}</b> ' if side else ''}{escape(why)}</li>"
