"""Min-max calibration of the demo network, in units of plain float forward passes over the same images.

One JSON line; target: at most 1.05. `over_folded` is the same against the model with its BatchNorms folded.
"""

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

ROUNDS, IMAGES = 21, 2048
BATCHES = (256, 32)  # at 32 the wrappers' Python weighs more


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratios(model: nn.Module, images: torch.Tensor, size: int) -> dict[str, object]:
    batches = list(images.split(size))
    sim = qsdk.quantize(model, batches[0][:2], qsdk.w8a8())

    def plain() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    def folded() -> None:
        with torch.no_grad(), sim.float_phase() as folded_model:
            for batch in batches:
                folded_model(batch)

    def calibrate() -> None:
        qsdk.calibrate(sim, batches, progress=False)

    works = (plain, folded, calibrate)
    for work in works:
        work()
    rounds = []
    for number in range(ROUNDS):
        # each goes first in turn: what ran before leaves the allocator and the caches in different states
        order = [(number + i) % len(works) for i in range(len(works))]
        times = {index: seconds(works[index]) for index in order}
        rounds.append([times[index] for index in range(len(works))])
    over_float = [row[2] / row[0] for row in rounds]
    over_folded = [row[2] / row[1] for row in rounds]
    return {
        "over_float": round(statistics.median(over_float), 3),
        "over_folded": round(statistics.median(over_folded), 3),
        "spread": [round(min(over_float), 3), round(max(over_float), 3)],
    }


def main() -> None:
    model, data = load_pretrained(), load()
    images = torch.from_numpy(np.concatenate([data.calibration_images, data.test_images])[:IMAGES])
    found = {f"batch {size}": ratios(model, images, size) for size in BATCHES}
    title = f"min-max calibration, demo network, {IMAGES} images"
    print(json.dumps({"benchmark": title, **found, "target_over_float": 1.05}))


if __name__ == "__main__":
    main()
