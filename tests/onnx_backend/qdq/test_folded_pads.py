"""Pads of zeros in front of convolutions are written as the convolutions' own padding, and read back as they were."""

import numpy as np
import onnx
import pytest
import torch
from runtime_probes import LEVELS, opened
from torch import nn

import qsdk


class Padded(nn.Module):
    """Convolutions behind a Pad that one, two or none of them can take."""

    def __init__(self, pads=(0, 1, 0, 1), value=0.0, twice=False, padding=0, leaves=False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=padding, bias=False)
        self.c = nn.Conv2d(8, 4, 3, padding=padding)
        self.pads, self.value, self.twice, self.leaves = pads, value, twice, leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Gives what the last convolutions give, and the padded tensor if it leaves."""
        x = nn.functional.pad(torch.relu(self.a(x)), self.pads, value=self.value)
        y = self.b(x) + self.c(x) if self.twice else self.b(x)
        return (y, x) if self.leaves else y


def written(path, dialect="onnxruntime", **options):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qsdk.quantize(Padded(**options).eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, path, dialect=dialect)
    return sim, x, onnx.load(path)


def ops(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pads": (0, 0, 0, 0)}, {"twice": True}, {"padding": 1}], ids=str)
def test_no_pad_is_left_and_the_file_is_read_back_with_its_site(options, tmp_path):
    sim, x, model = written(tmp_path / "model.onnx", **options)
    _, _, plain = written(tmp_path / "plain.onnx", "onnx", **options)
    assert ("Pad" in ops(model), "Pad" in ops(plain)) == (False, any(options.get("pads", (1,))) or "pads" in options)
    feed = {"x": x.numpy()}
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        np.testing.assert_array_equal(opened(model, level).run(None, feed)[0], opened(plain, level).run(None, feed)[0])
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert parity.summary["passed"]
    assert {row["site"] for row in parity.rows} >= {site for site in sim.encodings if "pad" in site}
    again = qsdk.quantize(tmp_path / "model.onnx")
    assert set(again.encodings) == set(sim.encodings)
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
    report = qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx", progress=False)
    assert report.summary["float_tensors"] == 0


@pytest.mark.parametrize(
    "options", [{"value": 0.5}, {"leaves": True}, {"pads": (1, 1, 1, 1, 0, 0)}, {"pads": (-1, 0, 0, 0)}], ids=str
)
def test_a_pad_that_is_more_than_zeros_around_the_input_stays(options, tmp_path):
    sim, x, model = written(tmp_path / "model.onnx", **options)
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]
    assert ("Pad" in ops(model)) == (options.get("pads", (0,))[-2:] != (0, 0) or len(options.get("pads", ())) == 4)


def test_frozen_encodings_stay_frozen(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qsdk.quantize(Padded().eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    sim.freeze("*")
    qsdk.export(sim, tmp_path / "model.onnx")
    again = qsdk.quantize(tmp_path / "model.onnx")
    assert {site for site, encoding in again.encodings.items() if not encoding.frozen} == set()


def test_a_changed_size_of_the_padding_is_refused(tmp_path):
    sim, x, model = written(tmp_path / "model.onnx")
    conv = next(node for node in model.graph.node if any(e.key == "qsdk.stands_for" for e in node.metadata_props))
    next(a for a in conv.attribute if a.name == "pads").ints[:] = [1, 1, 0, 0]
    onnx.save(model, tmp_path / "model.onnx")
    for act in (
        lambda: qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False),
        lambda: qsdk.quantize(tmp_path / "model.onnx"),
        lambda: qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx", progress=False),
    ):
        with pytest.raises(qsdk.QsdkError, match=r"qsdk.stands_for notes .* at '.*conv2d.*'; it was changed"):
            act()
