"""Accuracy of W8A8 in the dtypes, zero points and scales of shipped targets, beside plain `w8a8()`.

One JSON line per network of the post-training tables, on 10,000 test images: `w8a8` is its percent less that of the
float model, `targets` that of a target (`for_dialect`) less that of `w8a8`, all with ranges by `mse`; `adaround` is the
same with that verb behind on both sides, for targets whose scales are powers of two. Names choose among the networks.
"""

import json
import sys
from typing import Any

from ptq_cases import CASES, Case
from ptq_measure import calibrated, one_thread

import qsdk
from qsdk.core.config.target import load_target

TARGETS = ("xint8", "tidl", "axera", "stm32", "litert", "xnnpack")
NETWORKS = ("demo", "mobile", "resnet14")


def percents(case: Case, config: qsdk.QuantConfig, *, rounded: bool) -> tuple[float, float]:
    """Percent that a sim gets right after `calibrate`, and after `adaround` (0 where it is not asked for)."""
    sim: Any = calibrated(case.model, case.batches, config, method="mse")
    first = case.score(sim)["accuracy %"]
    if rounded:
        qsdk.adaround(sim, case.batches, progress=False)
    return first, case.score(sim)["accuracy %"] if rounded else 0.0


def measured(name: str) -> dict[str, Any]:
    case = next(make for make in CASES if make.__name__ == name)()
    plain, solved = percents(case, qsdk.w8a8(), rounded=True)
    row: dict[str, Any] = {"network": name, "w8a8": round(plain - case.score(case.model)["accuracy %"], 2)}
    row |= {"targets": {}, "adaround": {}}
    for target in TARGETS:
        with_powers = load_target(target).scale_bits == 1
        found, better = percents(case, qsdk.w8a8().for_dialect(target), rounded=with_powers)
        row["targets"][target] = round(found - plain, 2)
        row["adaround"] |= {target: round(better - solved, 2)} if with_powers else {}
    return row


if __name__ == "__main__":
    one_thread()
    for chosen in sys.argv[1:] or NETWORKS:
        print(json.dumps(measured(chosen)), flush=True)
