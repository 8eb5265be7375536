"""`dtype=` of a softmax or mean: the input is cast before, in the file too, where torch's exporter casts the result."""

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
