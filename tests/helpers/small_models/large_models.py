"""Models with large weights, and what a process needed at most."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

MIB = 2**20
ROWS = 1000


def weights(width: int, layers: int = 2) -> dict[str, np.ndarray]:
    """Square weights `w0`, `w1`, ... whose products keep the size of what they are given."""
    rng = np.random.default_rng(width)
    return {f"w{i}": rng.normal(0, width**-0.5, (width, width)).astype(np.float32) for i in range(layers)}


def stack(width: int, names: list[str]) -> ModelProto:
    """MatMuls with Relus between them, without weights."""
    nodes, read = [], "x"
    for index, name in enumerate(names):
        made = "y" if name == names[-1] else f"m{index}"
        nodes.append(helper.make_node("MatMul", [read, name], [made], f"mm{index}"))
        if made != "y":
            nodes.append(helper.make_node("Relu", [made], [f"r{index}"], f"relu{index}"))
            read = f"r{index}"
    edges = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "stack", [next(edges)], [next(edges)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def inline_stack(width: int, layers: int = 2) -> ModelProto:
    """The stack with its weights in it."""
    found = weights(width, layers)
    model = stack(width, list(found))
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in found.items())
    return model


def external_stack(path: Path, width: int, layers: int = 2) -> Path:
    """Write the stack to `path`, its weights beside it in `float.bin`, a few rows at a time."""
    rng = np.random.default_rng(width)
    model = stack(width, [f"w{i}" for i in range(layers)])
    size = 4 * width * width
    with (path.parent / "float.bin").open("wb") as file:
        for index in range(layers):
            for first in range(0, width, ROWS):
                rows = rng.normal(0, width**-0.5, (min(ROWS, width - first), width))
                file.write(rows.astype(np.float32).tobytes())
            tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[width, width])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": "float.bin", "offset": index * size, "length": size}.items():
                tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
    return path


def batches(width: int, count: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(2, width)).astype(np.float32) for _ in range(count)]


def run_apart(code: str, *arguments: str) -> list[float]:
    """Run Python code in a process of its own; gives the numbers that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return [float(word) for word in done.stdout.split()]


#: prints the bytes by which the largest resident size grows while `sim` is exported to argv[1]
EXPORT_PEAK = """
import sys
import qsdk

def resident(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))

with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the largest resident size starts anew
before = resident("VmRSS")
qsdk.export(sim, sys.argv[1], check=False)  # the check runs the sim and the file, in sessions of their own
print(resident("VmHWM") - before)
"""
MODULE = """
import torch
from torch import nn
import qsdk

torch.set_num_threads(1)
width = {width}
layers = [nn.Linear(width, width, bias=False) for _ in range({layers})]
model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).eval()
x = torch.randn(2, width)
warm = qsdk.quantize(nn.Linear(8, 8), torch.randn(2, 8), qsdk.w8a8())
qsdk.calibrate(warm, [torch.randn(2, 8)], progress=False)
import tempfile
with tempfile.TemporaryDirectory() as folder:
    qsdk.export(warm, folder + "/warm.onnx")  # what every export loads is not counted
sim = qsdk.quantize(model, x, qsdk.w8a8(), in_place=True)
qsdk.calibrate(sim, [x], progress=False)
"""
FILE = """
import sys
import numpy as np
import qsdk

sim = qsdk.quantize(sys.argv[2], None, qsdk.w8a8())
qsdk.calibrate(sim, [np.ones((2, {width}), np.float32)], progress=False)
"""


def export_peak(kind: str, folder: Path, width: int, layers: int) -> float:
    """The growth of the largest resident size during export, as a share of the float weights.

    Args:
        kind: `module`, `external` or `inline`.
        folder: to write to.
        width: of each square layer.
        layers: how many.
    """
    made = []
    if kind != "module":
        path = external_stack(folder / "float.onnx", width, layers)
        made = [str(path)]
    code = (MODULE if kind == "module" else FILE).format(width=width, layers=layers)
    if kind == "inline":
        code = code.replace("qsdk.quantize(sys.argv[2]", "qsdk.quantize(__import__('onnx').load(sys.argv[2])")
    return run_apart(code + EXPORT_PEAK, str(folder / "out.onnx"), *made)[0] / (4 * width * width * layers)


def leftovers(folder: Path) -> Iterator[str]:
    yield from (path.name for path in folder.iterdir() if path.name.endswith(".tmp"))
