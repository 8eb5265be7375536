"""Sims that were saved before a check existed still load."""

import zipfile

import pytest
import torch
from torch import nn

import qsdk


@pytest.mark.slow
def test_a_saved_rule_that_reaches_nothing_is_let_be(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)
    config = qsdk.w8a8().override("1", weight="int4", optional=True)
    qsdk.calibrate(sim := qsdk.quantize(model, x, config), [x], progress=False)
    qsdk.save(sim, tmp_path / "now.qsdk")
    with zipfile.ZipFile(tmp_path / "now.qsdk") as now, zipfile.ZipFile(tmp_path / "before.qsdk", "w") as before:
        for name in now.namelist():
            before.writestr(name, now.read(name).replace(b'"optional": true', b'"optional": false'))
    again = qsdk.load(tmp_path / "before.qsdk", model)
    assert torch.equal(again(x), sim(x))
    (rule,) = again.config.rules
    assert not rule.optional
    with pytest.raises(qsdk.ConfigError, match="reaches nothing"):
        qsdk.quantize(model, x, qsdk.w8a8().override("1", weight="int4"))
    # and what it is saved as again
    qsdk.save(again, tmp_path / "again.qsdk")
    assert torch.equal(qsdk.load(tmp_path / "again.qsdk", model)(x), sim(x))
