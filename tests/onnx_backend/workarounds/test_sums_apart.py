"""What ONNX Runtime fuses, where that is fast: no sums into norms, but the functions that it has kernels for."""

import onnx
import pytest
import torch
from qdq_models import optimized
from torch import nn

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


class Rms(nn.Module):
    """A norm as large language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Written(nn.Module):
    """A GELU, by tanh or erf, as many models write it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        if self.kind == "tanh":
            return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))
        return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


@pytest.mark.parametrize("own", ["default", "onnxruntime"])
@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (nn.SiLU(), "QuickGelu"),
        (Written("tanh"), "FastGelu"),
        (Written("erf"), "Gelu"),
        (Rms(), "SimplifiedLayerNormalization"),
        (nn.RMSNorm(16), "SimplifiedLayerNormalization"),
    ],
    ids=["silu", "tanh", "erf", "rms", "nn.RMSNorm"],
)
def test_a_function_without_pairs_inside_is_one_kernel(function, kernel, own, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16)
    config = qsdk.w8a8() if own == "default" else qsdk.w8a8().for_dialect("onnxruntime")
    model = nn.Sequential(nn.Linear(16, 16), function, nn.Linear(16, 16)).eval()
    sim = qsdk.quantize(model, x, config)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    found = optimized(onnx.load(tmp_path / "model.onnx"), tmp_path)
    assert [op for op in found if op.endswith(kernel)]  # BiasGelu, where there is a bias
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert parity.summary["passed"]
    assert qsdk.validate(tmp_path / "model.onnx").summary == {"errors": 0, "warnings": 0}
    again = qsdk.quantize(tmp_path / "model.onnx")
    assert sorted(map(str, again.encodings.values())) == sorted(map(str, sim.encodings.values()))
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_what_reads_a_pair_beside_a_function_reads_the_pair(tmp_path):
    class Beside(nn.Module):
        """A SiLU and a product of one tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Gives a tensor of the size of x."""
            x = self.first(x)
            return self.last(x) + nn.functional.silu(x)

    torch.manual_seed(0)
    x = torch.randn(4, 16)
    sim = qsdk.quantize(Beside().eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    found = optimized(onnx.load(tmp_path / "model.onnx"), tmp_path)
    assert "QuickGelu" in found
    assert found.count("QGemm") == 2
    assert not {"MatMul", "Gemm"} & set(found)


class Squeezed(torch.nn.Module):
    """A convolution with a SiLU, and a gate by the mean of its result, as in an EfficientNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.last = (torch.nn.Conv2d(a, 8, 1) for a in (3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives eight channels."""
        y = torch.nn.functional.silu(self.conv(x))
        return self.last(y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))))


@pytest.mark.parametrize("dialect", ["onnxruntime", "onnx"])
def test_a_silu_is_one_kernel_and_a_mean_of_an_image_is_computed_on_codes(dialect, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 5)
    sim = qsdk.quantize(Squeezed().eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx", dialect=dialect)
    ran = set(optimized(onnx.load(tmp_path / "model.onnx"), tmp_path))
    fast = {"QuickGelu", "QLinearGlobalAveragePool"}
    assert ran & (fast | {"ReduceMean"}) == (fast if dialect == "onnxruntime" else {"ReduceMean"})
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert (parity.summary["passed"], parity.summary["weights_max_lsb"]) == (True, 0)
    again = qsdk.quantize(tmp_path / "model.onnx")
    qsdk.export(again, tmp_path / "again.onnx", dialect=dialect)
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
