"""Parity says where the 8-bit kernels of the default session overflow on this processor."""

from pathlib import Path

import pytest
import torch
from torch import nn

import qsdk
from onnx_backend.data_passes import overflow

X = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) * 4  # codes up to 255
REASON = "has no VNNI, and the 8-bit kernels of ONNX Runtime's default session overflow on it"


class Product(nn.Module):
    """A MatMul of uint8 activations and weights whose products add up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 4), 0.5))

    def forward(self, x):
        return x @ self.weight


def parity(tmp_path: Path, weight: str, runtime: str | None = None) -> dict:
    config = qsdk.w8a8().override("*", weight=weight)
    sim = qsdk.quantize(Product(), X, config)
    qsdk.calibrate(sim, [X], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    return qsdk.check_parity(sim, tmp_path / "m.onnx", [X], progress=False, runtime=runtime).summary


@pytest.mark.slow
def test_weights_of_8_bits_are_named_where_products_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overflow, "products_saturate", lambda: True)
    eight = parity(tmp_path, "int8")
    assert eight["passed"]
    assert REASON in eight["default_session"]
    assert eight["default_session"].endswith("runtime='onnxruntime' compares it")
    assert "default_session" not in parity(tmp_path, "int7")


@pytest.mark.slow
def test_a_linear_layer_that_the_runtime_keeps_float_does_not_overflow(tmp_path, monkeypatch):
    monkeypatch.setattr(overflow, "products_saturate", lambda: True)
    sim = qsdk.quantize(nn.Linear(16, 4), X, "w8a8")
    qsdk.calibrate(sim, [X], progress=False)
    for dialect, named in (("onnx", False), ("onnxruntime", True)):  # which has zero points, and the runtime QGemm
        qsdk.export(sim, tmp_path / "m.onnx", dialect=dialect)
        summary = qsdk.check_parity(sim, tmp_path / "m.onnx", [X], progress=False).summary
        assert ("default_session" in summary) is named


@pytest.mark.parametrize(
    "config",
    [
        qsdk.QuantConfig(dynamic_activations=True),
        qsdk.QuantConfig(dynamic_activations=True).for_dialect("onnxruntime", processor="vnni"),
        qsdk.w8a8().override("*", activation="int8", input="int8"),
    ],
    ids=["dynamic", "dynamic for VNNI", "int8 activations"],
)
def test_other_activations_of_8_bits_overflow_too(config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(overflow, "products_saturate", lambda: True)
    sim = qsdk.quantize(Product(), X, config)
    qsdk.calibrate(sim, [X], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert REASON in qsdk.check_parity(sim, tmp_path / "m.onnx", [X], progress=False).summary["default_session"]


def test_a_convolution_with_a_range_of_each_batch_computes_in_floats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(overflow, "products_saturate", lambda: True)
    layer, x = nn.Conv1d(4, 2, 3), torch.rand(2, 4, 8)
    torch.nn.init.constant_(layer.weight, 0.5)
    sim = qsdk.quantize(layer, x, qsdk.QuantConfig(dynamic_activations=True))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert "default_session" not in qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary


def test_nothing_is_said_where_products_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overflow, "products_saturate", lambda: False)
    assert "default_session" not in parity(tmp_path, "int8")


def test_a_session_that_is_off_has_the_reason(tmp_path: Path):
    found = parity(tmp_path, "int8", "onnxruntime")
    assert found["passed"] != (REASON in found.get("reason", ""))  # whichever processor this is
