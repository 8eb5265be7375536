"""What a module in half precision costs: memory of weight-only int4, and time of calibration.

`python benchmarks/half_precision.py [layers]`: one JSON line. `memory` is for `quantize(in_place=True)` and `calibrate`
of square bfloat16 layers (24 of width 2048 where none are given) with int4 weights in blocks of 32: `weights` and
`layer` (one of them in float32) in MiB, `peak` of the process beyond what it had before the layers, and `ratio` of the
peak less that one layer to the weights. `calibration` is W8A8 of an encoder: processor seconds in float passes of the
same module, per dtype.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsdk

WIDTH = 2048
MIB = 2**20


def resident(field: str) -> float:
    """MiB that this process has (`VmRSS`), or had at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def weight_only(model: nn.Module, x: torch.Tensor) -> None:
    sim = qsdk.quantize(model, x, qsdk.weight_only("int4", block_size=32), in_place=True)
    qsdk.calibrate(sim, [x], progress=False)


def memory(layers: int) -> dict[str, float]:
    """The peak while a stack of layers is quantized and calibrated."""
    weight_only(nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(2, 64).bfloat16())  # loads what both need
    before = resident("VmRSS")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    weight_only(model, torch.randn(2, WIDTH).bfloat16())
    weights, layer, peak = layers * WIDTH**2 * 2 / MIB, WIDTH**2 * 4 / MIB, resident("VmHWM") - before
    return {"weights": weights, "layer": layer, "peak": peak, "ratio": (peak - layer) / weights}


def calibration(dtype: torch.dtype) -> float:
    """Seconds of calibration in seconds of a float pass over the same batches, of one dtype; the best of some."""
    torch.manual_seed(0)
    part = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(part, 4, enable_nested_tensor=False).to(dtype).eval()
    batches = [torch.randn(8, 64, 256).to(dtype) for _ in range(4)]
    sim = qsdk.quantize(model, batches[0])

    @torch.no_grad()
    def float_pass() -> None:
        for batch in batches:
            model(batch)

    return best(lambda: qsdk.calibrate(sim, batches, progress=False)) / best(float_pass)


def best(call: Callable[[], Any], times: int = 5) -> float:
    call()
    seconds = []
    for _ in range(times):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    found: dict[str, Any] = {"memory": memory(int(sys.argv[1]) if len(sys.argv) > 1 else 24)}
    if len(sys.argv) < 2:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        found["calibration"] = {str(dtype).removeprefix("torch."): calibration(dtype) for dtype in dtypes}
    print(json.dumps(found))
