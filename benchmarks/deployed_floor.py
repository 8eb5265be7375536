"""What no form of a file can be faster than: the time of the kernels that compute, without any conversion or move.

One JSON line per network of `deployed.py`: each file is opened as there and profiled, and its kernels' times (of each
node, the least of many runs) are summed in four parts: `layers` (products and recurrent layers), `other` (what else
computes), `moves` (of values) and `conversions` (Q/DQ pairs, casts, layouts), as shares of all kernels of the faster
stock file. `floor` is the least `layers` and the least `other` of any quantized file, and nothing else: a file with
these kernels and without a single pair. Where it is above the goal, the goal is missed by the kernels, not by the form.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnxruntime as ort
from deployed import CONFIGS, SHORT, Feed, run

RUNS = 40
PARTS = ("layers", "other", "moves", "conversions")
LAYERS = ("Conv", "MatMul", "Gemm", "LSTM", "GRU", "Attention")
CONVERSIONS = ("QuantizeLinear", "Reorder", "Cast")
MOVES = ("Reshape", "Transpose", "Slice", "Concat", "Split", "Expand", "Squeeze", "Flatten", "Identity", "Shape", "Pad")
PAGE = Path(__file__).parent.parent / "docs" / "results" / "deployed.md"
START, END = "<!-- floors -->\n", "<!-- end of floors -->"


def part_of(op: str) -> str:
    """Return the part of a file's work to which a kernel belongs."""
    for part, words in (("conversions", CONVERSIONS), ("layers", LAYERS), ("moves", MOVES)):
        if any(word in op for word in words):
            return part
    return "other"


def kernels_of(path: Path, feed: Feed, threads: int = 1) -> dict[str, tuple[str, float]]:
    """Return the kernel and the milliseconds of each node of a file."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level, options.enable_profiling = threads, 4, True
        options.profile_file_prefix = f"{folder}/profile"
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = dict(zip((value.name for value in session.get_inputs()), feed.values(), strict=True))
        for _ in range(RUNS):
            session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_bytes())
    least: dict[str, tuple[str, float]] = {}
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            name, op, taken = event["name"].removesuffix("_kernel_time"), event["args"]["op_name"], event["dur"] / 1000
            least[name] = op, min(taken, least.get(name, (op, taken))[1])
    return least


def parts_of(path: Path, feed: Feed, threads: int) -> dict[str, float]:
    """Return the milliseconds of each part of a file."""
    found: defaultdict[str, float] = defaultdict(float)
    for op, taken in kernels_of(path, feed, threads).values():
        found[part_of(op)] += taken
    return {part: found[part] for part in PARTS}


def row_of(paths: dict[str, Path], feeds: list[Feed], threads: int) -> dict[str, object]:
    """Return the parts of each file over all kernels of the faster stock file, and the floor."""
    parts = {name: parts_of(path, feeds[0], threads) for name, path in paths.items()}
    totals = {name: sum(found.values()) for name, found in parts.items()}
    stock = min((name for name in totals if name.startswith("stock")), key=totals.__getitem__)
    whole = totals[stock]
    shares = {
        name: {part: round(ms / whole, 3) for part, ms in parts[name].items()} for name in (stock, *CONFIGS, "float")
    }
    known = [found for name, found in parts.items() if name != "float"]
    floor = min(found["layers"] for found in known) + min(found["other"] for found in known)
    best = {"floor": round(floor / whole, 3), "ours": round(totals["ours"] / whole, 3)}
    return {"float_ms": round(totals["float"], 2), **best, "stock": shares.pop(stock), "parts": shares}


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    """Return the median floor over the networks above 0.5 ms, and those whose floor is above the goal."""
    long = [row for row in rows if float(str(row["float_ms"])) > SHORT]
    floors = [float(str(row["floor"])) for row in long]
    return {
        "rows": len(long),
        "median_floor": round(float(np.median(floors)), 3) if floors else None,
        "above_0.85": [row["name"] for row, floor in zip(long, floors, strict=True) if floor > 0.85],
    }


def write_page(lines: Path) -> None:
    """Write the table of the documentation from the JSON lines of a run."""
    found = [json.loads(line) for line in lines.read_text().splitlines() if '"name"' in line]
    head = ["network", "batch", "ours", "floor", *(f"stock: {part}" for part in PARTS), *(f"ours: {p}" for p in PARTS)]
    text = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in found:
        shares = [*(row["stock"][part] for part in PARTS), *(row["parts"]["ours"][part] for part in PARTS)]
        cells = [row["name"], row["batch"], row["ours"], row["floor"], *shares]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    for batch in sorted({row["batch"] for row in found}):
        facts = summary([row for row in found if row["batch"] == batch])
        above = ", ".join(map(str, facts["above_0.85"])) or "none"
        line = f"of {facts['rows']} networks above 0.5 ms: {facts['median_floor']}; above 0.85: {above}"
        text += ["", f"Batch {batch}, median floor {line}."]
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + "\n".join(text) + "\n" + END + rest.partition(END)[2])


def main() -> None:
    defaults = {"batches": [1], "threads": [1], "kinds": ["stock", *CONFIGS]}
    run("deployed_floor", __doc__, defaults, row_of, summary, write_page)


if __name__ == "__main__":
    main()
