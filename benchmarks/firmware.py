"""The C that `to_integer(firmware="network.h")` writes, beside ONNX Runtime's session of the same quantized file.

One JSON line per network: multiplications, the session's time on one thread in ms, and for each set of flags of the C
compiler (`cc`) the ratio of the program's time to it: both of processor time, the shortest of interleaved runs, of one
image. `same` says that the codes of the program are those of the integer-only file in ONNX Runtime, bit for bit.

With `--beside` a sim for LiteRT becomes a `.tflite` file, which TFLite Micro's interpreter for this machine runs
(`pip install tflite-micro`, plain C++ kernels), and a program: its time, its arena and the bytes of its file over those
of the program at `-O3` (`bytes` over the constants), whether its codes are those that qsdk predicts for LiteRT's
reference kernels, and the steps between its codes and the program's. `why not` is what it said instead.
"""

import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

import qsdk
from onnx_backend.litert.check import opened
from onnx_backend.litert.reference import run as predicted

ROUNDS = 200
FLAGS = {"-O3": ["-O3"], "-O3 -march=native": ["-O3", "-march=native"], "-Os": ["-Os"]}
SOURCE = """
#include "network.h"
void run(void) { qsdk_run(); }
void *input(void) { return qsdk_inputs[0].data; }
void *output(void) { return qsdk_outputs[0].data; }
"""


def block(a: int, b: int, stride: int, grow: int = 4) -> nn.Module:
    """An inverted residual, as in MobileNetV2."""
    return nn.Sequential(
        *(nn.Conv2d(a, a * grow, 1, bias=False), nn.BatchNorm2d(a * grow), nn.ReLU6()),
        *(nn.Conv2d(a * grow, a * grow, 3, stride, 1, groups=a * grow, bias=False), nn.BatchNorm2d(a * grow)),
        *(nn.ReLU6(), nn.Conv2d(a * grow, b, 1, bias=False), nn.BatchNorm2d(b)),
    )


