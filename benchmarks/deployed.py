"""Whole networks as users deploy them: time and accuracy of the exported file beside ONNX Runtime's own tool.

One JSON line per network, batch size and number of threads; every file is opened in an ordinary `InferenceSession` at
its default level. `stock` is the faster of `onnxruntime.quantization.quantize_static` (Q/DQ, per channel, min-max) on
the same float file, with and without its own preprocessing; `ours` is the twenty lines of the README (`w8a8`,
`min_max`, `export`); `dialect` is `w8a8().for_dialect("onnxruntime")`, `vnni` that for such processors; `integer` is
`to_integer(target="onnxruntime")` of ours. `--kinds dynamic` measures `dynamic_activations=True` for ONNX Runtime
beside `quantize_dynamic` (`theirs`) instead (`dynamic_per_tensor` with one scale for each weight, as theirs), and
`weights` weights alone; `--kinds ours dialect tokens` measures both beside the same files with tokens between layers.
Times are ratios of the shortest of many interleaved runs, in three sessions of each file, to the float file's; `sqnr`
is in dB to the float file, on data that calibration has not seen. Names, `--batches 1 8` and `--threads 1 2` choose
what is measured.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from deployed_networks import NETWORKS, Network, settled
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static, shape_inference

import qsdk
from onnx_backend.qdq.fast_forms import with_pairs, write_fast_forms

ROUNDS = 40
SESSIONS = 3  # of each file
CALIBRATED = 4  # batches
SHORT = 0.5  # ms; shorter networks measure what a run of a session costs
SECONDS = 6.0  # of timing a network, at most
SETTLED = 0.005  # seconds after which a session's workers sleep
PAGE = Path(__file__).parent.parent / "docs" / "results" / "deployed.md"
START, END = "<!-- rows -->\n", "<!-- end of rows -->"
Feed = dict[str, np.ndarray]


CONFIGS = {
    "ours": qsdk.w8a8(),
    "dialect": qsdk.w8a8().for_dialect("onnxruntime"),
    "vnni": qsdk.w8a8().for_dialect("onnxruntime", processor="vnni"),
}
DYNAMIC = "dynamic"  # beside `theirs`, of quantize_dynamic
TOKENS = "tokens"  # the files of kinds without the rows that tokens are between layers
_DYNAMIC = qsdk.QuantConfig(dynamic_activations=True)
ALL_CONFIGS = {
    **CONFIGS,
    DYNAMIC: _DYNAMIC.for_dialect("onnxruntime", processor="vnni"),
    # what a scale for each output channel costs: `theirs` has one for each weight
    "dynamic_per_tensor": replace(_DYNAMIC, per_channel=False).for_dialect("onnxruntime", processor="vnni"),
    "weights": qsdk.weight_only("int8", compute="float32"),  # the noise of weights alone
}


class Reader:
    """The calibration data of the runtime's own tool."""

    def __init__(self, feeds: list[Feed]) -> None:
        self.left: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        """Gives the next batch."""
        return next(self.left, None)


