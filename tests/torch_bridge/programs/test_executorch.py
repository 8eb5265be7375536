"""A program of `export(format="pt2e")` in ExecuTorch: lowered to XNNPACK, saved, and run by its runtime."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fetch import EXECUTORCH, RUAMEL_YAML, TABULATE, TORCHAO, fetch
from torch import Tensor, nn
from torch_models import seeded

from qsdk import calibrate, export, quantize, w8a8

#: what a user does with a program, in a process that has ExecuTorch
LOWER = """
import sys
import numpy as np, torch, torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
source, given, found = sys.argv[1:]
edge = to_edge_transform_and_lower(torch.export.load(source), partitioner=[XnnpackPartitioner()])
left = [node for node in edge.exported_program().graph.nodes if "convolution" in str(node.target)]
assert not left, left
buffer = edge.to_executorch().buffer
program = Runtime.get().load_program(buffer)  # what it holds lives as long as it does
method = program.load_method("forward")
np.save(found, method.execute([torch.from_numpy(x) for x in np.load(given).values()])[0].numpy())
"""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


class Gated(nn.Module):
    """Two blocks of a language model: a norm that casts, a sum around it, parts of a split, lengths of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x * mask.reshape(x.shape[0], -1, 1)
        for _ in range(2):
            normed = x.to(torch.float32)
            normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
            gate, up = self.first(normed).chunk(2, dim=-1)
            x = x + self.second(gate.sigmoid() * up)
        return self.head(x)


#: module, example, inputs of another number of rows, and how many a program is to be planned for
NETWORKS: dict[str, Any] = {
    "convolutions": (Network, (seeded(4, 3, 12, 12),), (seeded(7, 3, 12, 12, seed=5),), None),
    "gated": (Gated, (seeded(4, 6, 8), torch.ones(4, 6)), (seeded(32, 6, 8, seed=5), torch.ones(32, 6)), 32),
}


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="the pinned wheel is another's")
@pytest.mark.parametrize("name", NETWORKS)
def test_executorch_runs_what_the_sim_simulates_for_another_number_of_rows(name: str, tmp_path: Path):
    folders = [str(fetch(package)) for package in (EXECUTORCH, TORCHAO, RUAMEL_YAML, TABULATE)]
    torch.manual_seed(0)
    make, example, other, most = NETWORKS[name]
    sim = quantize(make().eval(), example, w8a8().for_dialect("xnnpack"))
    calibrate(sim, [example], progress=False)
    export(sim, tmp_path / "m.pt2", format="pt2e", longest={"batch": most} if most else None)
    np.savez(tmp_path / "x.npz", *(x.numpy() for x in other))
    command = [sys.executable, "-c", LOWER, *(str(tmp_path / name) for name in ("m.pt2", "x.npz", "y.npy"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
    wanted = sim(*other).numpy()
    step = float(sim.encodings["head:output"].scale[0])
    assert np.abs(np.load(tmp_path / "y.npy") - wanted).max() <= step * 1.001
    assert np.abs(wanted).max() > 10 * step


#: compares a program that calls layers twice, on other grids, with its sim in a process that has ExecuTorch
COMPARE = """
import sys
import torch
from torch import nn
import qsdk

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(16, 8), nn.Conv1d(6, 4, 1)

    def forward(self, x, y):
        y = y.sigmoid() * 5 - 1
        return self.linear(x.relu()), self.linear(y), self.conv(x.relu()), self.conv(y), y.exp()

folder = sys.argv[1]
torch.manual_seed(0)
batches = [(torch.randn(4, 6, 16), torch.randn(4, 6, 16) * 4) for _ in range(2)]
config = qsdk.w8a8().for_dialect("xnnpack").override("exp.0", activation="float32")
sim = qsdk.quantize(Twice().eval(), batches[0], config)
qsdk.calibrate(sim, batches, progress=False)
qsdk.export(sim, folder + "/m.pt2", format="pt2e")
report = qsdk.check_parity(sim, folder + "/m.pt2", batches, runtime="executorch", progress=False)
assert report.title == "Parity with ExecuTorch 1.5.1", report.title
assert report.summary["passed"], report
assert report.summary["sqnr_db"] > 100, report.summary
sim.model.linear.weight.data *= 2  # then the file is of another sim
qsdk.calibrate(sim, batches, progress=False)
report = qsdk.check_parity(sim, folder + "/m.pt2", batches, runtime="executorch", progress=False)
assert not report.summary["passed"], report
assert report.summary["first_off"] == "linear:output", report.summary
"""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="the pinned wheel is another's")
def test_executorch_gives_the_codes_of_each_call_of_a_layer(tmp_path: Path):
    folders = [str(fetch(package)) for package in (EXECUTORCH, TORCHAO, RUAMEL_YAML, TABULATE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *sys.path])}
    command = [sys.executable, "-c", COMPARE, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
