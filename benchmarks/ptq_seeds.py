"""Post-training algorithms over several trainings of one network: mean drops of accuracy with their spread.

`python benchmarks/ptq_seeds.py mobile --config=W3A8 --seeds=0,1,2 --methods="seq_mse;adaround;seq_mse, adaround"`
prints one JSON line. For each method it gives, as means over the seeds: `drop`, the points of accuracy on the 10,000
test images below the float network (negative: above it), `spread`, the sample standard deviation of the drops over the
seeds, `drops`, `changed`, the share of images in % whose class is another than float's, `sqnr_db` of the logits, and
`passes`, the cost as in `ptq_tables.py`. `ceiling` is the network with float weights and the config's activations: no
rounding of weights can be expected above it. `noise` is the standard error of a drop that the choice of test images
leaves, for one seed: the root of the images whose being right changes, over all images.
`adaround, as in the paper` is soft rounding of the error behind activation functions, 500 steps for each layer.
"""

import json
import logging
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from ptq_cases import LOW
from ptq_measure import decibels, float_pass, one_thread, outputs, seconds
from ptq_networks import NETWORKS, calibration, trained
from ptq_tables import ESTIMATORS, SOLVERS, TUNED, Work, again
from torch import Tensor, nn

import qsdk
from qsdk.demo.data import load


def as_in_the_paper(sim: Any, batches: list[Any]) -> None:
    """Nagel et al. 2020, with their asymmetric reconstruction and activation function (equation 25)."""
    qsdk.adaround(sim, batches, method="relaxed", activation=True, progress=False)


METHODS: dict[str, Work] = {
    **ESTIMATORS,
    **SOLVERS,
    "seq_mse, 80 candidates": lambda sim, batches: qsdk.seq_mse(sim, batches, candidates=80, progress=False),
    "adaround, as in the paper": as_in_the_paper,
    **TUNED,
}
USUAL = ("nearest, min_max", "seq_mse", "gptq", "adaround", "seq_mse, adaround")
Row = dict[str, float]


def compared(exact: Tensor, found: Tensor, labels: Tensor) -> Row:
    """How a network's logits differ from those of the float network."""
    right, still = exact.argmax(1) == labels, found.argmax(1) == labels
    return {
        "drop": 100 * float(right.float().mean() - still.float().mean()),
        "noise": 100 * float((right != still).sum()) ** 0.5 / len(labels),
        "changed": 100 * float((exact.argmax(1) != found.argmax(1)).float().mean()),
        "sqnr_db": decibels(exact, found),
    }


def measured(model: nn.Module, config: qsdk.QuantConfig, methods: Sequence[str]) -> dict[str, Row]:
    """A row for each method and for the ceiling, for one network."""
    data, batches = load(), calibration()
    test, labels = list(torch.from_numpy(data.test_images).split(500)), torch.from_numpy(data.test_labels)
    exact, unit = outputs(model, test), float_pass(model, batches)
    rows: dict[str, Row] = {}
    works = {"ceiling": again(), **{name: METHODS[name] for name in methods}}
    for name, work in works.items():
        own = config.override("*", weight="float32") if name == "ceiling" else config
        sim = qsdk.quantize(model, batches[0], own)
        qsdk.calibrate(sim, batches, progress=False)
        spent = seconds(lambda work=work, sim=sim: work(sim, batches))
        rows[name] = {**compared(exact, outputs(sim, test), labels), "passes": spent / unit}
        print(name, {key: round(value, 2) for key, value in rows[name].items()}, file=sys.stderr, flush=True)
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Means over the seeds, and the drops one by one."""
    means = {key: round(statistics.fmean(row[key] for row in rows), 2) for key in rows[0]}
    drops = [round(row["drop"], 2) for row in rows]
    spread = round(statistics.stdev(drops), 2) if len(drops) > 1 else None
    return {"drop": means.pop("drop"), "spread": spread, "drops": drops, **means}


def main(*given: str) -> None:
    logging.disable(logging.WARNING)
    one_thread()
    options = dict(text[2:].split("=", 1) for text in given if text.startswith("--"))
    seeds = [int(seed) for seed in options.get("seeds", "0,1,2").split(",")]
    names, config = options.get("methods", ";".join(USUAL)).split(";"), options.get("config", "W3A8")
    found: dict[str, Any] = {}
    for network in [name for name in given if not name.startswith("--")] or list(NETWORKS):
        rows = [measured(trained(network, seed), LOW[config], names) for seed in seeds]
        found[network] = {name: summary([row[name] for row in rows]) for name in rows[0]}
    print(json.dumps({"benchmark": "ptq_seeds", "config": config, "seeds": seeds, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
