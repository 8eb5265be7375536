"""The float type that an op computes in: that of `dtype=`; in half precision float32, and one rounding behind it."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsdk

FORMS = {
    "F.softmax": lambda x, dtype: F.softmax(x, -1, dtype=dtype),
    "F.softmax by position": lambda x, dtype: F.softmax(x, -1, 3, dtype),
    "torch.softmax": lambda x, dtype: torch.softmax(x, -1, dtype),
    "Tensor.softmax": lambda x, dtype: x.softmax(-1, dtype=dtype),
    "F.log_softmax": lambda x, dtype: F.log_softmax(x, dim=-1, dtype=dtype),
    "torch.log_softmax": lambda x, dtype: torch.log_softmax(x, -1, dtype=dtype),
    "Tensor.mean": lambda x, dtype: x.mean(-1, keepdim=True, dtype=dtype),
    "torch.mean": lambda x, dtype: torch.mean(x, dim=-1, keepdim=True, dtype=dtype),
    "mean of all": lambda x, dtype: x.mean(dtype=dtype),
}


class Wide(nn.Module):
    def __init__(self, form, dtype):
        super().__init__()
        self.form, self.dtype = form, dtype

    def forward(self, x):
        return self.form(x * 2, self.dtype)


@pytest.mark.spread(2)
@pytest.mark.parametrize("form", FORMS)
def test_the_op_computes_in_the_dtype_that_it_is_asked_for(form, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 16).bfloat16()
    sim = qsdk.quantize(Wide(FORMS[form], torch.float32).eval(), x, qsdk.w8a16())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    report = qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False)
    assert report.summary["passed"], str(report)
    reopened = qsdk.quantize(tmp_path / "m.onnx", None)
    with torch.no_grad():
        expected = sim(x).numpy()
    assert np.abs(reopened.run(x.float().numpy())[0] - expected).max() <= 2e-4


def test_without_a_dtype_nothing_is_cast(tmp_path):
    x = torch.randn(3, 16)
    sim = qsdk.quantize(Wide(lambda x, dtype: F.softmax(x, -1) + x.mean(-1, keepdim=True), None).eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert not any(node.op_type == "Cast" for node in onnx.load(tmp_path / "m.onnx").graph.node)


#: ops that torch rounds inside in half precision (on processors at least), and numbers that the file holds in it
ROUNDED_INSIDE = {
    "x ** 3": lambda x: x**3,
    "x ** -2": lambda x: (x.abs() + 0.5) ** -2,
    "3 / x": lambda x: 3 / (x.abs() + 0.5),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize, p=1": lambda x: F.normalize(x, p=1.0, dim=1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(-1)),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "softmax along the middle": lambda x: x.softmax(1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "prod": lambda x: torch.prod(x, -1),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "grid_sample": lambda x: F.grid_sample(x.unsqueeze(1), x[:, :4, :4].tanh().view(-1, 4, 2, 2), align_corners=False),
    "instance_norm": F.instance_norm,
    "lerp": lambda x: torch.lerp(x, x.flip(-1), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT, alpha=0.3),
}
MODULES = [
    lambda: nn.LogSoftmax(-1),
    lambda: nn.Softmax(1),
    lambda: nn.Softmin(1),
    nn.Softsign,
    nn.Tanhshrink,
    lambda: nn.InstanceNorm1d(6, affine=True),
    lambda: nn.ConvTranspose1d(6, 4, 3, stride=2),
]


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(make() for make in MODULES)

    def forward(self, x):
        return (*(form(x) for form in ROUNDED_INSIDE.values()), *(layer(x) for layer in self.layers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16 islands"], ids=str)
def test_an_op_of_half_precision_is_rounded_once_in_the_sim_as_in_the_file(dtype, tmp_path):
    torch.manual_seed(0)
    net, x = Several().eval(), torch.randn(32, 6, 8)
    config = qsdk.QuantConfig(weight="float32", activation="float32")
    if isinstance(dtype, str):
        config = config.skip("*", dtype="bfloat16")
    else:
        net, x = net.to(dtype), x.to(dtype)
    sim = qsdk.quantize(net, x, config, in_place=False)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    floats = qsdk.QuantConfig(weight="float32", activation="float32")
    file = qsdk.quantize(tmp_path / "m.onnx", None, None if isinstance(dtype, str) else floats)
    names = [*ROUNDED_INSIDE, *(type(make()).__name__ for make in MODULES)]
    found = zip(names, file.run(x.float().numpy()), sim.run(x), strict=True)
    off = {name: float((np.asarray(got, np.float32) != own.float().numpy()).mean()) for name, got, own in found}
    assert {name: share for name, share in off.items() if share > 0.015} == {}


class OfPositions(nn.Module):
    """Angles of integer positions, by an einsum of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(8))

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        return self.fc(x) * torch.einsum("i,j->ij", positions, self.frequencies).sin()


def test_an_einsum_of_integers_and_floats_computes_in_floats(tmp_path):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    sim = qsdk.quantize(OfPositions().eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]
