"""The page as a whole: one HTML document that loads nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from qsdk.verbs.analysis.page.facts import ModelFacts
from qsdk.verbs.analysis.page.layers import differ, facts_of, layer_list, strip
from qsdk.verbs.analysis.page.plots import Artist
from qsdk.verbs.analysis.page.sides import Sides, layers_of_row
from qsdk.verbs.analysis.page.words import GROUPS, NODES, decibels, group_of, key, size, table

_SHOWN = 12  # tensors that are listed behind a reason
# The policy lets the browser load nothing at all, so that the page cannot but work offline.
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title><style>
$style</style></head>
<body>
$body
<script>
$script</script></body></html>
""")
_CONTROLS = """<div class="controls">
<input id="search" type="search" placeholder="Search layers, ops, dtypes" aria-label="Search layers">
<select id="kind" aria-label="Which layers"><option value="all">all layers</option>
<option value="noisy">80 % of the noise</option><option value="clipped">over 1 % clipped</option>
<option value="weights">with weights</option>
<option value="quantized">quantized</option><option value="float">with float parts</option>$more</select>
<select id="sort" aria-label="Order"><option value="order">in the order of the network</option>
<option value="share">most noise first</option><option value="sqnr">lowest SQNR first</option>
<option value="bytes">largest first</option><option value="ms">slowest first</option>
<option value="clipped">most clipped first</option></select>
<button id="open" type="button">Open all</button><button id="close" type="button">Close all</button>
<small id="shown"></small></div>"""
_LEGEND = (
    "Histograms: the height is the logarithm of the count; the red lines are the ends of the calibrated range "
    "(of the widest channel), the small lines at the bottom the points of the grid where there are few of them."
)
_COMPARED = (
    "A stands above, B below, each layer at the same place; the noise of both has one scale. Layers belong together by "
    "their name."
)


def page(model: ModelFacts, against: ModelFacts | None = None) -> str:
    """Return the document.

    Args:
        model: to be shown.
        against: to be shown beside it; None for none.
    """
    artist, sides = Artist(), Sides([model] if against is None else [model, against])
    body = [_top(sides, artist)]
    body += ["<h2>The network</h2>", f'<div class="panel">{strip(sides)}</div>']
    if against is not None:
        body.append(f'<p class="muted">{_COMPARED}</p>\n<h2>Layer by layer</h2>\n{_differences(sides)}')
    drawn = sum(any(layer.drawn for layer in layers_of_row(row)) for row in sides.rows)
    if drawn < len(sides.rows):
        body.append(f'<p class="muted">Pictures: of the {drawn} worst of {len(sides.rows)} layers.</p>')
    more = "" if against is None else '<option value="differs">that differ</option>'
    body += [f'<p class="muted">{_LEGEND}</p>', _CONTROLS.replace("$more", more)]
    noisy = "" if model.sqnr_db is None else ' class="noisy"'
    body.append(f'<div id="layers"{noisy}>\n{layer_list(sides, artist)}\n</div>')
    for name, one in zip(sides.names, sides.models, strict=True):
        body += [_floats(one, name), _findings(one, name)]
    title = model.name if against is None else f"{model.name} against {against.name}"
    return _PAGE.substitute(
        title=escape(title),
        style=_resource("page.css"),
        script=_resource("page.js"),
        body="\n".join(filter(None, body)),
    )


def _resource(name: str) -> str:
    return resources.files("qsdk.verbs.analysis.page").joinpath(name).read_text(encoding="utf-8")


def _top(sides: Sides, artist: Artist) -> str:
    parts = []
    for one, side in zip(sides.models, sides.names, strict=True):
        facts = "".join(f"<li><b>{value}</b><span>{name}</span></li>" for name, value in _cards(one).items())
        remarks = "".join(f'<p class="muted">{escape(remark)}</p>' for remark in one.remarks)
        name = f"{side}: {one.name}" if side else one.name
        head = f'<h1>{escape(name)}</h1>\n<p class="sentence">{escape(one.sentence)}</p>'
        parts.append(f'<section>{head}\n<ul class="cards">{facts}</ul>{remarks}</section>')
    top = parts[0] if len(parts) == 1 else f'<div class="columns">{"".join(parts)}</div>'
    return f'{top}\n<div class="panel sizes"><h3>In the file, in kB</h3>{_sizes(sides, artist)}</div>'


