"""Encodings files beside models with weights in blocks: the scales stand in the model alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from json_schema import fits
from torch import nn

import qsdk
from qsdk.core.encodings import qsdk_format

SCHEMA = json.loads((Path(qsdk_format.__file__).parent / "encodings.schema.json").read_text("utf-8"))
X = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).eval()


def sim_of(config):
    sim = qsdk.quantize(layers(), X, config)
    qsdk.calibrate(sim, [X], progress=False)
    return sim


CONFIGS = {
    "int4": qsdk.weight_only("int4", block_size=32),
    "uint4 with zero points": qsdk.weight_only("uint4", block_size=32),
    "int3 and frozen": qsdk.weight_only("int3", block_size=16),
    "two levels": qsdk.w4a8(block_size=32).override("*", two_level_scales=True),
    "beside activations": qsdk.w4a8(block_size=32),
    "mxfp4": qsdk.weight_only("mxfp4"),
}


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request, tmp_path_factory):
    folder, sim = tmp_path_factory.mktemp("model"), sim_of(CONFIGS[request.param])
    if "frozen" in request.param:
        sim.freeze("0:weight")
    opset = 23 if "mxfp4" in request.param else 21
    dialect = "onnx" if "mxfp4" in request.param else "onnxruntime"
    qsdk.export(sim, folder / "model.onnx", opset=opset, dialect=dialect)
    return folder, sim, CONFIGS[request.param]


def test_the_file_is_a_few_percent_of_the_model_and_says_all_else(exported):
    folder, sim, _ = exported
    data = json.loads((folder / "model.encodings.json").read_text())
    assert data["version"] == 4
    assert data["encodings"]["0:weight"]["scale"] == "model"
    assert data["encodings"]["0:weight"]["shape"] == list(sim.encodings["0:weight"].scale.shape)
    assert fits(data, SCHEMA)
    del data["provenance"]  # has one size for every network
    assert len(json.dumps(data)) < 0.05 * (folder / "model.onnx").stat().st_size


def test_every_verb_reads_the_same_encodings(exported, tmp_path: Path):
    folder, sim, config = exported
    again = sim_of(config)
    with torch.no_grad():
        again.model[0].weight.mul_(2)
    qsdk.calibrate(again, [X], progress=False)
    assert again.encodings != sim.encodings
    qsdk.load_encodings(again, folder / "model.encodings.json")
    assert again.encodings == sim.encodings
    assert [e.frozen for e in again.encodings.values()] == [e.frozen for e in sim.encodings.values()]
    qsdk.save_encodings(folder / "model.encodings.json", tmp_path / "whole.json")
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert whole["version"] == 3
    assert len(whole["encodings"]["0:weight"]["scale"]) == sim.encodings["0:weight"].scale.size
    qsdk.load_encodings(again, tmp_path / "whole.json")
    assert again.encodings == sim.encodings


def test_apply_encodings_reads_them(tmp_path: Path):
    sim = sim_of(CONFIGS["int4"])
    qsdk.export(sim, tmp_path / "model.onnx")
    torch.onnx.export(layers(), (X,), tmp_path / "float.onnx", dynamo=True, verbose=False)
    qsdk.apply_encodings(tmp_path / "float.onnx", tmp_path / "model.encodings.json", tmp_path / "again.onnx")
    found = qsdk.quantize(tmp_path / "again.onnx").encodings
    assert sorted(e.scale.tobytes() for e in found.values()) == sorted(
        e.scale.tobytes() for e in sim.encodings.values()
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    sim = sim_of(CONFIGS["int4"])
    qsdk.export(sim, folder / "model.onnx")
    return folder, sim


def test_both_files_under_another_name(pair, tmp_path: Path):
    folder, sim = pair
    shutil.copy(folder / "model.onnx", tmp_path / "other.onnx")
    shutil.copy(folder / "model.encodings.json", tmp_path / "other.encodings.json")
    again = sim_of(CONFIGS["int4"])
    qsdk.load_encodings(again, tmp_path / "other.encodings.json")
    assert again.encodings == sim.encodings


REFUSALS = {
    "no model": r"takes scales of blocks from the model.*save_encodings\(model, path",
    "another model": r"takes scales of blocks from the model.*model.onnx beside it is missing or another one",
    "edited": r"takes scales of blocks from the model.*model.onnx beside it is missing or another one",
}


@pytest.mark.parametrize("spoil", REFUSALS)
def test_a_file_apart_from_its_model_is_refused(pair, tmp_path: Path, spoil: str):
    folder, sim = pair
    shutil.copytree(folder, tmp_path / "here")
    here, before = tmp_path / "here", sim.encodings
    if spoil == "no model":
        (here / "model.onnx").unlink()
    elif spoil == "another model":
        other = qsdk.quantize(layers(), X, CONFIGS["int4"])
        with torch.no_grad():
            other.model[0].weight.mul_(3)
        qsdk.calibrate(other, [X], progress=False)
        qsdk.export(other, tmp_path / "model.onnx")
        shutil.copy(tmp_path / "model.onnx", here / "model.onnx")
    else:
        path = here / "model.encodings.json"
        path.write_text(path.read_text().replace('"axis": 1', '"axis": 0', 1))
    with pytest.raises(qsdk.FileFormatError, match=REFUSALS[spoil]):
        qsdk.load_encodings(sim, here / "model.encodings.json")
    assert sim.encodings == before


def test_text_without_a_model_is_refused(pair):
    text = (pair[0] / "model.encodings.json").read_text()
    with pytest.raises(qsdk.FileFormatError, match="takes the scales of '0:weight' from the model"):
        qsdk_format.loads(text, "m.json")
    data, held = json.loads(text), dict(pair[1].encodings)
    assert qsdk_format.read_own(data, "m.json", lambda: held).encodings == held
    held["0:weight"] = replace(held["0:weight"], scale=held["0:weight"].scale * 2)
    with pytest.raises(qsdk.FileFormatError, match="site '0:weight': the model has other scales"):
        qsdk_format.read_own(data, "m.json", lambda: held)
    with pytest.raises(qsdk.FileFormatError, match="site '0:weight': the model has no scales of this form there"):
        qsdk_format.read_own(data, "m.json", dict)
