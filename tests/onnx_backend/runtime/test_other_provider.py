"""Sims of ONNX files on an execution provider that is not the CPU's: OpenVINO's, in its own build of ONNX Runtime."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fetch import OPENVINO_PROVIDER, fetch

SCRIPT = Path(__file__).parents[2] / "helpers" / "runtimes" / "on_other_provider.py"
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the pinned build of ONNX Runtime is for Python 3.11")
@pytest.mark.parametrize("network", ["cnn", "transformer"])
def test_calibration_verbs_and_parity_run_on_another_provider(network: str, tmp_path: Path):
    path = os.pathsep.join([str(fetch(OPENVINO_PROVIDER)), str(ROOT), *sys.path])
    command = [sys.executable, str(SCRIPT), "OpenVINOExecutionProvider", str(tmp_path), network]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["nodes"]
    assert found["fell_back"] == 0
    assert found["scales"] < 2**-20  # what one ulp of a scale is at most, times four
    assert found["weights_max_lsb"] == 0
    assert found["activations_max_lsb"] <= 1
    assert found["passed"]
    assert found["noise"] < 1e-4  # single codes that fall to the other side, of 256
