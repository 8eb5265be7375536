"""Encodings go out of a sim, into files of every format, and back; the same at both doors."""

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from aimet_documents import FILES, entries, tiny
from float_files import float_onnx
from islands import BATCHES, DOORS, batches, loaded, onnx_model, outputs, sim_at
from onnx import numpy_helper
from torch import nn
from torch_models import seeded

import qsdk
from qsdk import ConfigError, FileFormatError, calibrate, export, load_encodings, quantize, save_encodings, w4a8, w8a8
from qsdk.core.encodings.provenance import network_hash
from qsdk.core.encodings.qsdk_format import loads
from qsdk.core.numerics.block_scales import TwoLevel, block_scales

both = pytest.mark.parametrize("door", DOORS)
FORMATS = ("qsdk", "1.0.0", "2.0.0", "2.1.0")
AIMET = FORMATS[1:]
X = np.float32(
    [[-1.55, 0.86, 0.12, -0.64], [2, 0.76, -1.2, 0.07], [0.58, -0.19, 0.68, -0.07], [0.67, 1.44, -0.68, 0.2]]
)


def golden(stem: str):
    return json.loads(next(path for path in FILES if path.stem == stem).read_text())


@pytest.mark.slow
@both
def test_encodings_have_the_keys_and_values_and_load_to_identical_outputs(door, tmp_path):
    sim, fresh = sim_at(door, "w4a8"), sim_at(door, w4a8(), data=False)
    empty = fresh.snapshot()
    for version in FORMATS:
        save_encodings(sim, tmp_path / "e.json", version=version)
        fresh.restore(empty)
        report = load_encodings(fresh, tmp_path / "e.json")
        assert {row["state"] for row in report.rows} == {"loaded"}, version
        assert fresh.encodings == sim.encodings
        assert np.array_equal(outputs(fresh), outputs(sim))


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_keys_and_values_of_encodings_are_those_that_aimet_writes(version, tmp_path):
    """Weights and inputs, whose ranges both tools take as they are, agree to the last digit of a float32 or two."""
    sim = quantize(tiny(), None, w8a8().override("mm1", activation="float16"))
    calibrate(sim, [X.reshape(4, 2, 2, 1)], progress=False)
    save_encodings(sim, tmp_path / "e.json", version=version)
    ours, theirs = json.loads((tmp_path / "e.json").read_text()), golden(f"plain.{version}")
    assert set(ours) - {"producer"} == set(theirs)
    ours, theirs = entries(ours), entries(theirs)
    for section, found in theirs.items():
        assert set(found) <= set(ours[section])
        for name, entry in found.items():
            assert shape_of(ours[section][name]) == shape_of(entry), name
            if name in ("x", "conv.weight", "m1", "m2"):
                np.testing.assert_allclose(numbers_of(ours[section][name]), numbers_of(entry), rtol=2e-7)


def shape_of(value):
    """An entry without its numbers: keys, dtypes and lengths."""
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return "number" if type(value) is float else value


def numbers_of(value) -> list[float]:
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in numbers_of(value[name])]
    if isinstance(value, list):
        return [number for item in value for number in numbers_of(item)]
    return [value] if type(value) is float else []


@pytest.mark.spread(1)
@both
def test_the_names_are_those_of_the_float_model(door, tmp_path):
    sim = sim_at(door, fold=door == "torch")
    save_encodings(sim, tmp_path / "e.json", version="2.0.0")
    names = {entry["name"] for entry in json.loads((tmp_path / "e.json").read_text())["encodings"]}
    model = onnx_model() if door == "onnx" else float_onnx(sim.unwrap(), (torch.from_numpy(BATCHES[0]),))
    tensors = {t.name for t in model.graph.initializer} | {name for node in model.graph.node for name in node.output}
    assert names <= tensors | {model.graph.input[0].name}


