"""Weights of a module by name: views where they are stored, arranged where an op wants them so."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qsdk
from qsdk.verbs.doors.choose import door_of


class Attending(nn.Module):
    """A packed projection, whose thirds are read apart, and a mask that is larger than what travels in the graph."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.full((80, 80), -torch.inf), 1))

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


class Recurrent(nn.Module):
    """Gates that ONNX wants in another order."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(64, 64, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Tied(nn.Module):
    """One weight for an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 64)
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


CASES = {
    "attention": (Attending, torch.randn(2, 80, 96)),
    "recurrent": (Recurrent, torch.randn(2, 5, 64)),
    "tied": (Tied, torch.arange(12).reshape(2, 6)),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", CASES)
def test_the_exported_weights_are_those_of_the_sim(name, tmp_path):
    torch.manual_seed(0)
    kind, x = CASES[name]
    sim = qsdk.quantize(kind().eval(), x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx", external_data=name == "recurrent")
    report = qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False)
    assert report.summary["passed"], report
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


@pytest.mark.slow
def test_weights_are_handed_over_without_a_copy():
    module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)).eval()
    sim = qsdk.quantize(module, torch.randn(2, 100), qsdk.w8a8(), in_place=True)
    traced = door_of(sim).traced()
    assert list(traced.weights) == ["0.weight"]
    assert np.shares_memory(traced.weights["0.weight"], module[0].weight.detach().numpy())
    assert len(traced.model.SerializeToString()) < 10_000
    with torch.no_grad():
        module[0].weight.fill_(2)
    assert (traced.weights["0.weight"] == 2).all()


def test_half_precision_weights_are_not_converted(tmp_path):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.Parameter(torch.randn(80, 80).bfloat16())

        def forward(self, x):
            return x @ self.narrow.float()

    x = torch.randn(2, 80)
    sim = qsdk.quantize(Half().eval(), x, qsdk.w8a8().override("*", weight="float32"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    (stored,) = (t for t in onnx.load(tmp_path / "m.onnx").graph.initializer if len(t.raw_data) > 10_000)
    assert stored.data_type == onnx.TensorProto.BFLOAT16
    assert stored.raw_data == sim.model.narrow.detach().view(torch.int16).numpy().tobytes()
