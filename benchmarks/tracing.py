"""What `quantize` of small modules costs when torch's exporter looks up everything anew at every trace.

One JSON line: `slower` is the time of a quantize whose trace looks up everything anew, in times of one that does not
(median of pairs that take turns), by network.
"""

import json
import statistics
import time
import warnings
from contextlib import nullcontext

import torch
from torch import nn

import qsdk
from torch_bridge.tracing import trace

PAIRS = 7
NETWORKS = {
    "one layer": (nn.Linear(4, 4), torch.zeros(2, 4)),
    "a few convolutions": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()),
        torch.zeros(2, 3, 8, 8),
    ),
    "a transformer layer": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.zeros(2, 8, 32)),
}


def seconds(model: nn.Module, example: torch.Tensor) -> float:
    """The time of one quantize."""
    start = time.perf_counter()
    qsdk.quantize(model, example)
    return time.perf_counter() - start


def main() -> None:
    warnings.simplefilter("ignore")
    once, slower = trace.operators_read_once, {}
    for name, (model, example) in NETWORKS.items():
        seconds(model.eval(), example)
        ratios = []
        for _ in range(PAIRS):
            trace.operators_read_once = nullcontext
            anew = seconds(model, example)
            trace.operators_read_once = once
            ratios.append(anew / seconds(model, example))
        slower[name] = round(statistics.median(ratios), 2)
    print(json.dumps({"benchmark": "tracing", "slower": slower}), flush=True)


if __name__ == "__main__":
    main()
