"""A sum of floats and the LayerNormalization that reads it stay two kernels in ONNX Runtime."""

import onnx
import pytest
import torch
from qdq_models import optimized

import qsdk


class Residual(torch.nn.Module):
    """A post-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        return self.norm(x + self.linear(x))


@pytest.mark.parametrize("dialect", ["onnxruntime", "onnx"])
def test_the_runtime_makes_no_skip_layer_normalization_of_them(dialect, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16)
    sim = qsdk.quantize(Residual().eval(), x, qsdk.w8a8().for_dialect("onnxruntime"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx", dialect=dialect)
    model = onnx.load(tmp_path / "model.onnx")
    assert ("SkipLayerNormalization" in optimized(model, tmp_path)) == (dialect == "onnx")
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert parity.summary["passed"]
    assert qsdk.validate(tmp_path / "model.onnx").summary == {"errors": 0, "warnings": 0}
    again = qsdk.quantize(tmp_path / "model.onnx")
    qsdk.export(again, tmp_path / "again.onnx", dialect=dialect)
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
