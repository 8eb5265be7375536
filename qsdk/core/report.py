"""Reports: rows and a summary that print as a table and serialise as a plain dict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a verb: a title, rows and a summary.

    Attributes:
        title: one line for the reader.
        rows: mappings with the same keys, in print order.
        summary: single facts (totals, maxima, verdicts).

    Example:
        >>> print(Report("Sizes", [{"file": "a.onnx", "bytes": 10}], {"total": 10}))
        Sizes
        file    bytes
        ------  -----
        a.onnx     10
        total: 10
    """

    title: str
    rows: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"title", "rows": [{...}], "summary": {...}}` of plain values."""
        return {
            "title": self.title,
            "rows": [_plain_dict(row) for row in self.rows],
            "summary": _plain_dict(self.summary),
        }

    def __str__(self) -> str:
        lines = [self.title, *_table([_plain_dict(row) for row in self.rows])]
        lines += [f"{key}: {_text(value)}" for key, value in _plain_dict(self.summary).items()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table as a notebook shows it."""
        rows, summary = [_plain_dict(row) for row in self.rows], _plain_dict(self.summary)
        names = list(dict.fromkeys(name for row in rows for name in row))
        head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{_html(row.get(name))}</td>' for name in names)}</tr>" for row in rows)
        table = f"<table><tr>{head}</tr>{body}</table>" if rows else ""
        facts = "".join(f"<br>{escape(str(name))}: {_html(value)}" for name, value in summary.items())
        return f"<div><b>{escape(self.title)}</b>{table}{facts}</div>"


def _plain_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with arrays and array scalars as Python's own lists and numbers."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in facts.items()}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _html(value: Any) -> str:
    return escape(_text(value))


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    numeric = [all(isinstance(row.get(n), int | float | None) for row in rows) for n in names]

    def join(parts: Sequence[str], right: Sequence[bool]) -> str:
        padded = [p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    head = join(names, [False] * len(names))
    return [head, "  ".join("-" * w for w in widths), *(join(line, numeric) for line in cells)]
