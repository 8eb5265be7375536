"""The benchmark of GPUs runs, in small, where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def printed(*options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.mark.slow  # it traces six sims
def test_the_benchmark_runs_in_small():
    found = printed("--small")
    for name in ("qat_vit_eager", "qat_resnet_eager", "onnx_forward", "gptq_speedup", "adaround_speedup"):
        assert found[name] > 0
