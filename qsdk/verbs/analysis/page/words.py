"""The words, numbers and colours of the page: everything that is shown goes through here, so that it is escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from qsdk.core.numerics.dtypes import tensor_dtype_named
from qsdk.core.report import EXACT_DB

NODES = "nodes and their names"
#: what stored bytes are of, and its colour in the style sheet, in the order in which they are drawn
GROUPS: Mapping[str, str] = {
    "4 bits or fewer": "var(--bits4)",
    "8 bits": "var(--bits8)",
    "16 bits": "var(--bits16)",
    "int32": "var(--others)",
    "float": "var(--floats)",
    "scales and zero points": "var(--scales)",
    NODES: "var(--line)",
}


def group_of(dtype: str) -> str:
    """Return the group of a dtype in `GROUPS`."""
    found = tensor_dtype_named(dtype)
    if not found.is_quantized:
        return "float"
    return next(
        (name for bits, name in ((4, "4 bits or fewer"), (8, "8 bits"), (16, "16 bits")) if found.bits <= bits), "int32"
    )


def number(value: float | None, unit: str = "") -> str:
    """Return a number with four digits, and its unit."""
    return "-" if value is None else f"{value:.4g}{unit}"


def decibels(value: float | None) -> str:
    """Return an SQNR; what is exact has none."""
    return "-" if value is None else "exact" if value >= EXACT_DB else f"{value:.1f} dB"


def percent(share: float | None) -> str:
    """Return a share in percent."""
    if share is None:
        return "-"
    if 0.0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %"


def size(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def key(entries: Iterable[tuple[str, str]]) -> str:
    """Return a key of colours: text and CSS colour."""
    return '<p class="key">' + "".join(f'<span><i style="--c: {c}"></i>{escape(t)}</span>' for t, c in entries) + "</p>"


def table(names: Sequence[str], rows: Iterable[Sequence[Any]], classes: Sequence[str] = ()) -> str:
    """Return a table; numbers stand on the right, and text is escaped. Narrow screens show it without its heads.

    Args:
        names: of the columns.
        rows: cells of text, lines of text or numbers.
        classes: of the rows.
    """
    lines = []
    for place, row in enumerate(rows):
        kind = f' class="{escape(classes[place])}"' if place < len(classes) and classes[place] else ""
        cells = "".join(_cell(name, value) for name, value in zip(names, row, strict=True))
        lines.append(f"<tr{kind}>{cells}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f'<div class="scroll"><table><tr>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _cell(name: str, value: Any) -> str:
    """Return a cell, which knows the head of its column for where that is not shown."""
    head = f'data-head="{escape(name)}"'
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td {head} class="number">{f"{value:.4g}" if isinstance(value, float) else f"{value:,}"}</td>'
    if isinstance(value, tuple):
        return f"<td {head}>{''.join(f'<div>{escape(line)}</div>' for line in value)}</td>"
    return f"<td {head}>{escape('' if value is None else str(value))}</td>"
