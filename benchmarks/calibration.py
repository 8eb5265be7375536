"""Calibration at the PyTorch door, in units of plain float forward passes over the same data.

One JSON line. Every round measures the processor time of all works in turn, on one thread of one process; ratios are
taken per round, and their median is given. The demo network sees 2,048 images (at a batch of 32 the wrappers' Python
weighs more; `over_folded` is against the model with its BatchNorms folded), MiniLM 64 film reviews of 64 tokens.
`weights` are the ranges of MiniLM's stored tensors alone, which cost the same whatever the data.
`python benchmarks/calibration.py demo` measures one network.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ptq_measure import one_thread, seconds
from torch import nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text

ROUNDS = 5
METHODS = ("min_max", "moving_average", "percentile", "mse", "tf_enhanced", "entropy")
WEIGHT_METHODS = ("min_max", "percentile", "mse", "tf_enhanced")
TARGETS = {"demo min_max": 1.05, "demo histograms": 1.5, "mini_lm histograms": 2.0}

Work = Callable[[], object]
Ratios = dict[str, float]


def medians(works: dict[str, Work], unit: str) -> Ratios:
    """How long each work takes, in units of the one of that name."""
    names, rounds = list(works), []
    for number in range(ROUNDS + 1):
        # each goes first in turn: what ran before leaves the allocator and the caches in different states
        order = [names[(number + i) % len(names)] for i in range(len(names))]
        times = {name: seconds(works[name]) for name in order}
        rounds.append({name: times[name] / times[unit] for name in names if name != unit})
    return {name: round(statistics.median(row[name] for row in rounds[1:]), 3) for name in rounds[0]}


def works_of(model: nn.Module, batches: list[Any], methods: tuple[str, ...]) -> dict[str, Work]:
    """Float passes over the model and over the sim's folded one, and a calibration by each method."""
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8())

    def passes(network: nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                network(**batch) if isinstance(batch, dict) else network(batch)

    def folded() -> None:
        with sim.float_phase() as network:
            passes(network)

    def calibrate(method: str) -> Work:
        return lambda: qsdk.calibrate(sim, batches, method=method, progress=False)

    return {"float": lambda: passes(model), "folded": folded, **{method: calibrate(method) for method in methods}}


def demo() -> dict[str, Any]:
    model, data = load_pretrained(), load()
    images = torch.from_numpy(np.concatenate([data.calibration_images, data.test_images])[:2048])
    whole = works_of(model, list(images.split(256)), METHODS)
    small = works_of(model, list(images.split(32)), ("min_max",))
    unit = "folded"
    return {
        "batch 256": medians({name: work for name, work in whole.items() if name != unit}, "float"),
        "batch 32": medians({name: work for name, work in small.items() if name != unit}, "float"),
        "over_folded": medians({unit: whole[unit], "min_max": whole["min_max"]}, unit),
    }


def mini_lm() -> dict[str, Any]:
    model = zoo_text.mini_lm()
    batches = zoo_text.sentences(zoo_text.reviews(64)[0], length=64, size=16)
    works = {name: work for name, work in works_of(model, batches, METHODS).items() if name != "folded"}
    return {"batch 16": medians(works, "float"), "weights": weights(model, batches[0], works["float"])}


def weights(model: nn.Module, batch: Any, plain: Work) -> dict[str, Ratios]:
    """Ranges of the weights alone, at 8 bits per channel and at 4 bits in blocks of 64."""
    found = {}
    configs = {"int8 channels": qsdk.w8a8(), "int4 blocks of 64": qsdk.w4a8(block_size=64)}
    for name, config in configs.items():
        sim = qsdk.quantize(model, batch, config.override("*", activation="float32", bias="float32"))

        def calibrate(method: str, sim: Any = sim) -> Work:
            return lambda: qsdk.calibrate(sim, [batch], weight_method=method, progress=False)

        found[name] = medians({"float": plain, **{method: calibrate(method) for method in WEIGHT_METHODS}}, "float")
    return found


def main() -> None:
    one_thread()
    found = {}
    for make in (demo, mini_lm):
        if not sys.argv[1:] or make.__name__ in sys.argv[1:]:
            try:
                found[make.__name__] = make()
            except pytest.skip.Exception as reason:  # its package cannot be fetched
                print(f"{make.__name__}: {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "calibration over float passes", **found, "targets": TARGETS}))


if __name__ == "__main__":
    main()
