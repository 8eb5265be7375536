"""Rounding at W4A8 on ImageNet pictures: top-1 accuracy on 500 crops of ten photographs, calibrated on ten others.

One JSON line per network: accuracy in % of the float network, of the sim (weights rounded to nearest), and after each
algorithm, `drop` in points from float, and the cost in float passes over the calibration data (50 views of ten
photographs; the processor time of one thread). Crops of one photograph are alike: ten photographs are few, and a
difference of two points is noise. `python benchmarks/imagenet_rounding.py efficientnet_lite0` measures one network.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from integer_metrics import crops_of_photographs
from ptq_cases import efficientnet_lite0, mobilenet_v2
from ptq_measure import calibrated, float_pass, one_thread, outputs, seconds

import qsdk

METHODS: dict[str, tuple[Callable[..., Any], ...]] = {
    "nearest": (),
    "gptq": (qsdk.gptq,),
    "adaround": (qsdk.adaround,),
    "seq_mse, adaround": (qsdk.seq_mse, qsdk.adaround),
}
EACH = 50  # crops of a photograph


def measured(make: Callable[[], Any], *, lite: bool) -> dict[str, Any]:
    """Return accuracies, drops and passes of one network."""
    case = make()
    crops, labels = crops_of_photographs(EACH, lite=lite)
    others = np.arange(len(labels)) // EACH % 2 == 1  # the case calibrates on every second photograph
    test, expected = list(crops[torch.from_numpy(others)].split(10)), torch.from_numpy(labels[others])

    def accuracy(model: Callable[..., Any]) -> float:
        return round(100 * float((outputs(model, test).argmax(1) == expected).float().mean()), 2)

    unit, found = float_pass(case.model, case.batches), {"float": {"accuracy %": accuracy(case.model)}}
    for name, verbs in METHODS.items():
        sim = calibrated(case.model, case.batches, qsdk.w4a8())
        spent = sum(seconds(partial(verb, sim, case.batches, progress=False)) for verb in verbs)
        right = accuracy(sim)
        drop = round(found["float"]["accuracy %"] - right, 2)
        found[name] = {"accuracy %": right, "drop": drop, "passes": round(spent / unit, 1)}
    return found


def main(*given: str) -> None:
    one_thread()
    for make in (efficientnet_lite0, mobilenet_v2):
        if not given or make.__name__ in given:
            found = measured(make, lite=make is efficientnet_lite0)
            print(json.dumps({"benchmark": "imagenet_rounding", make.__name__: found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
