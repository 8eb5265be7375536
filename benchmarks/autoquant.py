"""What `autoquant` reaches from W4A8 within two budgets on convolutional networks, and what that costs.

One JSON line. Per network and `max_drop`: the metric of float, of the plain preset and of the result; the bytes of both
files; whether the budget is met; `passes`, as the report counts them (time of its steps in float passes over the
calibration data); `all_passes`, the processor time of the whole call without the metric, in float passes of the user's
model (tracing and exports included, which weigh on small networks); `evaluations` of the metric; the steps that were
kept; and at the stricter budget `same_twice`: whether a second run with the same seed ends the same, bit for bit.
Targets: at most 60 passes, never worse than the preset, the same twice.

The metric of the demo network is accuracy in points on 2,000 test images; on ImageNet it is the cosine similarity to
float's logits, times 100, on the ten images that were not calibrated on.
`python benchmarks/autoquant.py demo mobilenet_v2` measures a few.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ptq_cases import demo, efficientnet_lite0, mobilenet_v2, zoo
from ptq_measure import float_pass, one_thread, outputs
from ptq_networks import accuracy
from torch import nn

import qsdk

Metric = Callable[[Any], float]
BUDGETS = {demo: (0.5, 0.0), mobilenet_v2: (10.0, 0.5), efficientnet_lite0: (5.0, 0.5)}


def points(sim: Any) -> float:
    return accuracy(sim, 2000)


def similarity(model: nn.Module, *, lite: bool) -> Metric:
    images, _ = zoo.imagenet_images(lite=lite)
    exact = outputs(model, [images[1::2]]).flatten()

    def metric(sim: Any) -> float:
        return 100 * float(torch.nn.functional.cosine_similarity(outputs(sim, [images[1::2]]).flatten(), exact, dim=0))

    return metric


def measured(model: nn.Module, batches: Sequence[Any], metric: Metric, max_drop: float) -> tuple[dict[str, Any], Any]:
    in_metric = 0.0

    def timed(sim: Any) -> float:
        nonlocal in_metric
        begun = time.process_time()
        value = metric(sim)
        in_metric += time.process_time() - begun
        return value

    before, begun = float_pass(model, batches), time.process_time()
    report = qsdk.autoquant(
        model, batches[0], batches, timed, max_drop=max_drop, config=qsdk.w4a8(), progress=False, seed=0
    )
    spent = time.process_time() - begun - in_metric
    unit = (before + float_pass(model, batches)) / 2  # other programs slow both by turns
    preset, end = report.rows[0], report.summary
    found = {
        "metric": [round(value, 3) for value in (end["reference"], preset["metric"], end["metric"])],
        "bytes": [preset["bytes"], end["bytes"]],
        "met": end["met"],
        "passes": round(end["passes"], 1),
        "all_passes": round(spent / unit, 1),
        "evaluations": end["evaluations"],
        "kept": [row["step"] for row in report.rows if row["kept"]],
    }
    return found, report


def network(make: Callable[[], Any]) -> dict[str, Any]:
    case = make()
    metric = points if make is demo else similarity(case.model, lite=make is efficientnet_lite0)
    rows: dict[str, Any] = {}
    for max_drop in BUDGETS[make]:
        rows[f"{max_drop}"], report = measured(case.model, case.batches, metric, max_drop)
        print(make.__name__, max_drop, rows[f"{max_drop}"], file=sys.stderr, flush=True)
    again = measured(case.model, case.batches, metric, max_drop)[1]
    same = torch.equal(outputs(report.sim, case.batches), outputs(again.sim, case.batches))
    rows[f"{max_drop}"]["same_twice"] = same and report.code == again.code
    return rows


def main(*wanted: str) -> None:
    logging.disable(logging.WARNING)
    one_thread()
    found: dict[str, Any] = {}
    for make in BUDGETS:
        if wanted and make.__name__ not in wanted:
            continue
        try:
            found[make.__name__] = network(make)
        except pytest.skip.Exception as reason:
            print(f"skipped {make.__name__}: {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "autoquant, W4A8", **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
