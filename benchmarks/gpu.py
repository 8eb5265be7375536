"""Ratios of a GPU: a training step and an ONNX simulation over their float forms, and solvers over those of the CPU.

`python benchmarks/gpu.py [--small]` prints one JSON line. `qat_*`: a training step of the sim over that of the float
module, bfloat16, batch 64, eager and compiled. `onnx_forward`: the simulated forward over the float session, both on
CUDAExecutionProvider. `gptq_speedup` and `adaround_speedup`: seconds on the CPU over seconds on the GPU for a
transformer of 110 million parameters. `--small` runs tiny networks on whatever is there, to see that it runs: without a
GPU the solvers then run twice on the CPU, and the ratios mean nothing.
"""

import copy
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qsdk

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the networks and of their data, and how often each step is timed."""

    batch: int
    image: int
    width: int
    layers: int
    blocks: tuple[int, ...]
    tokens: int
    rounds: int


FULL = Sizes(64, 224, 768, 12, (3, 4, 6, 3), 128, 15)
SMALL = Sizes(2, 32, 16, 1, (1, 1), 8, 2)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    """A transformer of image patches."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, 16, 16)
        self.blocks = nn.Sequential(*(Block(sizes.width) for _ in range(sizes.layers)))
        self.head = nn.Linear(sizes.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.conv4, self.bn4 = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.bn4(self.conv4(x)))


def resnet(sizes: Sizes) -> nn.Module:
    """Return a network of the shape of ResNet-50."""
    inputs, first = sizes.width // 12 + 1, sizes.width // 12
    layers: list[nn.Module] = [nn.Conv2d(3, inputs, 7, 2, 3), nn.BatchNorm2d(inputs), nn.ReLU(), nn.MaxPool2d(2)]
    for stage, count in enumerate(sizes.blocks):
        for place in range(count):
            layers.append(Bottleneck(inputs, first * 2**stage, 2 if stage and not place else 1))
            inputs = 4 * first * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratio(run: Callable[[], object], base: Callable[[], object], device: str, rounds: int) -> float:
    """Return the median ratio of two runs, interleaved, after a warm-up of both."""
    for _ in range(2):
        run(), base()
    found = [seconds(run, device) / seconds(base, device) for _ in range(rounds)]
    return round(statistics.median(found), 3)


def stepper(model: Callable[[Tensor], Tensor], groups: Any, x: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    labels = torch.arange(len(x), device=x.device) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), labels).backward()
        optimizer.step()

    return step


def qat(model: nn.Module, sizes: Sizes, device: str, *, compiled: bool) -> float:
    """Return the time of a training step in steps of the float module, both in bfloat16."""
    model = copy.deepcopy(model).to(device, torch.bfloat16)
    x = torch.randn(sizes.batch, 3, sizes.image, sizes.image, device=device, dtype=torch.bfloat16)
    sim = qsdk.quantize(model.eval(), x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    plain = sim.unwrap().train()
    whole = torch.compile if compiled else lambda module: module
    base = stepper(whole(plain), plain.parameters(), x)
    with sim.training(learn_scales=True) as inside:
        return ratio(stepper(whole(inside), sim.parameter_groups(lr=1e-3), x), base, device, sizes.rounds)


def onnx_forward(model: nn.Module, sizes: Sizes, device: str) -> float:
    """Return the time of a simulated forward of an ONNX file in forwards of its float session."""
    x = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    written = io.BytesIO()
    torch.onnx.export(model.eval(), (x,), dynamo=True, verbose=False).save(written)
    file = onnx.load_from_string(written.getvalue())
    names = [CUDA, CPU] if device == "cuda" else [CPU]
    feeds = {file.graph.input[0].name: x.numpy()}
    sim = qsdk.quantize(file, feeds, qsdk.w8a8(), providers=names)
    qsdk.calibrate(sim, [feeds], progress=False)
    exact: list[Any] = [(CUDA, {"use_tf32": "0"}), CPU] if device == "cuda" else [CPU]
    session = ort.InferenceSession(written.getvalue(), providers=exact)
    return ratio(lambda: sim.run(feeds), lambda: session.run(None, feeds), device, sizes.rounds)


def solver_speedup(verb: Callable[..., object], sizes: Sizes, device: str) -> float:
    """Return the seconds that a solver takes on the CPU, with two threads, over those on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30_000 if sizes is FULL else 50, sizes.width))
    model.extend([Block(sizes.width) for _ in range(sizes.layers)])
    ids = [torch.from_numpy(np.arange(4 * sizes.tokens).reshape(4, -1) % 50)] * 4
    taken = {}
    for place in ("cpu", device):
        data = [batch.to(place) for batch in ids]
        sim = qsdk.quantize(copy.deepcopy(model).to(place).eval(), data[0], qsdk.w4a8())
        qsdk.calibrate(sim, data, progress=False)
        taken[place] = taken.get(place, 0.0) + seconds(
            lambda sim=sim, data=data: verb(sim, data, progress=False), place
        )
    return round(taken["cpu"] / taken[device], 2)


def main() -> None:
    small = "--small" in sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not small:
        print(json.dumps({"benchmark": "gpu", "skipped": "torch.cuda finds no device; --small tries it on the CPU"}))
        return
    torch.set_num_threads(2)
    torch.manual_seed(0)
    sizes = SMALL if small else FULL
    found: dict[str, Any] = {"benchmark": "gpu", "small": small, "device": device}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
    for name, model in (("vit", Vit(sizes)), ("resnet", resnet(sizes))):
        for compiled in (False,) if small else (False, True):
            kind = "compiled" if compiled else "eager"
            found[f"qat_{name}_{kind}"] = qat(model, sizes, device, compiled=compiled)
        torch.compiler.reset()
    if small or CUDA in ort.get_available_providers():
        found["onnx_forward"] = onnx_forward(
            resnet(sizes), sizes, device if CUDA in ort.get_available_providers() else "cpu"
        )
    for verb in (qsdk.gptq, qsdk.adaround):
        found[f"{verb.__name__}_speedup"] = solver_speedup(verb, sizes, device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