class Mobile(nn.Module):
    """Inverted residuals on images of 96 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        steps = [(16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
        self.blocks = nn.ModuleList(block(*step) for step in steps)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Gives scores of ten classes."""
        x = self.stem(x)
        for part in self.blocks:
            made = part(x)
            x = x + made if made.shape == x.shape else made
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """Layers over 64 tokens and over 128 channels in turn, with GELU: a transformer without Softmax."""

    def __init__(self, tokens: int = 64, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.over_tokens, self.over_channels = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)) for _ in range(4)
            )
            for size in (tokens, width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Gives scores of ten classes."""
        x = self.patches(x).flatten(2)
        for tokens, channels in zip(self.over_tokens, self.over_channels, strict=True):
            x = x + tokens(x)
            x = x + channels(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "demo network": (qsdk.demo.network, (1, 1, 28, 28)),
    "inverted residuals": (Mobile, (1, 3, 96, 96)),
    "mixer": (Mixer, (1, 3, 32, 32)),
}


def products(model: nn.Module, image: Tensor) -> int:
    """Count the multiplications of the Conv and Linear layers for one image."""
    counted = 0

    def count(layer: Any, _: Any, made: Tensor) -> None:
        nonlocal counted
        counted += made.numel() * layer.weight[0].numel()

    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    handles = [part.register_forward_hook(count) for part in layers]
    model(image)
    for handle in handles:
        handle.remove()
    return counted


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def program(folder: Path, number: int, flags: list[str]) -> ctypes.CDLL:
    """Compile the header in a folder as a library, and open it."""
    made = folder / f"program{number}.so"
    command = ["cc", "-std=c99", *flags, "-shared", "-fPIC", "-I", folder, folder / "program.c", "-o", made]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(made))
    library.input.restype = library.output.restype = ctypes.c_void_p
    return library


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Return what a network's session and its programs take, and whether their codes are the same."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, batches = make().eval(), [torch.rand(8, *shape[1:]) for _ in range(4)]
    sim = qsdk.quantize(model, batches[0], "w8a8")
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, folder / "model.onnx")
    qsdk.to_integer(
        *(folder / "model.onnx", folder / "integer.onnx"),
        edges="integer",
        firmware=folder / "network.h",
        data=[batches[0]],
        progress=False,
    )
    (folder / "program.c").write_text(SOURCE)
    programs = {key: program(folder, i, flags) for i, (key, flags) in enumerate(FLAGS.items())}
    run, integer = session(folder / "model.onnx"), session(folder / "integer.onnx")
    codes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    (wanted,) = integer.run(None, {integer.get_inputs()[0].name: codes})
    same = True
    for library in programs.values():
        ctypes.memmove(library.input(), codes.tobytes(), codes.nbytes)
        library.run()
        same &= ctypes.string_at(library.output(), wanted.nbytes) == wanted.tobytes()
    feed = {run.get_inputs()[0].name: batches[0][:1].numpy()}
    runs = {"session": lambda: run.run(None, feed)} | {key: library.run for key, library in programs.items()}
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for key, act in runs.items():
            act()  # warm caches
            start = time.process_time()
            act()
            least[key] = min(least[key], time.process_time() - start)
    arena = next(line.split()[-1] for line in (folder / "network.h").read_text().splitlines() if "ARENA_BYTES" in line)
    return {
        "benchmark": "firmware",
        "network": name,
        "million_products": round(products(model, batches[0][:1]) / 1e6, 2),
        "arena_bytes": int(arena),
        "session_ms": round(1000 * least["session"], 4),
        **{key: round(least[key] / least["session"], 2) for key in FLAGS},
        "same": same,
    }


def said(act: Callable[[], object], place: Path) -> str:
    """Return what native code writes to the standard error while a function runs."""
    kept = os.dup(2)
    with place.open("w+") as held:
        os.dup2(held.fileno(), 2)
        try:
            act()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        held.seek(0)
        return held.read()


def beside(name: str, folder: Path) -> dict[str, Any]:
    """Return a network's `.tflite` file in TFLite Micro over the C program of the same sim."""
    micro_runtime = importlib.import_module("tflite_micro.python.tflite_micro").runtime
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, batches = make().eval(), [torch.rand(8, *shape[1:]) for _ in range(4)]
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8().for_dialect("litert"))
    qsdk.calibrate(sim, batches, progress=False)
    file = qsdk.export(sim, folder / "model.tflite", format="tflite", check=False).summary["bytes"]
    qsdk.export(sim, folder / "model.onnx", dialect="onnx")
    for kind in ("h", "npz"):
        wanted = {"edges": "integer", "firmware": folder / f"network.{kind}", "data": [batches[0]], "progress": False}
        qsdk.to_integer(folder / "model.onnx", folder / "integer.onnx", **wanted)
    (folder / "program.c").write_text(SOURCE)
    library, program_of = program(folder, 9, FLAGS["-O3"]), opened(folder / "model.tflite")
    arrays = np.load(folder / "network.npz")
    constants = sum(arrays[key].nbytes for key in arrays.files if key != "program.json")
    held: list[Any] = []

    def open_file() -> None:
        with contextlib.suppress(RuntimeError):
            held.append(micro_runtime.Interpreter.from_file(str(folder / "model.tflite")))

    refused = said(open_file, folder / "said")
    if not held:
        return {"benchmark": "firmware, TFLite Micro", "network": name, "why not": refused.strip().splitlines()[0]}
    (micro,), image = held, np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    there, least = image.transpose(0, 2, 3, 1).copy(), {"there": float("inf"), "here": float("inf")}
    for _ in range(ROUNDS):
        micro.set_input(there, 0)
        ctypes.memmove(library.input(), image.tobytes(), image.nbytes)
        for key, act in (("there", micro.invoke), ("here", library.run)):
            start = time.process_time()
            act()
            least[key] = min(least[key], time.process_time() - start)
    made = micro.get_output(0)
    ours = np.frombuffer(ctypes.string_at(library.output(), made.nbytes), np.int8).reshape(made.shape)
    arenas = re.search(r"Arena allocation total (\d+)", said(micro.print_allocations, folder / "said"))
    own = next(line.split()[-1] for line in (folder / "network.h").read_text().splitlines() if "ARENA_BYTES" in line)
    return {
        "benchmark": "firmware, TFLite Micro",
        "network": name,
        "time": round(least["there"] / least["here"], 2),
        "arena": None if arenas is None else round(int(arenas[1]) / int(own), 2),
        "bytes": round(file / constants, 2),
        "as predicted": bool(np.array_equal(made, predicted(program_of, [there])[program_of.outputs[0]])),
        "steps from the program": int(np.abs(made.astype(int) - ours).max()),
    }


def main() -> None:
    if shutil.which("cc") is None:
        sys.exit("no C compiler (cc) on the PATH")
    torch.set_num_threads(1)
    rows = []
    for name in [one for one in sys.argv[1:] if one != "--beside"] or NETWORKS:
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append(measured(name, Path(place)))
            print(json.dumps(rows[-1]), flush=True)
            if "--beside" in sys.argv:
                print(json.dumps(beside(name, Path(place))), flush=True)
    print(json.dumps({"benchmark": "firmware", "worst": {key: max(row[key] for row in rows) for key in FLAGS}}))


if __name__ == "__main__":
    main()