def opened(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def write_stock(source: Path, folder: Path, feeds: list[Feed]) -> dict[str, Path]:
    """Write what the runtime's own tool makes of a float file, with and without its preprocessing."""
    found = {}
    for name in ("plain", "prepared"):
        given, path = source, folder / f"stock_{name}.onnx"
        try:
            if name == "prepared":
                given = folder / "prepared.onnx"
                shape_inference.quant_pre_process(source, given, skip_symbolic_shape=True)
            kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
            quantize_static(given, path, Reader(feeds), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
            opened(path, 1)
            found[f"stock_{name}"] = path
        except Exception as error:  # the tool raises whatever comes
            print(f"stock {name}: {type(error).__name__} {str(error)[:100]}")
    return found


def try_to(act: Callable[[], Any], name: str) -> bool:
    try:
        act()
    except qsdk.QsdkError as error:
        print(f"{name}: {' '.join(str(error).split())[:160]}")
        return False
    return True


def written(network: Network, folder: Path, size: int, kinds: list[str]) -> tuple[dict[str, Path], list[Feed]]:
    """Write the float file and the quantized ones, and return them with data that calibration has not seen."""
    torch.manual_seed(0)
    batches = [network.batch(size, seed) for seed in range(CALIBRATED + max(1, 16 // size))]
    model = settled(network.make(), batches[0])
    paths = {"float": folder / "float.onnx"}
    torch.onnx.export(
        model, batches[0], paths["float"], dynamo=True, opset_version=21, external_data=False, verbose=False
    )
    names = [value.name for value in opened(paths["float"], 1).get_inputs()]
    feeds = [dict(zip(names, (t.numpy() for t in batch), strict=True)) for batch in batches]
    if "stock" in kinds:
        paths |= write_stock(paths["float"], folder, feeds[:CALIBRATED])
    if DYNAMIC in kinds:
        paths["theirs"] = folder / "theirs.onnx"
        quantize_dynamic(paths["float"], paths["theirs"])
    for name, config in ALL_CONFIGS.items():
        if name in kinds:
            sim = qsdk.quantize(model, batches[0], config)
            qsdk.calibrate(sim, batches[:CALIBRATED], progress=False)
            qsdk.export(sim, folder / f"{name}.onnx")
            paths[name] = folder / f"{name}.onnx"
    for name in [kind for kind in ("ours", "dialect") if TOKENS in kinds and kind in paths]:
        model = with_pairs(onnx.load(paths[name]))
        write_fast_forms(model, rows=False)
        paths[f"{name}_tokens"] = folder / f"{name}_tokens.onnx"
        onnx.save(model, paths[f"{name}_tokens"])
    if "integer" in kinds:
        path, data = folder / "integer.onnx", [batches[0]]
        options = {"target": "onnxruntime", "data": data, "progress": False}
        if try_to(lambda: qsdk.to_integer(paths["ours"], path, **options), "to_integer"):
            paths["integer"] = path
    return paths, feeds[CALIBRATED:]


def results_of(session: ort.InferenceSession, feeds: list[Feed]) -> np.ndarray:
    """Return the first output on some batches, in float64."""
    names = [value.name for value in session.get_inputs()]
    given = [dict(zip(names, feed.values(), strict=True)) for feed in feeds]
    return np.stack([session.run(None, feed)[0].astype(np.float64) for feed in given])


def measured(paths: dict[str, Path], feeds: list[Feed], threads: int) -> dict[str, Any]:
    """Return the ratios of the shortest times to the float file's, and the SQNR of each file's first output."""
    # where a session's tensors lie in memory alone changes its time by up to 4 %
    runs = [(name, opened(path, threads)) for _ in range(SESSIONS) for name, path in paths.items()]
    values = feeds[0].values()
    given = {name: dict(zip((v.name for v in run.get_inputs()), values, strict=True)) for name, run in runs}
    results = {name: results_of(run, feeds) for name, run in runs[: len(paths)]}
    power = np.mean(results["float"] ** 2)
    noise = {name: np.mean((result - results["float"]) ** 2) for name, result in results.items() if name != "float"}
    clock = time.process_time if threads == 1 else time.perf_counter
    least = dict.fromkeys(paths, float("inf"))
    end, rounds = time.monotonic() + SECONDS, 0
    while rounds < 5 or (rounds < ROUNDS and time.monotonic() < end):
        rounds += 1
        for name, run in runs:
            if threads > 1:
                time.sleep(SETTLED)  # the workers of the session before spin for a while, on the cores of this one
            run.run(None, given[name])  # warm caches
            start = clock()
            run.run(None, given[name])
            least[name] = min(least[name], clock() - start)
    found: dict[str, Any] = {"float_ms": round(1000 * least["float"], 2)}
    found |= {name: round(taken / least["float"], 3) for name, taken in least.items() if name != "float"}
    found["sqnr"] = {name: round(float(10 * np.log10(power / value)), 1) for name, value in noise.items()}
    stock = [found[name] for name in least if name.startswith("stock")]
    found |= {"ours_over_stock": round(found["ours"] / min(stock), 3)} if stock and "ours" in found else {}
    dynamic = [name for name in found if name.startswith(DYNAMIC)]
    found |= {f"{name}_over_theirs": round(found[name] / found["theirs"], 3) for name in dynamic}
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each kind of file its time over stock's and its SQNR less stock's, over all rows above 0.5 ms."""
    found: dict[str, dict[str, float]] = {}
    for kind in (*CONFIGS, "integer"):
        both = [row for row in rows if kind in row and "stock_plain" in row and row["float_ms"] > SHORT]
        if not both:
            continue
        stock = [[name for name in row if name.startswith("stock")] for row in both]
        times = [row[kind] / min(row[name] for name in names) for row, names in zip(both, stock, strict=True)]
        gains = [row["sqnr"][kind] - max(row["sqnr"][n] for n in names) for row, names in zip(both, stock, strict=True)]
        found[kind] = {
            "rows": len(both),
            "median_over_stock": round(float(np.median(times)), 3),
            "worst_over_stock": round(max(times), 3),
            "faster_than_float": sum(row[kind] < 1.0 for row in both),
            "median_gain_db": round(float(np.median(gains)), 1),
            "worst_gain_db": round(min(gains), 1),
        }
    return found


def write_page(lines: Path) -> None:
    """Write the table of the documentation from the JSON lines of a run."""
    found = [json.loads(line) for line in lines.read_text().splitlines() if line.startswith("{") and "name" in line]
    kinds = [*CONFIGS, "integer"]
    names = ["network", "batch", "threads", "float, ms", "stock", *kinds, "SQNR stock", *kinds]
    rows = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    for row in found:
        stock = [name for name in ("stock_plain", "stock_prepared") if name in row]
        best = min((row[name] for name in stock), default="-")
        heard = max((row["sqnr"][name] for name in stock), default="-")
        cells = [row["name"], row["batch"], row["threads"], row["float_ms"], best, *(row.get(k, "-") for k in kinds)]
        rows.append("| " + " | ".join(map(str, [*cells, heard, *(row["sqnr"].get(k, "-") for k in kinds)])) + " |")
    for batch, threads in sorted({(row["batch"], row["threads"]) for row in found}):
        some = [row for row in found if (row["batch"], row["threads"]) == (batch, threads)]
        rows += ["", f"Rows above 0.5 ms, batch {batch}, {threads} thread{'s' * (threads > 1)}:", ""]
        rows += [
            f"- *{kind}* takes {facts['median_over_stock']} times stock's time (median of {facts['rows']} rows, the "
            f"worst {facts['worst_over_stock']}) and is faster than float in {facts['faster_than_float']}; its SQNR is "
            f"{facts['median_gain_db']:+} dB above stock's (median, the worst {facts['worst_gain_db']:+})"
            for kind, facts in summary(some).items()
        ]
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + "\n".join(rows) + "\n" + END + rest.partition(END)[2])


Rows = list[dict[str, Any]]


def run(
    benchmark: str,
    described: str | None,
    defaults: dict[str, list[Any]],
    row_of: Callable[[dict[str, Path], list[Feed], int], dict[str, Any]],
    of_all: Callable[[Rows], object],
    page: Callable[[Path], None],
) -> None:
    """Read the arguments, write the files of each network, print a row of each and what all of them say."""
    parser = argparse.ArgumentParser(description=described)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--batches", type=int, nargs="+", default=defaults["batches"])
    parser.add_argument("--threads", type=int, nargs="+", default=defaults["threads"])
    parser.add_argument("--kinds", nargs="+", default=defaults["kinds"])
    parser.add_argument("--keep", type=Path, help="a folder that keeps the files")
    parser.add_argument("--page", type=Path, help="JSON lines of an earlier run, for docs/results/deployed.md")
    chosen = parser.parse_args()
    if chosen.page:
        page(chosen.page)
        return
    torch.set_num_threads(1)
    rows: Rows = []
    for name in chosen.names or NETWORKS:
        for size in chosen.batches:
            with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder = chosen.keep / f"{name.replace(' ', '_')}_{size}" if chosen.keep else Path(place)
                folder.mkdir(parents=True, exist_ok=True)
                paths, feeds = written(NETWORKS[name], folder, size, chosen.kinds)
                for threads in chosen.threads:
                    row = {"benchmark": benchmark, "name": name, "kind": NETWORKS[name].kind, "batch": size}
                    rows.append({**row, "threads": threads, **row_of(paths, feeds, threads)})
                    print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"benchmark": benchmark, "all": of_all(rows)}))


def main() -> None:
    defaults = {"batches": [1, 8], "threads": [1, 2], "kinds": ["stock", *CONFIGS, "integer"]}
    run("deployed", __doc__, defaults, measured, summary, write_page)


if __name__ == "__main__":
    main()
