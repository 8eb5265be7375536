"""Draw the figures of the documentation, each light and dark: `python scripts/draw_figures.py` writes docs/assets."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OUT = Path(__file__).parents[1] / "docs" / "assets"
# text, line, fill of a box, colour of what matters, colour of what is compared with it
COLOURS = {
    "light": ("#1f2430", "#5a6272", "#eef1fb", "#3f51b5", "#c2410c"),
    "dark": ("#e6e8ee", "#9aa3b5", "#2b3145", "#93a4ff", "#ffa45c"),
}


def box(axes: Axes, x: float, y: float, text: str, colours: tuple[str, ...], *, strong: bool = False) -> None:
    ink, line, fill, accent, _ = colours
    style = {"boxstyle": "round,pad=0.55", "fc": fill, "ec": accent if strong else line, "lw": 1.6 if strong else 1.0}
    axes.text(x, y, text, ha="center", va="center", color=ink, bbox=style, fontsize=10)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str,
    colours: tuple[str, ...],
    *,
    shift: tuple[float, float] = (0.0, 0.22),
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colours[1], "lw": 1.3})
    x, y = (start[0] + end[0]) / 2 + shift[0], (start[1] + end[1]) / 2 + shift[1]
    axes.text(x, y, text, ha="center", va="center", color=colours[3], fontsize=9, family="monospace")


def empty(axes: Axes, width: float, height: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")


def road(axes: Axes, colours: tuple[str, ...]) -> None:
    """From a model to integers."""
    empty(axes, 12, 4.2)
    box(axes, 1.2, 3.3, "nn.Module", colours)
    box(axes, 1.2, 1.7, "float ONNX file", colours)
    box(axes, 4.9, 2.5, "sim\n(a simulation)", colours, strong=True)
    box(axes, 8.3, 2.5, "ONNX with Q/DQ\n+ encodings", colours)
    box(axes, 11.0, 3.5, "parity report", colours)
    box(axes, 11.0, 1.5, "integers only\n+ certificate", colours)
    arrow(axes, (2.1, 3.2), (4.0, 2.75), "quantize", colours)
    arrow(axes, (2.4, 1.8), (4.0, 2.25), "", colours)
    arrow(axes, (5.85, 2.5), (7.2, 2.5), "export", colours)
    arrow(axes, (9.3, 2.85), (10.2, 3.3), "check_parity", colours, shift=(-0.45, 0.35))
    arrow(axes, (9.3, 2.15), (10.1, 1.75), "to_integer", colours, shift=(-0.45, -0.35))
    loop = {"arrowstyle": "-|>", "color": colours[1], "lw": 1.3, "connectionstyle": "arc3,rad=1.6"}
    axes.annotate("", (5.4, 1.95), (4.4, 1.95), arrowprops=loop)
    steps = "calibrate, seq_mse, adaround, training ..."
    axes.text(4.9, 0.55, steps, ha="center", color=colours[3], fontsize=9, family="monospace")


def formula(axes: Axes, colours: tuple[str, ...]) -> None:
    """The staircase of fake quantization, with 3 bits."""
    ink, line, _, accent, other = colours
    scale, zero = 0.5, 3
    x = np.linspace(-2.2, 2.8, 2000)
    codes = np.clip(np.rint(x / scale) + zero, 0, 7)
    axes.plot(x, x, color=line, lw=1, ls="--", label="float")
    axes.plot(x, (codes - zero) * scale, color=accent, lw=2, label="after quantize and dequantize")
    axes.axvspan(-2.2, -1.75, color=other, alpha=0.15, lw=0)
    axes.axvspan(2.25, 2.8, color=other, alpha=0.15, lw=0, label="clipped")
    axes.set_yticks((np.arange(8) - zero) * scale, [f"code {code}" for code in range(8)])
    axes.set_xlabel("value, scale = 0.5, zero point = 3", color=ink)
    axes.legend(frameon=False, labelcolor=ink, loc="upper left")


def ranges(axes: Axes, colours: tuple[str, ...]) -> None:
    """What a range costs: rounding inside, clipping outside."""
    ink, line, _, accent, other = colours
    random = np.random.default_rng(0)
    values = np.concatenate([random.normal(0, 1, 20_000), random.normal(0, 4, 200)])
    ends = np.linspace(1, np.abs(values).max(), 60)
    errors = []
    for end in ends:
        scale = end / 7
        rounded = np.clip(np.rint(values / scale), -7, 7) * scale
        inside = np.abs(values) <= end
        error = (values - rounded) ** 2
        errors.append([error[inside].sum(), error[~inside].sum(), error.sum()])
    rounding, clipping, total = np.array(errors).T / len(values)
    axes.plot(ends, rounding, color=accent, lw=1.5, ls="--", label="rounding")
    axes.plot(ends, clipping, color=other, lw=1.5, ls="--", label="clipping")
    axes.plot(ends, total, color=ink, lw=2, label="both")
    best = ends[total.argmin()]
    for at, name in ((best, "mse"), (ends[-1], "min_max")):
        axes.axvline(at, color=line, lw=1)
        axes.text(at - 0.1, 0.36, name, color=ink, rotation=90, ha="right", va="top", family="monospace")
    axes.set_ylim(0, 0.4)
    axes.set_xlabel("end of the range, of values of which a few are four times larger; 4 bits", color=ink)
    axes.set_ylabel("squared error", color=ink)
    axes.legend(frameon=False, labelcolor=ink)


def parity(axes: Axes, colours: tuple[str, ...]) -> None:
    """Each site is fed with the simulation's own values."""
    empty(axes, 12, 4)
    for y, name in ((3.1, "simulation"), (0.9, "exported file,\nin the runtime")):
        axes.text(0.1, y, name, color=colours[0], fontsize=10, va="center")
        for x, op in ((3.2, "Conv"), (6.4, "Add"), (9.6, "Gemm")):
            box(axes, x, y, op, colours, strong=y > 2)
    for x in (3.2, 6.4, 9.6):
        arrow(axes, (x - 1.5, 3.1), (x - 0.6, 3.1), "", colours)
        axes.annotate(
            "", (x - 0.6, 1.0), (x - 1.1, 3.0), arrowprops={"arrowstyle": "-|>", "color": colours[4], "lw": 1.3}
        )
        axes.annotate("", (x, 2.7), (x, 1.3), arrowprops={"arrowstyle": "<->", "color": colours[3], "lw": 1.3})
        axes.text(x + 0.15, 2.0, "codes:\n0 or 1 step", color=colours[3], fontsize=9, va="center")


