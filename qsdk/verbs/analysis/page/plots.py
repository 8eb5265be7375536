"""The pictures of the page: SVG drawn by matplotlib, in colours that the style sheet of the page decides."""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsdk.core.numerics.encoding import Encoding
from qsdk.core.precision.advice import SiteSample

# Colours that stand for those of the style sheet, by which they are replaced in the SVG.
_BARS, _RANGE, _GRID, _TEXT, _GAP = "#0000a1", "#0000a2", "#0000a3", "#0000a4", "#0000a5"
_VARIABLES = {_BARS: "var(--bars)", _RANGE: "var(--range)", _GRID: "var(--grid)", _TEXT: "currentColor"}
_VARIABLES |= {_GAP: "var(--surface)"}
_BINS = 64
_MOST_POINTS = 40  # of a grid that are drawn one by one
_MOST_SCALES = 512
_SMALL = (3.4, 1.55)  # inches
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qsdk",  # the same bytes every time
    "font.size": 8.0,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _TEXT),
    **dict.fromkeys(("xtick.major.width", "ytick.major.width"), 0.5),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
}


class Artist:
    """Draws pictures, each with ids of its own: they all stand in one page."""

    def __init__(self) -> None:
        self._count = 0

    def histogram(
        self,
        values: SiteSample,
        encoding: Encoding | None,
        label: str,
        *,
        beside: Sequence[tuple[SiteSample, Encoding | None]],
    ) -> str:
        """Return the histogram of values, with the range of their encoding and, if it is coarse, its grid.

        The axes are the same for all that stand `beside` each other, these among them.
        """
        with rc_context(_SETTINGS):
            figure, axes = _figure(*_SMALL)
            known = [one for _, one in beside if one is not None]
            low = min([*(one.low for one, _ in beside), *(_end(one.low.min()) for one in known)])
            high = max([*(one.high for one, _ in beside), *(_end(one.high.max()) for one in known)])
            counts, edges = np.histogram(values.values, bins=_BINS, range=(low, high if high > low else low + 1.0))
            heights = np.log1p(counts)  # the few values at the ends matter as much as the many in the middle
            axes.stairs(heights, edges, fill=True, color=_BARS)
            axes.set_ylim(0, float(heights.max()) * 1.05 or 1.0)
            axes.set_xlim(*_widened(edges[0], edges[-1], 0.02))
            axes.yaxis.set_visible(False)
            axes.spines["left"].set_visible(False)
            axes.locator_params(axis="x", nbins=6)
            if encoding is not None:
                _draw_range(axes, encoding)
            return self._svg(figure, label)

    def scales(self, encoding: Encoding, label: str, *, beside: Sequence[Encoding]) -> str:
        """Return the scales of an encoding per channel or block, in order, on the axis of those beside."""
        flat = encoding.scale.reshape(-1).astype(np.float64)
        step = -(-flat.size // _MOST_SCALES)
        shown = np.array([flat[i : i + step].max() for i in range(0, flat.size, step)])
        with rc_context(_SETTINGS):
            figure, axes = _figure(*_SMALL, left=0.6)
            axes.stairs(shown, np.arange(shown.size + 1) * step, fill=True, color=_BARS)
            least, most = min(float(one.scale.min()) for one in beside), max(float(one.scale.max()) for one in beside)
            if least > 0 and most / least > 30:
                axes.set_yscale("log")
                axes.set_ylim(least / 2, most * 1.1)
            elif most > 0:
                axes.set_ylim(0, most * 1.05)
            axes.margins(x=0.01)
            axes.locator_params(axis="x", nbins=6, integer=True)
            return self._svg(figure, label)

    def sizes(self, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], colours: Mapping[str, str]) -> str:
        """Return stacked bars, one for each model: its name, and (dtype, kilobytes) from left to right."""
        stand_ins = {dtype: f"#0000{number + 0xB0:02x}" for number, dtype in enumerate(colours)}
        with rc_context(_SETTINGS):
            figure, axes = _figure(4.6, 0.34 + 0.24 * len(rows), left=0.75)
            for place, (_, parts) in enumerate(rows):
                left = 0.0
                for dtype, size in parts:
                    axes.barh(
                        -place, size, left=left, height=0.62, color=stand_ins[dtype], edgecolor=_GAP, linewidth=0.7
                    )
                    left += size
            axes.set_yticks([-place for place in range(len(rows))], [name for name, _ in rows])
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            axes.locator_params(axis="x", nbins=6)
            return self._svg(
                figure, "Bytes of the file by what takes them", {v: colours[k] for k, v in stand_ins.items()}
            )

    def _svg(self, figure: Figure, label: str, colours: Mapping[str, str] | None = None) -> str:
        """Return the SVG element of a figure for the inside of an HTML page."""
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        self._count += 1
        return _embedded(buffer.getvalue(), f"p{self._count}-", label, {**_VARIABLES, **(colours or {})})


def _figure(width: float, height: float, left: float = 0.1) -> tuple[Figure, Axes]:
    """Return a figure and its axes, with inches on the left for labels; matplotlib's own layouts draw it twice."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, 0.25 / height, 1 - (left + 0.12) / width, 1 - 0.31 / height))
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    return figure, axes


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    """Return the ends of an axis with room on both sides."""
    return low - share * (high - low), high + share * (high - low)


def _end(value: Any) -> float:
    """Return an end of a grid; that of a minifloat with a large scale may lie beyond float32."""
    limit = float(np.finfo(np.float32).max)
    return float(np.clip(value, -limit, limit))


def _draw_range(axes: Axes, encoding: Encoding) -> None:
    """Draw the ends of the range (of the widest channel) and the points of a coarse grid."""
    widest = int(encoding.scale.argmax())
    scale = float(encoding.scale.reshape(-1)[widest])
    zero_point = int(encoding.zero_point.reshape(-1)[widest])
    low, high = _end(encoding.low.reshape(-1)[widest]), _end(encoding.high.reshape(-1)[widest])
    for end in (low, high):
        axes.axvline(end, color=_RANGE, linewidth=1.2)
    if encoding.dtype.is_integer and encoding.dtype.hi - encoding.dtype.lo < _MOST_POINTS:
        points = (np.arange(encoding.dtype.lo, encoding.dtype.hi + 1) - zero_point) * scale
        axes.vlines(points, 0, axes.get_ylim()[1] * 0.12, color=_GRID, linewidth=0.8)


def _embedded(svg: str, prefix: str, label: str, colours: Mapping[str, str]) -> str:
    """Return the SVG element without declarations, comments and ids that clash with those of other pictures."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</defs>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'xlink:href="#', f'href="#{prefix}', text).replace("url(#", f"url(#{prefix}")
    text = re.sub(r"font-family: [^;\"]*; ", "", text)  # the font of the page
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
    for stand_in, variable in colours.items():
        text = text.replace(stand_in, variable)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"<svg[^>]*>", head, text, count=1)).strip()
