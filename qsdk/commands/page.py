"""One self-contained HTML page about a quantized model: tables, and each range as a bar."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from qsdk.core.report import Report

_WIDTH = 240  # pixels of a bar
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 0 0 2em } td, th { padding: .15em .8em .15em 0; text-align: left }
th { border-bottom: 1px solid #999 }
tr.float td { color: #999 } tr.error td { color: #b00 } tr.warning td { color: #a60 }
svg { vertical-align: middle } .axis { stroke: #bbb } .weight { fill: #4a7ebb } .activation { fill: #e08a3c }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } .axis { stroke: #666 } }
"""


def page(name: str, facts: Mapping[str, Any], coverage: Report, sizes: Report, findings: Report) -> str:
    """Return the page as text.

    Args:
        name: of the model, for the heading.
        facts: about the file.
        coverage: rows with `low` and `high`, None where a tensor stays float.
        sizes: of the stored tensors.
        findings: of the validation.
    """
    body = [
        f"<h1>{escape(name)}</h1>",
        _list(facts),
        f"<h2>{escape(findings.title)}</h2>",
        _table(findings.rows, classes=[str(row["severity"]) for row in findings.rows]) or "<p>Nothing found.</p>",
        f"<h2>{escape(sizes.title)}</h2>",
        _table(sizes.rows),
        _list(sizes.summary),
        f"<h2>{escape(coverage.title)}</h2>",
        _list(coverage.summary),
        "<p>Bars show the range of each site on an axis that is linear near 0 and logarithmic beyond.</p>",
        _coverage(coverage.rows),
    ]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _list(facts: Mapping[str, Any]) -> str:
    return _rows([[escape(str(key)), escape(_text(value))] for key, value in facts.items()], (), [])


def _table(rows: Sequence[Mapping[str, Any]], classes: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    return _rows([[escape(_text(row[name])) for name in names] for row in rows], names, classes)


def _coverage(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("site", "op_type", "kind", "state", "dtype", "granularity", "reason")
    ends = [abs(float(row[end])) for row in rows for end in ("low", "high") if row[end] is not None]
    largest = max((end for end in ends if math.isfinite(end)), default=1.0) or 1.0
    cells = [[escape(_text(row[name])) for name in names] + [_bar(row, largest)] for row in rows]
    return _rows(cells, (*names, "range"), [str(row["state"]) for row in rows])


def _rows(cells: Iterable[Sequence[str]], names: Sequence[str], classes: Sequence[str]) -> str:
    head = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>\n" if names else ""
    lines = []
    for index, line in enumerate(cells):
        kind = f' class="{escape(classes[index])}"' if index < len(classes) else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>")
    return f"<table>\n{head}" + "\n".join(lines) + "\n</table>"


def _bar(row: Mapping[str, Any], largest: float) -> str:
    """Return the range of a site as a bar; its ends are also in the tooltip and beside it."""
    if row["low"] is None:
        return ""
    low, high = float(row["low"]), float(row["high"])
    left, right = _position(low, largest), _position(high, largest)
    kind = "weight" if row["kind"] in ("weight", "bias") else "activation"
    words = f"{low:.4g} to {high:.4g}"
    shapes = (
        f'<line class="axis" x1="{_WIDTH / 2}" x2="{_WIDTH / 2}" y1="0" y2="14"/>'
        f'<rect class="{kind}" x="{left:.1f}" y="3" width="{max(right - left, 1):.1f}" height="8"/>'
    )
    title = f"<title>{escape(words)}, scale {row['smallest_scale']:.4g} to {row['largest_scale']:.4g}</title>"
    return f'<svg width="{_WIDTH}" height="14" role="img">{title}{shapes}</svg> {escape(words)}'


def _position(value: float, largest: float) -> float:
    """Return the position of a value: linear below a thousandth of the largest, logarithmic beyond."""
    part = math.asinh(1000 * max(-largest, min(largest, value)) / largest) / math.asinh(1000)
    return (1 + part) * _WIDTH / 2


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
