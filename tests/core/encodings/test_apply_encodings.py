"""`apply_encodings`: a float ONNX model and encodings that exist give the Q/DQ model, without data and module."""

import json
import logging
import warnings

import numpy as np
import onnx
import pytest
import torch
from foreign_models import by_onnxruntime, integers
from qdq_models import convnet, mlp
from torch import nn

import qsdk
from qsdk import ConfigError, FileFormatError, calibrate, export, quantize, w4a8, w4a16, w8a8, w8a16

RNG = np.random.default_rng(4)
SHAPES = {"mlp": (4, 6), "convnet": (2, 3, 8, 8)}


def exported(folder, net="mlp", config=None):
    """The float model `float.onnx`, and `q.onnx` with `q.encodings.json` of a sim of it."""
    model = {"mlp": mlp, "convnet": convnet}[net]()
    onnx.save(model, folder / "float.onnx")
    sim = quantize(folder / "float.onnx", None, config or w8a8())
    calibrate(sim, [RNG.normal(size=SHAPES[net]).astype(np.float32)], progress=False)
    export(sim, folder / "q.onnx")
    return sim


@pytest.mark.parametrize("source", ["q.encodings.json", "q.onnx"])
@pytest.mark.parametrize(
    "config", [w8a8(), w4a8(), w8a16(), w4a16(block_size=2), w8a8().skip("*", "float16", op_type="Add")]
)
@pytest.mark.parametrize("net", SHAPES)
def test_what_export_wrote_gives_the_same_integers(net, config, source, tmp_path):
    sim = exported(tmp_path, net, config)
    report = qsdk.apply_encodings(tmp_path / "float.onnx", tmp_path / source, tmp_path / "out.onnx")
    assert integers(onnx.load(tmp_path / "out.onnx")) == integers(onnx.load(tmp_path / "q.onnx"))
    before, after = (onnx.load(tmp_path / name).graph.node for name in ("q.onnx", "out.onnx"))
    assert [node.SerializeToString() for node in after] == [node.SerializeToString() for node in before]
    assert report.summary["unmatched"] == 0
    applied = {row["site"]: row["name"] for row in report.rows if row["state"] == "applied"}
    assert set(sim.encodings) <= set(applied)
    x = {"x": RNG.normal(size=SHAPES[net]).astype(np.float32)}
    for got, want in zip(quantize(tmp_path / "out.onnx", None, None).run(x), sim.run(x), strict=True):
        np.testing.assert_array_equal(got, want)


class Net(nn.Module):
    """BatchNorms that are folded, one into a layer without a bias; a Linear that the exporter transposes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.other_norm = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        for norm in (self.norm, self.other_norm):
            norm.running_var.uniform_(0.5, 2)
            norm.running_mean.normal_()

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = torch.relu(self.other_norm(self.second(y + torch.sigmoid(y))))
        return self.head(y.mean((2, 3)))


@pytest.fixture(scope="module")
def from_module(tmp_path_factory):
    """The Q/DQ export of a module, and the float export of the same module by torch's own exporter."""
    folder = tmp_path_factory.mktemp("module")
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        for name, optimize in (("optimized", True), ("raw", False)):
            torch.onnx.export(net, (x,), folder / f"{name}.onnx", dynamo=True, verbose=False, optimize=optimize)
        sim = quantize(net, x, w8a8())
        calibrate(sim, [x], progress=False)
        export(sim, folder / "q.onnx")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimized", "raw"])
def test_the_float_export_of_a_module_gives_the_integers_of_its_quantized_export(name, from_module, tmp_path):
    qsdk.apply_encodings(from_module / f"{name}.onnx", from_module / "q.onnx", tmp_path / "out.onnx")
    found = sorted(map(str, integers(onnx.load(tmp_path / "out.onnx")).values()))
    assert found == sorted(map(str, integers(onnx.load(from_module / "q.onnx")).values()))


def test_the_encodings_of_a_foreign_model_go_onto_its_float_model(tmp_path):
    model = by_onnxruntime(mlp(), (4, 6), tmp_path, extra_options={"QDQKeepRemovableActivations": True})
    wanted = quantize(model, None, None)
    qsdk.save_encodings(wanted, tmp_path / "theirs.json")
    qsdk.apply_encodings(mlp(), tmp_path / "theirs.json", tmp_path / "out.onnx")
    assert quantize(tmp_path / "out.onnx", None, None).encodings == wanted.encodings


def edited(folder, change):
    data = json.loads((folder / "q.encodings.json").read_text())
    change(data["encodings"])
    (folder / "edited.json").write_text(json.dumps(data))
    return folder / "edited.json"


def test_names_that_no_tensor_has_are_all_listed_and_nothing_is_written(tmp_path):
    exported(tmp_path)

    def change(entries):
        for site in ("mm1:weight", "add2:output"):
            entry = entries.pop(site)
            entry.pop("tensor", None)
            entries[f"gone/{site}"] = entry

    file = edited(tmp_path, change)
    with pytest.raises(FileFormatError, match=r"(?s)2 no tensor of that name: gone/\S+ .*gone/\S+ .*strict=False"):
        qsdk.apply_encodings(tmp_path / "float.onnx", file, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
    report = qsdk.apply_encodings(tmp_path / "float.onnx", file, tmp_path / "out.onnx", strict=False)
    rows = {row["name"] or row["site"]: row for row in report.rows}
    assert rows["gone/mm1:weight"]["state"] == "unmatched"
    assert (rows["mm1:weight"]["state"], rows["mm1:weight"]["dtype"]) == ("float", "float32")
    assert rows["mm1:weight"]["detail"] == "the encodings file does not mention it"
    assert set(integers(onnx.load(tmp_path / "out.onnx"))).isdisjoint({"mm1:weight", "add2:output"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axis": 0}, r"mm1:weight \(.*8.*6.*\)"),
        ({"axis": 5}, r"mm1:weight \(axis 5 does not exist in the shape \[6, 8\]"),
        ({"scale": [0.1] * 7, "zero_point": [0] * 7, "shape": [7]}, r"mm1:weight \(.*7.*8"),
        ({"axis": 0, "block_size": 2}, r"mm1:weight \(scales of shape \(8,\) are no blocks"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_encodings_that_do_not_fit_their_tensor_are_refused_by_name(fields, message, strict, tmp_path):
    exported(tmp_path)
    file = edited(tmp_path, lambda entries: entries["mm1:weight"].update(fields))
    with pytest.raises(FileFormatError, match=message):
        qsdk.apply_encodings(tmp_path / "float.onnx", file, tmp_path / "out.onnx", strict=strict)
    assert not (tmp_path / "out.onnx").exists()


def test_what_is_no_float_model_or_cannot_be_written_is_refused(tmp_path):
    exported(tmp_path)
    q, text, out = (tmp_path / name for name in ("q.onnx", "q.encodings.json", "out.onnx"))
    with pytest.raises(qsdk.ModelError, match="quantized already"):
        qsdk.apply_encodings(q, text, out)
    with pytest.raises(ConfigError, match="opset 12 cannot be written"):
        qsdk.apply_encodings(tmp_path / "float.onnx", text, out, opset=12)
    with pytest.raises(FileFormatError, match=r"there is no file .*missing\.json"):
        qsdk.apply_encodings(tmp_path / "float.onnx", tmp_path / "missing.json", out)
    assert not out.exists()