def requantize(axes: Axes, colours: tuple[str, ...]) -> None:
    """A layer in integers."""
    empty(axes, 12.6, 3)
    steps = [
        (1.1, "codes\nuint8"),
        (3.6, "products with\nint8 weights"),
        (6.2, "sum + bias\nint32"),
        (9.0, "x multiplier\n>> shift"),
        (11.6, "codes\nuint8"),
    ]
    for number, (x, text) in enumerate(steps):
        box(axes, x, 1.7, text, colours, strong=number in (0, 4))
    for (left, _), (right, _) in pairwise(steps):
        arrow(axes, (left + 0.8, 1.7), (right - 0.95, 1.7), "", colours)
    note = "input scale x weight scale / output scale, as a whole number and a shift"
    axes.text(9.0, 0.45, note, ha="center", color=colours[3], fontsize=9)


def decision_tree(axes: Axes, colours: tuple[str, ...]) -> None:
    """From what you see to what you call."""
    empty(axes, 13, 6.4)
    box(axes, 6.5, 5.9, "calibrate(sim, batches), then measure", colours, strong=True)
    columns = (
        (1.7, "weights of 4 bits\nor fewer", "gptq\nor adaround", "tune_blocks,\ntraining"),
        (4.9, "one layer is\nto blame", "set_precision,\noverride", "mixed_precision"),
        (8.1, "a transformer\nat 8 bits", "rotate, scales per\nchannel, smooth_quant", "tune_ranges,\nw8a16"),
        (11.3, "a small drop,\nall layers alike", 'method="mse",\ncorrect_bias', "training"),
    )
    for x, symptom, first, then in columns:
        arrow(axes, (6.5 + (x - 6.5) * 0.35, 5.45), (x, 4.75), "", colours)
        box(axes, x, 4.2, symptom, colours)
        arrow(axes, (x, 3.65), (x, 2.95), "", colours)
        box(axes, x, 2.4, first, colours, strong=True)
        arrow(axes, (x, 1.85), (x, 1.15), "not enough", colours, shift=(0.85, 0.0))
        box(axes, x, 0.6, then, colours, strong=True)


FIGURES: dict[str, tuple[Callable[[Axes, tuple[str, ...]], None], tuple[float, float]]] = {
    "road": (road, (10, 3.5)),
    "formula": (formula, (7, 3.6)),
    "ranges": (ranges, (7, 3.4)),
    "parity": (parity, (10, 3.2)),
    "requantize": (requantize, (10, 2.4)),
    "decision_tree": (decision_tree, (11, 5.4)),
}


def main() -> None:
    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "qsdk", "font.family": "sans-serif"})
    for shade, colours in COLOURS.items():
        ink, line = colours[:2]
        mpl.rcParams.update({"axes.edgecolor": line, "xtick.color": ink, "ytick.color": ink})
        for name, (draw, size) in FIGURES.items():
            figure, axes = plt.subplots(figsize=size, layout="constrained")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            draw(axes, colours)
            figure.savefig(OUT / f"{name}-{shade}.svg", transparent=True, metadata={"Date": None, "Creator": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