def _cards(model: ModelFacts) -> dict[str, str]:
    """Return the facts at the top as HTML: name -> value."""
    cards = {} if model.sqnr_db is None else {"SQNR of the outputs": decibels(model.sqnr_db)}
    cards["the file"] = size(model.sizes.summary["bytes"])
    cards["as float32"] = size(model.sizes.summary["as_float32_bytes"])
    if model.ms is not None:
        cards[f"a run in {escape(model.runtime)}"] = f"{model.ms:.3g} ms"
    return cards | {f"tensors {escape(state)}": f"{count:,}" for state, count in model.states.items()}


def _sizes(sides: Sides, artist: Artist) -> str:
    """Return the bytes of each model by group of dtypes, beside those in float32."""
    whole = sides.models[0].sizes.summary
    nodes = whole["bytes"] - whole["stored_bytes"]
    in_float = {"float": (whole["as_float32_bytes"] - nodes) / 1000, NODES: nodes / 1000}
    bars: list[tuple[str, list[tuple[str, float]]]] = [("in float32", list(in_float.items()))]
    for side, model in zip(sides.names, sides.models, strict=True):
        held = dict.fromkeys(GROUPS, 0.0)
        for row in model.sizes.rows:
            held[_group(row)] += row["bytes"] / 1000
        held[NODES] = (model.sizes.summary["bytes"] - model.sizes.summary["stored_bytes"]) / 1000
        bars.append((side or "this model", [(group, count) for group, count in held.items() if count]))
    used = {group for _, parts in bars for group, _ in parts}
    picture = artist.sizes(bars, {group: value for group, value in GROUPS.items() if group in used})
    return picture + key([(group, value) for group, value in GROUPS.items() if group in used])


def _group(row: Mapping[str, Any]) -> str:
    if row["what"] in ("scales", "zero points"):
        return "scales and zero points"
    dtype = str(row["dtype"])
    return group_of(dtype) if row["what"] == "codes" else "float"


def _floats(model: ModelFacts, side: str) -> str:
    """Return the tensors that stay float, by reason."""
    parts = []
    for reason, sites in model.float_reasons.items():
        more = f" and {len(sites) - _SHOWN} more" if len(sites) > _SHOWN else ""
        names = ", ".join(f"<code>{escape(site)}</code>" for site in sites[:_SHOWN])
        parts.append(f"<li>{escape(reason)}: {len(sites)} <small>({names}{more})</small></li>")
    head = f"What stays float{f' in {side}' if side else ''}, and why"
    return f'<h2>{head}</h2>\n<ul class="panel why">{"".join(parts)}</ul>' if parts else ""


def _findings(model: ModelFacts, side: str) -> str:
    if model.findings is None:
        return ""
    rows = [list(row.values()) for row in model.findings]
    found = table(list(model.findings[0]), rows) if rows else "<p>Nothing found.</p>"
    whose = f" in {side}" if side else ""
    return f'<h2>Findings of qsdk validate{whose}</h2>\n<div class="panel findings">{found}</div>'


def _differences(sides: Sides) -> str:
    """Return the layers of both models beside each other; those that differ are marked."""
    names = [layers_of_row(row)[0].name for row in sides.rows]
    cells = [list(zip(*map(facts_of, row), strict=True)) for row in sides.rows]
    facts = ("dtypes", "share of noise", "SQNR alone", "bytes", "ms")
    used = [place for place in range(len(facts)) if any(any(row[place]) for row in cells)]
    head = ["layer", *(facts[place] for place in used)]
    kept = [[name, *(_both(sides, row[place]) for place in used)] for name, row in zip(names, cells, strict=True)]
    return f'<div class="panel">{table(head, kept, ["differs" if differ(row) else "" for row in sides.rows])}</div>'


def _both(sides: Sides, values: Sequence[str]) -> str | tuple[str, ...]:
    """Return the lines of a cell: what the models have, which is said once where it is the same."""
    if len(set(values)) == 1:
        return values[0]
    return tuple(f"{side} {value}" for side, value in zip(sides.names, values, strict=True) if value)