class Attention(nn.Module):
    """Linears on three axes, which an exporter stores transposed: [N, 4, 16] to [N, 4, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.slow
@pytest.mark.parametrize("config", [w8a8(), qsdk.w4a16(block_size=8)], ids=["channel", "block"])
def test_a_float_onnx_model_gives_names_and_layout_on_structure_alone(config, tmp_path):
    torch.manual_seed(0)
    module, x = Attention().eval(), seeded(2, 4, 16)
    sim = quantize(module, x, config)
    calibrate(sim, [x], progress=False)
    fresh = quantize(module, x, config)
    model = float_onnx(module, (x,))
    model.graph.node[-1].output[0] = model.graph.output[0].name = "logits"
    stored = {t.name: tuple(t.dims) for t in model.graph.initializer}
    onnx.save(model, tmp_path / "float.onnx")
    door2 = quantize(model, None, config)
    for version in ("1.0.0", "2.0.0"):
        save_encodings(sim, tmp_path / "e.json", version=version, model=tmp_path / "float.onnx")
        written = entries(json.loads((tmp_path / "e.json").read_text()))
        everything = {name: entry for section in written.values() for name, entry in section.items()}
        assert "logits" in everything
        (name,) = [name for name, shape in stored.items() if shape in ((16, 32), (32, 16))]
        if version == "2.0.0":
            channels = stored[name].index(32)
            blocks = config.block_size is not None
            assert everything[name]["axis"] == (1 - channels if blocks else channels)
            assert np.shape(everything[name]["y_scale"]) == ((2, 32) if channels else (32, 2)) if blocks else (32,)
        load_encodings(fresh, tmp_path / "e.json", model=tmp_path / "float.onnx")
        assert fresh.encodings == sim.encodings
        assert torch.equal(fresh(x), sim(x))
        assert load_encodings(door2, tmp_path / "e.json").summary["different"] == 0
        np.testing.assert_array_equal(door2.run(x.numpy())[0], sim(x).numpy())
    with pytest.raises(FileFormatError, match="no tensor has this name"):
        load_encodings(fresh, tmp_path / "e.json")


def test_two_level_scales_go_out_as_such_and_come_back(tmp_path):
    sim = quantize(tiny(), None, w4a8(block_size=2))
    calibrate(sim, [X.reshape(4, 2, 2, 1)], progress=False)
    state = sim.snapshot()
    own = dict(state.own)
    for site in ("mm1:weight", "mm2:weight"):
        channel = own[site].scale.max(0, keepdims=True) / np.float32(16)
        levels = np.rint(own[site].scale / channel).clip(1, 16).astype(np.int32)
        own[site] = replace(own[site], scale=block_scales(TwoLevel(channel, levels)))
    sim.restore(replace(state, own=own))
    for version in ("1.0.0", "2.0.0", "2.1.0"):
        report = save_encodings(sim, tmp_path / "e.json", version=version)
        assert {row["site"] for row in report.rows if row["form"] == "two-level block"} == {"mm1:weight", "mm2:weight"}
        ours, theirs = (
            entries(d) for d in (json.loads((tmp_path / "e.json").read_text()), golden(f"two_level.{version}"))
        )
        section = "param_encodings" if version == "1.0.0" else "encodings"
        assert shape_of(set(ours[section]["m1"])) == set(theirs[section]["m1"])
        fresh = quantize(tiny(), None, w4a8(block_size=2))
        load_encodings(fresh, tmp_path / "e.json")
        assert fresh.encodings == sim.encodings


# the own format


@both
def test_the_own_file_says_where_it_comes_from(door, tmp_path):
    sim = sim_at(door, "w4a8")
    save_encodings(sim, tmp_path / "e.json")
    export(sim, tmp_path / "m.onnx")
    read = loads((tmp_path / "e.json").read_text(), "e.json")
    beside = loads((tmp_path / "m.encodings.json").read_text(), "m.encodings.json")
    assert beside == read  # in the order of the file's nodes
    assert read.provenance["config"] == w4a8().to_dict()
    assert {"qsdk", "torch", "onnx", "onnxruntime", "numpy", "python"} == set(read.provenance["versions"])
    assert read.provenance["versions"]["torch"] == metadata.version("torch")  # `torch.__version__` names the build too
    assert read.provenance["network"] == network_hash(sim.graph)
    assert read.kinds == {site: sim.plan.decisions[site].kind for site in sim.encodings}
    assert read.tensors["fc1:weight"] == "fc1.weight"
    # opened again, the names are those of the float model
    again = quantize(tmp_path / "m.onnx", None, None)
    save_encodings(again, tmp_path / "again.json")
    assert loads((tmp_path / "again.json").read_text(), "e.json").tensors == read.tensors


def test_the_hash_is_of_the_network_not_of_weights_names_or_batch_size():
    hashes = [network_hash(sim_at(door).graph) for door in ("torch", "torch", "onnx")]
    assert hashes[0] == hashes[1] != hashes[2]
    model = onnx_model()
    for k, tensor in enumerate(model.graph.initializer):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(k), tensor.name))
    for node in model.graph.node:
        node.name += "_other"
    assert network_hash(quantize(model, None, w8a8(), fold_batch_norm=False).graph) == hashes[2]


# from file to file


def test_every_format_becomes_every_other(tmp_path):
    sim = sim_at("onnx", "w4a8")
    sim.set_precision("relu3", "uint6")  # held inside its grid by a Clip
    sim.freeze("fc1:weight")
    fresh = sim_at("onnx", sim.config, data=False)
    export(sim, tmp_path / "m.onnx")
    sources = {"onnx": tmp_path / "m.onnx", "qsdk": tmp_path / "m.encodings.json"}
    for version in AIMET:
        for source, path in sources.items():
            save_encodings(path, tmp_path / f"{source}.json", version=version)
        save_encodings(sim, tmp_path / "saved.json", version=version)
        texts = {(tmp_path / f"{name}.json").read_text() for name in ("onnx", "qsdk", "saved")}
        assert len({json.dumps(entries(json.loads(text)), sort_keys=True) for text in texts}) == 1
        load_encodings(fresh, tmp_path / "onnx.json")
        assert fresh.encodings == sim.encodings
    report = save_encodings(tmp_path / "m.onnx", tmp_path / "own.json", version="qsdk")
    assert [row["site"] for row in report.rows if row["frozen"]] == ["fc1:weight"]
    assert loads((tmp_path / "own.json").read_text(), "own").encodings == sim.encodings


def test_a_model_gives_what_a_version_leaves_out(tmp_path):
    source = next(path for path in FILES if path.stem == "plain.0.6.1")
    out = tmp_path / "e.json"
    with pytest.raises(FileFormatError, match="this version has no channel axis, so the model must say; pass model="):
        save_encodings(source, out, version="2.0.0")
    report = save_encodings(source, out, version="2.0.0", model=tiny())
    assert entries(json.loads(out.read_text()))["encodings"] == {
        name: entry for name, entry in entries(golden("plain.2.0.0"))["encodings"].items() if name != "f"
    }
    assert [row["loss"] for row in report.rows if row["tensor"] == "h"] == [
        "left out: versions from 2.0.0 have no casts"
    ]
    assert report.summary == {"path": str(out), "version": "2.0.0", "sites": 7, "with a loss": 1}
    with pytest.raises(
        FileFormatError, match=r"does not say the kinds of the tensors at .*conv.weight; pass the float ONNX model"
    ):
        save_encodings(out, tmp_path / "f.json", version="1.0.0")
    save_encodings(out, tmp_path / "f.json", version="1.0.0", model=tiny())
    assert set(entries(json.loads((tmp_path / "f.json").read_text()))["param_encodings"]) == {"conv.weight", "m1", "m2"}


def test_a_file_of_another_model_is_refused_and_nothing_is_written(tmp_path):
    source = next(path for path in FILES if path.stem == "plain.1.0.0")
    with pytest.raises(FileFormatError, match=r"does not fit the model: .*m1: no tensor has this name"):
        save_encodings(source, tmp_path / "e.json", version="2.0.0", model=onnx_model())
    assert list(tmp_path.iterdir()) == []


def test_what_a_format_cannot_say_leaves_no_file(tmp_path):
    config = w8a8().override("mm1", weight="float8e4m3fn")
    sim = quantize(tiny(), None, config)
    calibrate(sim, [X.reshape(4, 2, 2, 1)], progress=False)
    with pytest.raises(
        qsdk.ExportError, match=r"1\.0\.0 cannot say .*mm1:weight \(it has no float8e4m3fn; write version 2"
    ):
        save_encodings(sim, tmp_path / "e.json", version="1.0.0")
    with pytest.raises(
        ConfigError, match=r"no encodings version '0\.6\.1' can be written; choose one of qsdk, 1\.0\.0"
    ):
        save_encodings(sim, tmp_path / "e.json", version="0.6.1")
    with pytest.raises(ConfigError, match="qsdk's own goes by sites: leave it out"):
        save_encodings(sim, tmp_path / "e.json", model=tiny())
    assert list(tmp_path.iterdir()) == []
    report = save_encodings(sim, tmp_path / "e.json", version="1.0.0", allow_loss=True)
    lost = [row["site"] for row in report.rows if row["loss"].startswith("left out")]
    assert lost == ["mm1:weight"]
    fresh = quantize(tiny(), None, config)
    with pytest.raises(FileFormatError, match="1 not in the file: mm1:weight"):
        load_encodings(fresh, tmp_path / "e.json")
    load_encodings(fresh, tmp_path / "e.json", strict=False)
    assert not fresh.ready()["mm1:weight"]


def test_a_quantized_model_gives_no_float_names(tmp_path):
    sim = sim_at("onnx")
    export(sim, tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match=r"m\.onnx is quantized; give the float model"):
        save_encodings(sim, tmp_path / "e.json", version="1.0.0", model=tmp_path / "m.onnx")


@both
def test_entries_that_fit_nothing_are_listed_and_leave_the_sim_as_it_was(door, tmp_path):
    sim = sim_at(door)
    path = Path(tmp_path / "e.json")
    save_encodings(sim, path, version="1.0.0")
    data = json.loads(path.read_text())
    data["param_encodings"][0]["name"] = "conv9.weight"
    data["param_encodings"][2]["scale"].pop()
    data["param_encodings"][2]["offset"].pop()
    path.write_text(json.dumps(data))
    fresh = sim_at(door)
    calibrate(fresh, [batch * 2 for batch in batches(door)], progress=False)
    before = fresh.encodings
    with pytest.raises(FileFormatError) as caught:
        load_encodings(fresh, path)
    for part in (
        "1 not in the file: conv1:weight",
        "1 unexpected: conv9.weight (no tensor has this name; the nearest: conv2.weight, conv1.weight)",
        "1 different: conv2:weight (7 scales do not fit the 8 channels (axis 0) of [8, 8, 3, 3])",
    ):
        assert part in str(caught.value), str(caught.value)
    assert fresh.encodings == before
    load_encodings(fresh, path, strict=False)
    assert fresh.encodings["conv1:weight"] == before["conv1:weight"]
    assert fresh.encodings["fc2:output"] == sim.encodings["fc2:output"]


@both
def test_entries_of_what_was_folded_or_fused_name_the_site_that_has_their_range(door, tmp_path):
    sim, path = sim_at(door, fold=True), tmp_path / "e.json"
    save_encodings(sim_at(door), path)
    data = json.loads(path.read_text())
    data["encodings"]["bn1:output"] = data["encodings"]["conv1:output"]
    path.write_text(json.dumps(data))
    remedies = (
        ".override('conv1', supergroup=False) gives it one of its own",
        "quantize(..., fold_batch_norm=False) keeps",
    )
    fused = f"conv1:output (float32 in the plan: inside Conv+Relu; relu1:output has the range; {remedies[0]})"
    folded = f"(folded into conv1:output (relu1:output has the range); {remedies[1]} it apart)"
    with pytest.raises(FileFormatError) as caught:
        load_encodings(sim, path)
    assert fused in str(caught.value)
    assert f"bn1:output {folded}" in str(caught.value)
    save_encodings(sim_at(door), path, version="1.0.0")
    qsdk.save(sim, tmp_path / "sim.qsdk")
    with pytest.raises(FileFormatError) as caught:
        load_encodings(loaded(tmp_path / "sim.qsdk", door), path)
    if door == "onnx":  # such a file goes by the tensors of the float model
        assert f"c1 {folded}" in str(caught.value)
        assert "c2 (folded into conv2:output" in str(caught.value)


@pytest.mark.slow
def test_the_encodings_for_qairt_are_those_of_the_file_for_the_htp_under_the_names_of_the_float_file(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval(), seeded(4, 3, 8, 8)
    torch.onnx.export(model, (x,), tmp_path / "float.onnx", dynamo=True, verbose=False)
    sim = quantize(model, x, w8a8().for_dialect("qnn"))
    calibrate(sim, [x], progress=False)
    export(sim, tmp_path / "m.onnx", dialect="qnn")
    save_encodings(sim, tmp_path / "float.encodings", version="1.0.0", model=tmp_path / "float.onnx")
    written = json.loads((tmp_path / "float.encodings").read_text())
    graph = onnx.load(tmp_path / "float.onnx").graph
    tensors = {name for node in graph.node for name in (*node.input, *node.output)}
    named = [entry["name"] for part in ("activation_encodings", "param_encodings") for entry in written[part]]
    assert len(named) == len(sim.encodings)
    assert set(named) <= tensors
    read = []
    for source, options in (("float.encodings", {"model": tmp_path / "float.onnx"}), ("m.onnx", {})):
        read.append(quantize(model, x, w8a8().for_dialect("qnn")))
        load_encodings(read[-1], tmp_path / source, **options)
    assert read[0].encodings == read[1].encodings == sim.encodings


@pytest.mark.parametrize("config", [qsdk.QuantConfig(dynamic_activations=True), qsdk.block_scaled("nvfp4")], ids=str)
@pytest.mark.parametrize("version", AIMET[-2:])
def test_ranges_found_while_the_model_runs_are_no_grids_of_a_file(config, version, tmp_path):
    x = torch.randn(8, 32)
    sim = qsdk.quantize(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()), x, config)
    qsdk.calibrate(sim, [x], progress=False)
    path = tmp_path / "encodings.json"
    with pytest.raises(qsdk.ExportError, match=r"input:input \(its range is found while the model runs"):
        qsdk.save_encodings(sim, path, version=version)
    assert not path.exists()
    rows = {row["site"]: row["loss"] for row in qsdk.save_encodings(sim, path, version=version, allow_loss=True).rows}
    assert "found while the model runs" in rows["input:input"]
    assert [entry["name"] for entry in json.loads(path.read_text())["encodings"]] == ["0.weight"]
