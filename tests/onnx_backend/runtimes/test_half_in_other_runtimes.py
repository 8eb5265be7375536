"""Modules in bfloat16 and float16 in the dialects of other runtimes: valid files, and the simulated codes there."""

import onnx
import pytest
import torch
from torch import nn

import qsdk

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
PACKAGES = {"openvino": "openvino", "qnn": "onnxruntime_qnn"}
HALF = [torch.bfloat16, torch.float16]


def sim_of(dtype: torch.dtype, dialect: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype).eval()
    sim = qsdk.quantize(model, X.to(dtype), qsdk.w8a8().override("*", weight="int7").for_dialect(dialect))
    qsdk.calibrate(sim, [X.to(dtype)], progress=False)
    return sim


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dialect", PACKAGES)
def test_the_runtime_computes_the_simulated_codes(tmp_path, dialect, dtype):
    pytest.importorskip(PACKAGES[dialect], reason=f"{dialect} has no wheel for this system")
    sim = sim_of(dtype, dialect)
    qsdk.export(sim, tmp_path / "m.onnx", dialect=dialect)
    report = qsdk.check_parity(sim, tmp_path / "m.onnx", [X.to(dtype)], runtime=dialect, progress=False)
    assert report.summary["passed"], report
    assert report.summary["activations_max_lsb"] <= 1
    assert report.summary["sqnr_db"] > 35


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["onnx", "tensorrt"])
@pytest.mark.parametrize("dtype", HALF)
def test_other_dialects_write_a_valid_file(tmp_path, dialect, dtype):
    sim = sim_of(dtype, dialect)
    qsdk.export(sim, tmp_path / "m.onnx", dialect=dialect)
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"), full_check=True)
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [X.to(dtype)], progress=False).summary["passed"]
