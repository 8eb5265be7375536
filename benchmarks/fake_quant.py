"""One fake quantization of an activation, in units of one ReLU of the same tensor; and a spelling that was turned down.

One JSON line. `between_tensors` clamps between `lo - z` and `hi - z`: two passes fewer, but not vectorised on a CPU.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

from torch_bridge.quantizers.fake_quant import FakeQuantGrid, fake_quantize

ROUNDS = 40


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    x = torch.randn(64, 32, 28, 28)
    scale, zero_point = torch.tensor(0.02), torch.tensor(3.0)

    def between_tensors() -> torch.Tensor:
        levels = (x / scale).round_()
        return torch.clamp(levels, 0 - zero_point, 255 - zero_point, out=levels).mul_(scale)

    works = {
        "relu": lambda: torch.relu(x),
        "fake_quantize": lambda: fake_quantize(x, scale, zero_point, FakeQuantGrid(0, 255)),
        "between_tensors": between_tensors,
    }
    for work in works.values():
        work()
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(ROUNDS)]
    ratios = {n: round(statistics.median(row[n] / row["relu"] for row in rounds), 2) for n in works if n != "relu"}
    print(json.dumps({"benchmark": "fake quantization over one ReLU", **ratios}))


if __name__ == "__main__":
    main()
