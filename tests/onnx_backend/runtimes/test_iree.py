"""IREE beside the simulation, and with tract as further runtimes of portable integers: their wheels are fetched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fetch import fetch_runtimes
from torch import nn
from torch_models import calibrated, seeded

import qsdk

#: compares files of small networks in a process that has IREE
COMPARE = """
import json, sys
import torch
from torch import nn
import qsdk
folder = sys.argv[1]
torch.manual_seed(0)
networks = {
    "convolutions": (nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), torch.randn(4, 3, 16, 16)),
    "texts": (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Softmax(-1)),
              torch.randn(2, 6, 8)),
}
for name, (model, x) in networks.items():
    sim = qsdk.quantize(model.eval(), x, qsdk.w8a8().for_dialect("iree"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, f"{folder}/{name}.onnx", dialect="iree")
    report = qsdk.check_parity(sim, f"{folder}/{name}.onnx", [x, x[:1]], runtime="iree", progress=False)
    assert report.title == "Parity with IREE 3.13.0", report.title
    assert report.summary["passed"], report
    changed = qsdk.quantize(f"{folder}/{name}.onnx", None)
    assert qsdk.check_parity(changed, f"{folder}/{name}.onnx", [{"input": x.numpy()}], runtime="iree").summary["passed"]
    path, options = f"{folder}/integer.onnx", {"target": "portable", "edges": "integer"}
    found = qsdk.to_integer(f"{folder}/{name}.onnx", path, **options).summary
    assert found["same_integers_on"].endswith("iree 3.13.0, tract 0.22.4"), found
"""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="the pinned wheel is another's")
def test_iree_computes_what_the_sim_does_and_gives_the_integers_of_portable_files_as_tract_does(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(fetch_runtimes())}
    command = [sys.executable, "-c", COMPARE, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr


def test_a_runtime_that_is_not_installed_is_named_with_its_extra(tmp_path: Path):
    x = seeded(2, 4)
    sim = calibrated(nn.Linear(4, 4), x, qsdk.w8a8())
    qsdk.export(sim, tmp_path / "m.onnx", dialect="iree")
    with pytest.raises(qsdk.ConfigError, match=r"'iree' needs the package iree\.compiler.*pip install 'qsdk\[iree\]'"):
        qsdk.check_parity(sim, tmp_path / "m.onnx", [x], runtime="iree", progress=False)
