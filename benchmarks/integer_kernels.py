"""Where the time of `to_integer(target="onnxruntime")` goes, beside the default export of the same network.

One JSON line per network of `deployed.py` (batch 1, one thread): both files are profiled, and the times of their
kernels (of each node, the least of many runs) are shares of all kernels of the default export. Those of the integer
file are summed by the form that the certificate states for what they compute: `layers` are kernels of products,
`norms`, `softmaxes`, `tables` and `sums` what their names say, `moves` and `other` the rest. `ratio` is that of the
sums, `of_norms` the kernels of norms as shares of these, `nodes` the numbers of kernels: a profiled node counts at
least a microsecond, so that ratios of small networks are larger than those of `deployed.py`.
"""

import argparse
import json
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from deployed import Feed, written
from deployed_floor import MOVES, kernels_of
from deployed_networks import NETWORKS

FORMS = {
    "norm of rows": "norms",
    "shares of rows": "softmaxes",
    "QLinearSoftmax": "softmaxes",
    "table": "tables",
    "fixed point": "sums",
    "fixed point in 32 bits": "sums",
    "QLinearAdd": "sums",
    "QLinearMul": "sums",
}
PARTS = ("layers", "norms", "softmaxes", "tables", "sums", "moves", "other")
LAYERS = ("QLinearConv", "QLinearMatMul", "QGemm", "MatMulInteger", "ConvInteger")
PAGE = Path(__file__).parent.parent / "docs" / "results" / "deployed.md"
START, END = "<!-- integers -->\n", "<!-- end of integers -->"


def part_of(node: str, op: str, forms: dict[str, str]) -> str:
    """Return the part of an integer file to which a node belongs: it is named after the codes that it computes."""
    if any(word in op for word in MOVES):
        return "moves"
    name = node.split("_token_")[0].removesuffix("_node")
    while name and name not in forms:
        name = name.rpartition(".")[0]
    part = FORMS.get(forms.get(name, ""), "other")
    return "layers" if op in LAYERS and part == "other" else part


def row_of(paths: dict[str, Path], feed: Feed) -> dict[str, object]:
    """Return the parts of the integer file over all kernels of the default export."""
    ours, integer = (kernels_of(paths[name], feed) for name in ("ours", "integer"))
    certificate = json.loads(Path(f"{paths['integer']}.certificate.json").read_bytes())
    forms = {row["tensor"]: row["form"] for row in certificate["requantizations"]}
    whole = sum(taken for _, taken in ours.values())
    layers = sum(taken for op, taken in ours.values() if op in LAYERS or op in ("LSTM", "GRU"))
    found, norms = defaultdict(float), defaultdict(float)
    for node, (op, taken) in integer.items():
        part = part_of(node, op, forms)
        found[part] += taken
        norms[op] += taken if part == "norms" else 0.0
    parts = {part: round(found[part] / whole, 3) for part in PARTS}
    facts = {"ours_ms": round(whole, 2), "ratio": round(sum(found.values()) / whole, 3)}
    nodes = {"ours": len(ours), "integer": len(integer)}
    shares = {op: round(taken / found["norms"], 2) for op, taken in norms.items() if taken > 0.05 * found["norms"]}
    return {**facts, "nodes": nodes, "ours_layers": round(layers / whole, 3), "parts": parts, "of_norms": shares}


def write_page(lines: Path) -> None:
    """Write the table of the documentation from the JSON lines of a run."""
    found = [json.loads(line) for line in lines.read_text().splitlines() if line.startswith("{")]
    names = ["network", "ratio", "nodes", "of ours", "ours: layers", *PARTS]
    rows = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    for row in found:
        nodes = row["nodes"]
        cells = [row["name"], row["ratio"], nodes["integer"], nodes["ours"], row["ours_layers"], *row["parts"].values()]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + "\n".join(rows) + "\n" + END + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", type=Path, help="JSON lines of an earlier run, for docs/results/deployed.md")
    chosen = parser.parse_args()
    if chosen.page:
        write_page(chosen.page)
        return
    torch.set_num_threads(1)
    for name in chosen.names or NETWORKS:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            paths, feeds = written(NETWORKS[name], Path(folder), 1, ["ours", "integer"])
            row = {"benchmark": "integer_kernels", "name": name, **row_of(paths, feeds[0])}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
