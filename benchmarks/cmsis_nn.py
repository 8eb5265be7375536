"""Convolutions in CMSIS-NN's plain C beside the C that `to_integer(firmware=)` writes, both at `-O3` on this machine.

`python benchmarks/cmsis_nn.py CHECKOUT`, a folder with the sources of github.com/ARM-software/CMSIS-NN, which `cc`
compiles here as they are without Arm's instructions: what they gain on a Cortex-M is not measured. One JSON line per
layer, of int8 weights per channel: `time` of theirs over ours (the shortest processor time of runs in turn), `as
predicted` says that their codes are those that qsdk predicts for LiteRT's reference kernels, and `steps` how far the
codes of the program, which rounds once, are from theirs.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import c_int32
from pathlib import Path
from typing import Any

import numpy as np
import torch
from firmware import FLAGS, SOURCE, program
from torch import nn

import qsdk
from onnx_backend.litert import fixed_math
from onnx_backend.litert.check import opened
from onnx_backend.litert.program import Program
from onnx_backend.litert.reference import run

ROUNDS = 200
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3 x 3, 16 to 32 channels": (lambda: nn.Conv2d(16, 32, 3, 1, 1), (1, 16, 28, 28)),
    "1 x 1, 64 to 64 channels": (lambda: nn.Conv2d(64, 64, 1), (1, 64, 14, 14)),
    "depthwise, 64 channels": (lambda: nn.Conv2d(64, 64, 3, 1, 1, groups=64), (1, 64, 14, 14)),
}


def compiled(checkout: Path, folder: Path) -> ctypes.CDLL:
    """Compile the integer kernels of a checkout as a library, and open it."""
    sources = [path for path in sorted((checkout / "Source").rglob("*.c")) if path.stem[-3:] not in ("f16", "f32")]
    made = folder / "cmsis_nn.so"
    command = ["cc", "-std=c99", *FLAGS["-O3"], "-w", "-shared", "-fPIC", "-I", checkout / "Include", *sources]
    subprocess.run([*command, "-o", made], check=True)
    return ctypes.CDLL(str(made))


def numbers(*values: int) -> ctypes.Array[c_int32]:
    """Return a struct of int32 fields, as all of CMSIS-NN's parameters are."""
    return (c_int32 * len(values))(*map(int, values))


class Layer:
    """The one layer of a program as a call of CMSIS-NN."""

    def __init__(self, library: ctypes.CDLL, written: Program) -> None:
        (op,) = written.ops
        x, weight, bias = (written.tensors[number] for number in op.inputs)
        y = written.tensors[op.outputs[0]]
        assert x.grid is not None and y.grid is not None and weight.grid is not None and weight.value is not None  # noqa: PT018
        assert bias.value is not None
        deep = op.type == "DEPTHWISE_CONV_2D"
        scales = (
            x.grid.scale.astype(np.float64) * weight.grid.scale.astype(np.float64) / y.grid.scale.astype(np.float64)
        )
        self._held = [np.ascontiguousarray(part, np.int32) for part in fixed_math.multiplier(scales)]
        pointer = ctypes.POINTER(c_int32)
        quantities = (pointer * 2)(*(part.ctypes.data_as(pointer) for part in self._held))
        pad = (weight.shape[1] - 1) // 2
        edges = [op.options["strideW"], op.options["strideH"], pad, pad, 1, 1, -128, 127]
        facts = numbers(-x.grid.zero, y.grid.zero, *([op.options["depthMultiplier"]] if deep else []), *edges)
        self.given, self.made = np.zeros(x.shape, np.int8), np.zeros(y.shape, np.int8)
        self._weight, self._bias = weight.value.copy(), bias.value.copy()
        sizes = [numbers(*part.shape) for part in (x, weight, y)]
        name = "arm_depthwise_conv_wrapper_s8" if deep else "arm_convolve_wrapper_s8"
        room = getattr(library, f"{name}_get_buffer_size")(facts, *sizes)
        self._room = ctypes.create_string_buffer(max(room, 1))
        context = (ctypes.c_void_p * 2)(ctypes.addressof(self._room), room)
        pointers = [
            array.ctypes.data_as(ctypes.c_void_p) for array in (self.given, self._weight, self._bias, self.made)
        ]
        call = getattr(library, name)
        counts = numbers(1, 1, 1, y.shape[-1])
        arguments = (context, facts, quantities, sizes[0], pointers[0], sizes[1], pointers[1], counts, pointers[2])
        self.run = lambda: call(*arguments, sizes[2], pointers[3])


def measured(name: str, library: ctypes.CDLL, folder: Path) -> dict[str, Any]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model, batch = make().eval(), torch.randn(8, *shape[1:])
    sim = qsdk.quantize(model, batch, qsdk.w8a8().for_dialect("litert"))
    qsdk.calibrate(sim, [batch], progress=False)
    qsdk.export(sim, folder / "model.tflite", format="tflite", check=False)
    qsdk.export(sim, folder / "model.onnx", dialect="onnx")
    edges: dict[str, Any] = {"edges": "integer", "data": [batch], "progress": False}
    qsdk.to_integer(folder / "model.onnx", folder / "integer.onnx", firmware=folder / "network.h", **edges)
    (folder / "program.c").write_text(SOURCE)
    ours, written = program(folder, [*LAYERS].index(name), FLAGS["-O3"]), opened(folder / "model.tflite")
    layer, image = Layer(library, written), np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    layer.given[:] = image.transpose(0, 2, 3, 1)
    least = {"theirs": float("inf"), "ours": float("inf")}
    for _ in range(ROUNDS):
        ctypes.memmove(ours.input(), image.tobytes(), image.nbytes)
        for key, act in (("theirs", layer.run), ("ours", ours.run)):
            start = time.process_time()
            act()
            least[key] = min(least[key], time.process_time() - start)
    wanted = run(written, [layer.given])[written.outputs[0]]
    made = np.frombuffer(ctypes.string_at(ours.output(), wanted.size), np.int8)
    n, height, width, channels = wanted.shape
    steps = np.abs(made.reshape(n, channels, height, width).transpose(0, 2, 3, 1).astype(int) - layer.made).max()
    return {
        "benchmark": "firmware, CMSIS-NN",
        "layer": name,
        "time": round(least["theirs"] / least["ours"], 2),
        "as predicted": bool(np.array_equal(layer.made, wanted)),
        "steps": int(steps),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        kernels = compiled(Path(sys.argv[1]), Path(place))
        for chosen in LAYERS:
            print(json.dumps(measured(chosen, kernels, Path(place))), flush=True)
