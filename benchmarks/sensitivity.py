"""Sensitivity estimated in one pass over the data against layers measured one at a time, on pretrained networks.

One JSON line. Per network, config and side (`module`, and `file`: the same network as a float ONNX file): Spearman's
rank correlation of `sqnr_db` over all rows, and of the rows of weights and of activations; the median and the largest
difference in dB; the number of rows, of those with the remark that they are `uncertain`, and of those without it that
are more than 3 dB off (`unremarked`); and `passes`, the processor time of the estimate over that of a float forward
pass of all its data, torch's kernels on one thread, each the median of three (one row measured takes one pass). A file
is passed in a session of ONNX Runtime with its own choice of threads, whose waiting counts as processor time, in the
sim too; `one_thread_passes` has one of a single thread as its unit, and `torch_passes` the same graph in PyTorch
without gradients, where the estimate runs it. Targets: correlation at least 0.9, at most 3 passes.
`python benchmarks/sensitivity.py demo crepe` measures a few; `--config w4a8` one config; `--side module` one side.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import qsdk
from qsdk.core.run_options import Run
from qsdk.verbs.analysis.noise import layers_of, measure_noise
from qsdk.verbs.analysis.sensitivity import sensitivity_report
from qsdk.verbs.doors.choose import door_of

sys.path.append(str(Path(__file__).parent))
import pretrained
import ptq_measure

CONFIGS = {"w8a8": qsdk.w8a8, "w4a8": qsdk.w4a8}
BATCHES = 5
_FAR = 3.0  # dB


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 3)


def measured(sim: Any, data: Sequence[Any], units: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The cost of the estimate in units, name -> float pass, and how it compares with rows measured one at a time."""
    for in_float in units.values():
        in_float()
    estimated = qsdk.sensitivity(sim, data, progress=False)
    spent = seconds(lambda: qsdk.sensitivity(sim, data, progress=False))
    costs = {name: round(spent / seconds(in_float), 2) for name, in_float in units.items()}
    layers = layers_of(sim.plan)
    noise = measure_noise(sim, data, layers, Run(progress=False))
    exact = sensitivity_report(layers, noise, {}, {})
    found = {(row["layer"], row["kind"]): row["sqnr_db"] for row in estimated.rows}
    rows = [(row["kind"], found[row["layer"], row["kind"]], row["sqnr_db"]) for row in exact.rows]
    result: dict[str, Any] = {"rank_correlation": spearman(*zip(*[row[1:] for row in rows], strict=True))}
    for kind in ("weights", "activations"):
        result[kind] = spearman(*zip(*[row[1:] for row in rows if row[0] == kind], strict=True))
    differences = np.abs([guess - true for _, guess, true in rows])
    result |= {"median_db": round(float(np.median(differences)), 2), "largest_db": round(float(differences.max()), 1)}
    remarked = {(row["layer"], row["kind"]) for row in estimated.rows if row.get("note")}
    pairs = zip(exact.rows, differences, strict=True)
    unremarked = sum(off > _FAR and (row["layer"], row["kind"]) not in remarked for row, off in pairs)
    counts = {"rows": len(rows), "uncertain": len(remarked), "unremarked": int(unremarked)}
    return result | {**counts, **costs, "method": estimated.summary["method"]}


def seconds(work: Callable[[], Any]) -> float:
    """Processor time, the median of three runs."""
    return sorted(ptq_measure.seconds(work) for _ in range(3))[1]


def network(case: pretrained.Case, config: qsdk.QuantConfig, side: str, folder: Path) -> dict[str, Any]:
    data = list(case.calibration)[:BATCHES]
    if side == "module":
        sim = qsdk.quantize(case.model, data[0], config, **case.options)
        qsdk.calibrate(sim, data, progress=False)
        return measured(sim, data, {"passes": lambda: [run(case.model, batch) for batch in data]})
    path = folder / "float.onnx"
    sim = qsdk.quantize(
        case.model, data[0], config.override("*", weight="float32", activation="float32"), **case.options
    )
    qsdk.export(sim, path, uncalibrated="float")
    osim = qsdk.quantize(path, None, config)
    names = [value.name for value in onnx.load(path, load_external_data=False).graph.input]
    fed = [as_feeds(batch, names) for batch in data]
    qsdk.calibrate(osim, fed, progress=False)
    return measured(osim, fed, float_passes(path, osim, fed))


def float_passes(path: Path, osim: Any, fed: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """What a pass of a file is: in a default session of ONNX Runtime, in one of a single thread, and in PyTorch."""
    one_thread = onnxruntime.SessionOptions()
    one_thread.intra_op_num_threads = 1
    default, single = (
        onnxruntime.InferenceSession(path, options) for options in (onnxruntime.SessionOptions(), one_thread)
    )

    @torch.no_grad()
    def in_torch() -> None:
        for batch in fed:
            door_of(osim).visited_outputs(batch, lambda _, x: x, "the batch")

    return {
        "passes": lambda: [default.run(None, batch) for batch in fed],
        "one_thread_passes": lambda: [single.run(None, batch) for batch in fed],
        "torch_passes": in_torch,
    }


def as_feeds(batch: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in (batch.items() if isinstance(batch, dict) else [(names[0], batch)])}


@torch.no_grad()
def run(model: torch.nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def main() -> None:
    logging.disable(logging.WARNING)
    ptq_measure.one_thread()
    parser = argparse.ArgumentParser()
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--config", choices=CONFIGS, action="append")
    parser.add_argument("--side", choices=("module", "file"), action="append")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for make in pretrained.NETWORKS:
        if options.networks and make.__name__ not in options.networks:
            continue
        try:
            case = make()
        except pytest.skip.Exception as reason:
            print(f"skipped {make.__name__}: {reason}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            for config in options.config or CONFIGS:
                for side in options.side or ("module", "file"):
                    row = network(case, CONFIGS[config](), side, Path(folder))
                    found[f"{make.__name__} {config} {side}"] = row
                    print(make.__name__, config, side, row, file=sys.stderr)
    print(json.dumps({"benchmark": "sensitivity", **found}))


if __name__ == "__main__":
    main()
