"""Reports: rows and a summary that print as a table and serialise as a plain dict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Any

from qsdk.core.errors import ConfigError

_SCREEN = 40  # lines
_FEWEST = 5  # rows that are shown of any table
_LONGEST_CELL = 80  # characters
_LONGEST_LIST = 8  # plain values
_LONGEST_FACT = 400  # characters
_MOST_FACTS = 16
#: dB, the most that any SQNR is given as: there is no noise to speak of, and readers see a word
EXACT_DB = 200.0


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a verb: a title, rows and a summary.

    It shows itself in a form that fits a screen; `full` is the whole of it.

    Attributes:
        title: one line for the reader.
        rows: mappings with the same keys, in print order.
        summary: single facts (totals, maxima, verdicts), or small tables of them: lists of mappings.

    Examples:
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

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ConfigError("to_pandas() needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame([_plain_dict(row) for row in self.rows])

    def full(self) -> str:
        """Return the whole report as text, however long: every row, and every entry of the summary."""
        summary = [line for name, value in _plain_dict(self.summary).items() for line in _fact(name, value, whole=True)]
        return "\n".join([self.title, *_table([_plain_dict(row) for row in self.rows]), *summary])

    def __str__(self) -> str:
        if self._is_short():
            return self.full()
        summary = self._short_summary()
        count = self._rows_shown(len(summary))
        left = len(self.rows) - count
        more = [f"... {left} more rows: print(report.full())"] if left else []
        rows = [_short_row(row) for row in self.rows[:count]]
        return "\n".join([self.title, *summary, *_table(rows), *more])  # the summary first: it tells more

    __repr__ = __str__

    def _is_short(self) -> bool:
        lines = self.full().splitlines()
        return len(lines) <= _SCREEN and max(map(len, lines)) <= _LONGEST_FACT

    def _short_summary(self) -> list[str]:
        facts = list(_plain_dict(self.summary).items())
        lines = [line for name, value in facts[:_MOST_FACTS] for line in _fact(name, value, whole=False)]
        left = len(facts) - _MOST_FACTS
        return [*lines, *([f"... {left} more facts: report.summary"] if left > 0 else [])]

    def _rows_shown(self, other_lines: int) -> int:
        room = max(_SCREEN - other_lines - 4, _FEWEST)  # the title, two lines of headings, and the last line
        return min(len(self.rows), room)

    def _repr_html_(self) -> str:
        """Return the table as a notebook shows it, with as many rows as the text."""
        facts = list(_plain_dict(self.summary).items())
        short = self._is_short()
        count = len(self.rows) if short else self._rows_shown(len(self._short_summary()))
        table = _html_table([_plain_dict(row) for row in self.rows[:count]])
        left = len(self.rows) - count
        more = f"<br>... {left} more rows: print(report.full())" if left else ""
        lines = "".join(_html_fact(name, value, whole=short) for name, value in facts)
        body = f"{table}{more}{lines}" if short else f"{lines}{table}{more}"
        return f"<div><b>{escape(self.title)}</b>{body}</div>"


def _plain_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with arrays and array scalars as Python's own lists and numbers."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in facts.items()}


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _fact(name: str, value: Any, *, whole: bool) -> list[str]:
    """Return the lines of an entry of the summary: one, or a small table."""
    if _is_table(value):
        rows = [_plain_dict(row) if whole else _short_row(row) for row in (value if whole else value[:_FEWEST])]
        left = len(value) - len(rows)
        return [f"{name}:", *(f"  {line}" for line in _table(rows)), *([f"  ... {left} more"] if left else [])]
    return [f"{name}: {_text(value, name) if whole else _short_fact(value, name)}"]


def _short_fact(value: Any, name: str) -> str:
    if isinstance(value, list | tuple | set | frozenset) and len(value) > _LONGEST_LIST:
        shown = ", ".join(_text(item) for item in list(value)[:_FEWEST])
        return _cut(f"{shown} and {len(value) - _FEWEST} more", _LONGEST_FACT)
    return _cut(_text(value, name), _LONGEST_FACT)


def _short_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose long texts are cut."""
    return {
        name: value if isinstance(value, int | float | None) else _cut(_text(value), _LONGEST_CELL)
        for name, value in _plain_dict(row).items()
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _text(value: Any, name: str = "") -> str:
    """Return a value in words, by the name of its column or entry."""
    if isinstance(value, float):
        if "sqnr_db" in str(name) and value >= EXACT_DB:
            return "exact"
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _html(value: Any, name: str) -> str:
    return escape(_text(value, name))


def _html_fact(name: str, value: Any, *, whole: bool) -> str:
    if _is_table(value):
        rows = value if whole else value[:_FEWEST]
        left = len(value) - len(rows)
        return f"<br>{escape(str(name))}:{_html_table(rows)}" + (f"... {left} more" if left else "")
    return f"<br>{escape(str(name))}: {_html(value, name) if whole else escape(_short_fact(value, name))}"


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{_html(row.get(name), name)}</td>' for name in names)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name), name) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    numeric = [all(isinstance(row.get(n), int | float | None) for row in rows) for n in names]

    def join(parts: Sequence[str], right: Sequence[bool]) -> str:
        padded = [p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    head = join(names, [False] * len(names))
    return [head, "  ".join("-" * w for w in widths), *(join(line, numeric) for line in cells)]
