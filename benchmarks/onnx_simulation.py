"""Simulation and calibration at the ONNX door, in units of plain float passes of ONNX Runtime over the same data.

One JSON line. Every round times all works in turn, in one process with the runtime's own number of threads. A ratio is
that of the shortest times of all rounds: where other machines share the memory, what moves values takes twice as long
for seconds at a time. Calibration is the whole call, on a session that an earlier one has opened; `simulate` runs a
session that has run some passes before, and is in the layout of convolutions by then. `first_session` is the very first
calibration, on one batch, which opens its session; `first_simulation` the first simulated batch.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

import qsdk
from qsdk.demo.model import load_pretrained

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
from detectors import images
from fetch import NUDENET, fetch
from zoo import MobileNetV2  # with random weights: speed does not depend on them

ROUNDS, WARM = 10, 2
HISTOGRAMS = ("percentile", "mse", "tf_enhanced", "entropy")
TARGETS = {"simulate": 2.0, "min_max": 1.5, **dict.fromkeys(HISTOGRAMS, 2.5)}


class Block(nn.Module):
    """A pre-norm transformer block as exporters see it: projections, two matrix products, softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives [N, T, width]."""
        n, t, width = x.shape
        y = self.norm1(x)
        split = (layer(y).reshape(n, t, self.heads, width // self.heads) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in split)
        weights = torch.softmax(q @ k.transpose(2, 3) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens int64 [N, T] to [N, T, 64]."""

    def __init__(self, width: int = 256, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Gives logits."""
        return self.head(self.norm(self.blocks(self.embed(tokens))))


@dataclass(frozen=True)
class Given:
    """A float ONNX file and batches for its one input."""

    path: str
    batches: list[np.ndarray]


def demo(folder: Path) -> Given:
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(64, 1, 28, 28)).astype(np.float32) for _ in range(32)]
    return Given(exported(load_pretrained(), batches[0], folder), batches)


def mobilenet_v2(folder: Path) -> Given:
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(8, 3, 224, 224)).astype(np.float32) for _ in range(16)]
    return Given(exported(MobileNetV2(), batches[0], folder), batches)


def transformer(folder: Path) -> Given:
    batches = [np.random.default_rng(0).integers(0, 1000, (16, 64)) for _ in range(16)]
    return Given(exported(Transformer(), batches[0], folder), batches)


def yolov8n(folder: Path) -> Given:
    return Given(str(fetch(NUDENET) / "nudenet" / "320n.onnx"), images(320)[:8])


NETWORKS = {make.__name__: make for make in (demo, mobilenet_v2, transformer, yolov8n)}


def exported(model: nn.Module, batch: np.ndarray, folder: Path) -> str:
    path = str(folder / "float.onnx")
    axes = ({0: torch.export.Dim("n", min=1, max=4096)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (torch.from_numpy(batch[:2]),)
        torch.onnx.export(model.eval(), given, path, dynamo=True, opset_version=21, dynamic_shapes=axes, verbose=False)
    return path


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(path: str, batches: list[np.ndarray]) -> dict[str, object]:
    sim = qsdk.quantize(path, None, qsdk.w8a8())
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    first = {"first_session": seconds(lambda: qsdk.calibrate(sim, batches[:1], progress=False))}
    first["first_simulation"] = seconds(lambda: sim.run(batches[0]))

    def calibrate(method: str) -> Callable[[], object]:
        return lambda: qsdk.calibrate(sim, batches, method=method, progress=False)

    works: dict[str, Callable[[], object]] = {
        "float": lambda: [session.run(None, {name: batch}) for batch in batches],
        "simulate": lambda: [sim.run(batch) for batch in batches],
        **{method: calibrate(method) for method in ("min_max", *HISTOGRAMS)},
    }
    found: dict[str, list[float]] = {work: [] for work in works}
    for number in range(ROUNDS + 1):
        order = list(works)[number % len(works) :] + list(works)[: number % len(works)]
        times = {}
        for work in order:
            if work == "simulate":  # calibration has dropped its session
                for _ in range(WARM):
                    works[work]()
            times[work] = seconds(works[work])
        if number:  # the first round fills caches
            for work in works:
                found[work].append(times[work])
    least = {work: min(values) for work, values in found.items()}
    ratios = {work: round(least[work] / least["float"], 2) for work in works if work != "float"}
    return {**ratios, **{name: round(value / least["float"], 2) for name, value in first.items()}}


def main(*chosen: str) -> None:
    result = {}
    for name in chosen or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            given = NETWORKS[name](Path(folder))
            result[name] = measured(given.path, given.batches)
    print(json.dumps({"benchmark": "ONNX simulation over float passes", **result, "targets": TARGETS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
