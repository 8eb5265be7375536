"""What an ordinary session computes in floats for nothing is named, with a cure that cures; and kernels by site."""

import onnx
import pytest
import torch
from torch import nn

import qsdk
from onnx_backend.profiling.speed import slow_parts

ONNXRUNTIME = 'for_dialect("onnxruntime")'


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, x):
        return torch.relu(self.head(self.table(x)))


def net(name):
    torch.manual_seed(0)
    if name == "words":
        return Words(), torch.arange(12)
    layers = {
        "upscaling": [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, stride=2)],
        "norms": [nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.GELU(), nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv2d(8, 4, 1)],
        "conv": [nn.Conv2d(3, 8, 3)],
    }
    return nn.Sequential(*layers[name]).eval(), torch.randn(2, 3, 8, 8)


def exported(model, x, config, path, **options):
    sim = qsdk.quantize(model, x, config)
    qsdk.calibrate(sim, [x], progress=False)
    return qsdk.export(sim, path, **options)


#: network, how it is written, what is slow, part of the cure, how the cure changes config and options
CASES = {
    "pairs around floats": ("norms", qsdk.w8a8(), {}, "pair", ONNXRUNTIME, lambda c: c.for_dialect("onnxruntime"), {}),
    "no kernel": (
        *("upscaling", qsdk.w8a8(), {}, "no integer kernel of ConvTranspose", '.override("2", weight="float32")'),
        *(lambda c: c.override("2", weight="float32"), {}),
    ),
    "packed": (
        *("conv", qsdk.w4a8(), {"prefer": "size"}, "Conv with a weight of int4", 'prefer="speed"', lambda c: c),
        {"prefer": "speed"},
    ),
    "a float result": (
        *("conv", qsdk.w8a8().override("*", activation="float32").override("input", activation="uint8"), {}),
        *("its result is read in floats", '.override("0", activation="uint8")'),
        *(lambda c: c.override("0", activation="uint8"), {}),
    ),
    "a float input": (
        *("conv", qsdk.w8a8().override("input", activation="float32"), {}, "what it reads is float", ONNXRUNTIME),
        *(lambda _: qsdk.w8a8().for_dialect("onnxruntime"), {}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cure_of_a_finding_cures_it(name, tmp_path):
    kind, config, options, problem, cure, cured, then = CASES[name]
    model, x = net(kind)
    exported(model, x, config, tmp_path / "slow.onnx", **options)
    report = qsdk.validate(tmp_path / "slow.onnx")
    (row,) = [row for row in report.rows if problem in row["problem"]]
    assert (row["rule"], row["severity"]) == ("speed", "note")
    assert cure in row["remedy"]
    assert report.summary["errors"] == report.summary["warnings"] == 0
    exported(model, x, cured(config), tmp_path / "fast.onnx", **{**options, **then})
    assert not [row for row in qsdk.validate(tmp_path / "fast.onnx").rows if problem in row["problem"]]


def test_a_file_in_another_form_is_cured_by_writing_it_again(tmp_path):
    """Without zero points the Linear is no QGemm; a table that is dequantized whole is looked up on codes."""
    model, x = net("words")
    config = qsdk.w8a8(symmetric_activations=True).override("table", weight="int8")  # a grid of its own
    exported(model, x, config, tmp_path / "slow.onnx", dialect="onnx")
    rows = {row["problem"].partition(" (")[0]: row["remedy"] for row in qsdk.validate(tmp_path / "slow.onnx").rows}
    assert {
        "the weight of Gather is dequantized in every run",
        "the weight of Gemm is dequantized in every run",
    } <= set(rows)
    assert all("qsdk.export(qsdk.quantize" in rows[problem] for problem in rows)
    qsdk.export(qsdk.quantize(tmp_path / "slow.onnx"), tmp_path / "fast.onnx")
    assert not slow_parts(onnx.load(tmp_path / "fast.onnx"))


def test_the_report_on_an_export_has_the_kernel_of_each_site(tmp_path):
    model, x = net("upscaling")
    report = exported(model, x, qsdk.w8a8(), tmp_path / "m.onnx")
    kernels = {row["site"]: row["kernel"] for row in report.rows}
    assert kernels["0:weight"] == kernels["0:bias"] == kernels["1:output"] == "QLinearConv"
    assert kernels["2:weight"] == "DequantizeLinear, ConvTranspose"
    assert kernels["input:input"] == "QuantizeLinear"
    assert "ConvTranspose is dequantized in every run" in report.summary["slow"][0]
    unopened = exported(model, x, qsdk.w8a8(), tmp_path / "m.onnx", check=False)
    assert not {"slow", "default_session"} & set(unopened.summary)
    assert "kernel" not in unopened.rows[0]


def test_findings_of_a_kind_are_one_row_with_the_ops_and_a_count(tmp_path):
    model, x = net("norms")
    exported(model, x, qsdk.w8a8(), tmp_path / "m.onnx")
    (row,) = qsdk.validate(tmp_path / "m.onnx").rows
    assert "(3 in the file: 1:output (Add, Gelu), 2:output (Gelu, InstanceNormalization)" in row["problem"]
    assert "speed" not in {row["rule"] for row in qsdk.validate(tmp_path / "m.onnx", dialect="qnn").rows}


def test_a_profile_has_the_cures_with_their_milliseconds(tmp_path):
    model, x = net("norms")
    exported(model, x, qsdk.w8a8(), tmp_path / "m.onnx")
    (row,) = qsdk.analysis.profile(tmp_path / "m.onnx", repeats=2, progress=False).summary["cures"]
    assert "1:output (" in row["finding"]
    assert row["cure"].endswith(f"qsdk.w8a8().{ONNXRUNTIME}")
    assert row["ms"] > 0
    exported(model, x, qsdk.w8a8().for_dialect("onnxruntime"), tmp_path / "m.onnx")
    assert "cures" not in qsdk.analysis.profile(tmp_path / "m.onnx", repeats=2, progress=False).summary
