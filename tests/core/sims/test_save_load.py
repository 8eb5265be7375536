"""Saving a whole sim to one file and loading it: the same at both doors."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from islands import BATCHES, DOORS, Islands, batches, everything, loaded, outputs, sim_at
from onnx import TensorProto, helper
from qdq_models import convnet, make_model, weights
from torch import Tensor, nn
from torch_models import (
    BatchNormNet,
    Containers,
    Dead,
    EncoderModel,
    Keywords,
    OwnTensors,
    Pair,
    TiedLanguageModel,
    TracedOnly,
    Twice,
    calibrated,
    randomized,
    seeded,
)

import qsdk
from qsdk import ConfigError, ExportError, FileFormatError, ModelError, calibrate, export, load, quantize, save, w8a8
from qsdk.core.patterns.terms import Pattern, op
from qsdk.core.sims.sim_file import different_sites, plan_to_json, read_plan
from qsdk.core.sims.state import Methods

both = pytest.mark.parametrize("door", DOORS)
HERE = Path(__file__).parent


def rich(door):
    """A sim with all that a file must hold: mixed precision, frozen encodings, folded BatchNorms that a rule names."""
    sim = sim_at(door, "w4a8", fold=True)
    sim.set_precision("fc1", weight="int8", activation="uint16")
    sim.set_precision("*1", qsdk.float16)
    sim.set_precision("fc2:weight", qsdk.bfloat16)
    sim.freeze("conv2")
    return sim


@pytest.mark.slow
@both
def test_a_loaded_sim_is_the_saved_one_bit_for_bit(door, tmp_path):
    sim = rich(door)
    assert sim.folded == ("bn1", "bn2")
    save(sim, tmp_path / "sim.qsdk")
    back = loaded(tmp_path / "sim.qsdk", door)
    assert everything(back) == everything(sim)
    assert back.folded == sim.folded
    assert np.array_equal(outputs(back), outputs(sim))
    assert back.coverage().to_dict() == sim.coverage().to_dict()
    for verb in (lambda s: s.set_precision("conv2", "uint4"), lambda s: calibrate(s, batches(door), progress=False)):
        verb(back)
        verb(sim)
        assert everything(back) == everything(sim)
        assert np.array_equal(outputs(back), outputs(sim))
    export(back, tmp_path / "back.onnx")
    export(sim, tmp_path / "sim.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "sim.onnx").read_bytes()


@pytest.mark.slow
@both
def test_how_it_was_calibrated_comes_back_from_files_and_snapshots(door, tmp_path):
    sim = sim_at(door)
    before = sim.snapshot()
    calibrate(sim, batches(door), method="mse", weight_method="percentile", percentile=97.5, progress=False)
    save(sim, tmp_path / "sim.qsdk")
    back = loaded(tmp_path / "sim.qsdk", door)
    assert back.methods == sim.methods == Methods("mse", "percentile", 97.5)
    save(back, tmp_path / "again.qsdk")
    assert loaded(tmp_path / "again.qsdk", door).methods == sim.methods
    # a file from before this was kept
    assert (
        loaded(_rewritten(tmp_path / "sim.qsdk", tmp_path / "old.qsdk", _facts(methods=None)), door).methods
        == Methods()
    )
    sim.restore(before)
    assert sim.methods == Methods()


@pytest.mark.slow
@both
def test_a_sim_without_encodings_is_saved_too(door, tmp_path):
    sim = sim_at(door, data=False)
    save(sim, tmp_path / "sim.qsdk")
    back = loaded(tmp_path / "sim.qsdk", door)
    assert not any(back.ready().values())
    calibrate(back, batches(door), progress=False)
    assert back.encodings == sim_at(door).encodings


SCRIPT = """
import sys
import numpy as np
import qsdk
from islands import Islands, outputs
path, door, out = sys.argv[1:]
sim = qsdk.load(path, Islands()) if door == "torch" else qsdk.load(path)
if door == "onnx":
    assert {node.domain for node in sim.qdq_model().graph.node} <= {"", "ai.onnx"}
np.save(out, outputs(sim))
"""


@pytest.mark.slow
@pytest.mark.parametrize("door", [pytest.param("torch", marks=pytest.mark.slow), "onnx"])
def test_a_fresh_process_gives_identical_outputs_without_custom_ops(door, tmp_path):
    sim = rich(door)
    save(sim, tmp_path / "sim.qsdk")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "sim.qsdk"), door, str(tmp_path / "out.npy")]
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert np.array_equal(np.load(tmp_path / "out.npy"), outputs(sim))


MODULES = {
    "batch norm": lambda: (randomized(BatchNormNet()), seeded(2, 2, 6, 6)),
    "tied": lambda: (TiedLanguageModel(), torch.tensor([[1, 2, 3], [4, 5, 10]])),
    "keywords": lambda: (Keywords(), {"x": seeded(3, 4), "bias": seeded(4), "tokens": torch.tensor([1, 2, 3])}),
    "own tensors": lambda: (OwnTensors(), seeded(2, 5, 4)),
    "reused": lambda: (Twice(), seeded(3, 4)),
    "dead": lambda: (Dead(), seeded(2, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_kind_of_module_comes_back(name, tmp_path):
    model, example = MODULES[name]()
    sim = calibrated(model, example, qsdk.w4a8())
    with torch.no_grad():
        for parameter in sim.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    qsdk.adaround(sim, [example], progress=False)
    save(sim, tmp_path / "sim.qsdk")
    fresh, _ = MODULES[name]()
    with torch.no_grad():
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(-2).abs_()
    back = load(tmp_path / "sim.qsdk", fresh)
    assert everything(back) == everything(sim)
    assert torch.equal(back.run(example), sim.run(example))
    assert {n: t.dtype for n, t in back.model.state_dict().items()} == {
        n: t.dtype for n, t in sim.model.state_dict().items()
    }


@pytest.mark.slow
def test_what_only_the_trace_knows_comes_back(tmp_path):
    with torch.no_grad():
        sim = quantize(TracedOnly(), seeded(2, 4), w8a8())
    assert sim.not_exercised
    save(sim, tmp_path / "sim.qsdk")
    assert load(tmp_path / "sim.qsdk", TracedOnly()).not_exercised == sim.not_exercised


@pytest.mark.slow
def test_a_trained_sim_comes_back(tmp_path):
    sim = calibrated(EncoderModel(), seeded(6, 6))
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=1e-2))
        for _ in range(3):
            optimizer.zero_grad()
            model(seeded(6, 6)).square().sum().backward()
            optimizer.step()
    save(sim, tmp_path / "sim.qsdk")
    back = load(tmp_path / "sim.qsdk", EncoderModel())
    assert back.encodings == sim.encodings
    assert torch.equal(back(seeded(6, 6)), sim(seeded(6, 6)))


ONNX_MODELS = {
    "plain": lambda: (convnet(), BATCHES_8),
    "raised": lambda: (convnet(13), BATCHES_8),
    "branch": lambda: (_branching(), [np.ones((2, 4), np.float32), -np.ones((2, 4), np.float32)]),
}
BATCHES_8 = [np.random.default_rng(2).normal(size=(2, 3, 8, 8)).astype(np.float32)]


def _branching():
    """An If between two layers."""
    node = helper.make_node
    floats = helper.make_tensor_value_info("inner", 1, None)
    bodies = [helper.make_graph([node(op, ["m"], ["inner"])], op, [], [floats]) for op in ("Relu", "Tanh")]
    nodes = [
        node("MatMul", ["x", "w1"], ["m"], "mm1"),
        node("ReduceSum", ["m"], ["s"], "sum", keepdims=0),
        node("Greater", ["s", "zero"], ["c"], "greater"),
        node("If", ["c"], ["i"], "if", then_branch=bodies[0], else_branch=bodies[1]),
        node("MatMul", ["i", "w2"], ["y"], "mm2"),
    ]
    stored = weights(w1=(4, 4), w2=(4, 3)) | {"zero": np.float32(0)}
    return make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, stored)


@pytest.mark.parametrize("name", ONNX_MODELS)
def test_every_kind_of_onnx_model_comes_back(name, tmp_path):
    model, data = ONNX_MODELS[name]()
    sim = quantize(model, None, w8a8().override("*", activation="uint16"))
    calibrate(sim, data, progress=False)
    save(sim, tmp_path / "sim.qsdk")
    back = load(tmp_path / "sim.qsdk")
    for batch in data:
        for left, right in zip(back.run(batch), sim.run(batch), strict=True):
            assert np.array_equal(left, right)
    assert back.coverage().to_dict() == sim.coverage().to_dict()
    back.replan(w8a8())
    sim.replan(w8a8())
    direct = quantize(model, None, w8a8()).plan
    assert not different_sites(back.plan, direct)
    assert {(d.site, d.reason) for d in back.plan.inside} == {(d.site, d.reason) for d in direct.inside}
    assert back.coverage().to_dict() == sim.coverage().to_dict()
    assert back.encodings == sim.encodings


def test_the_supergroups_of_the_config_come_back(tmp_path):
    w = helper.make_tensor("w", TensorProto.FLOAT, [2, 3, 1, 1], [0.5] * 6)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="conv"), helper.make_node("Relu", ["c"], ["y"], name="r")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n, 4, 4]) for name, n in (("x", 3), ("y", 2))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values[:1], values[1:], [w]), opset_imports=[helper.make_opsetid("", 21)]
    )
    for config, expected in ((w8a8(), ["Conv+Relu"]), (replace(w8a8(), supergroup=False), [])):
        save(quantize(model, None, config), tmp_path / "sim.qsdk")
        assert sorted({group.name for group in load(tmp_path / "sim.qsdk").plan.groups.values()}) == expected


def test_an_opened_file_comes_back(tmp_path):
    export(rich("onnx"), tmp_path / "m.onnx")
    sim = quantize(tmp_path / "m.onnx", None, None)
    for freeze in (False, True):
        if freeze:
            sim.freeze("weights")
            calibrate(sim, [batch * 2 for batch in BATCHES], progress=False)
        save(sim, tmp_path / "sim.qsdk")
        back = load(tmp_path / "sim.qsdk")
        assert everything(back) == everything(sim)
        assert back.opened == sim.opened
        assert np.array_equal(outputs(back), outputs(sim))


# what does not fit


@pytest.mark.slow
def test_another_module_is_refused(tmp_path):
    sim = sim_at("torch")
    save(sim, tmp_path / "sim.qsdk")

    class Wider(Islands):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 20), nn.Linear(20, 5)

    class Other(Islands):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(ModelError, match=r"(?s)holds the weights of another model: .*size mismatch for fc1.weight"):
        load(tmp_path / "sim.qsdk", Wider())
    with pytest.raises(ModelError, match=r"was saved from another model.*mul.0:output.*differ; pass the module that"):
        load(tmp_path / "sim.qsdk", Other())
    narrow = Islands()
    narrow.bn1.num_batches_tracked = torch.zeros((), dtype=torch.int32)
    with pytest.raises(ModelError, match=r"bn1.num_batches_tracked is torch.int32 in the model and torch.int64 in"):
        load(tmp_path / "sim.qsdk", narrow)
    with pytest.raises(
        ConfigError, match=r"holds a sim of an nn.Module; pass the float module: qsdk.load\(path, model\)"
    ):
        load(tmp_path / "sim.qsdk")
    save(sim_at("onnx"), tmp_path / "onnx.qsdk")
    with pytest.raises(ConfigError, match=r"holds its own ONNX model; call qsdk.load\(path\) without a module"):
        load(tmp_path / "onnx.qsdk", Islands())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    for door in DOORS:
        save(sim_at(door), folder / f"{door}.qsdk")
    return {door: folder / f"{door}.qsdk" for door in DOORS}


@both
@pytest.mark.parametrize("cut", [0, 1, 100, -1, -30, 0.5])
def test_a_truncated_file_is_named(door, cut, files, tmp_path):
    data = files[door].read_bytes()
    path = tmp_path / "cut.qsdk"
    path.write_bytes(data[: int(len(data) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(FileFormatError, match=r"cut.qsdk is truncated or no saved sim .*write it again with qsdk.save"):
        loaded(path, door)


@both
def test_a_flipped_bit_is_found(door, files, tmp_path):
    data = bytearray(files[door].read_bytes())
    path = tmp_path / "flipped.qsdk"
    for position in np.linspace(40, len(data) * 0.9, 7).astype(int):
        flipped = bytearray(data)
        flipped[position] ^= 0x55
        path.write_bytes(flipped)
        try:
            back = loaded(path, door)
        except FileFormatError:
            continue
        # a byte of the archive that says nothing, such as a time
        assert np.array_equal(outputs(back), outputs(sim_at(door)))


def _rewritten(source: Path, target: Path, change) -> Path:
    """A copy of an archive with some parts changed; None drops one."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def _part(replacement, *names):
    return lambda name, content: replacement if name in names else content


def _manifest(**facts):
    def change(name, content):
        return json.dumps({**json.loads(content), **facts}) if name == "manifest.json" else content

    return change


def _facts(**changed):
    def change(name, content):
        if name != "manifest.json":
            return content
        manifest = json.loads(content)
        return json.dumps({**manifest, "facts": {**manifest["facts"], **changed}})

    return change


@pytest.mark.spread(31)
@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_facts(methods={"method": "magic"}), "is damaged"),
        (_facts(methods={"wrong": 1}), "is damaged"),
        (_manifest(format="other"), "is no qsdk.sim file; write one with qsdk.save"),
        (_manifest(version=99), "has version 99, this qsdk reads up to 1; update qsdk"),
        (_manifest(version=True), "has version True"),
        (_manifest(config={"weight": "int77"}), "is damaged"),
        (_manifest(facts={}), "is damaged"),
        (_manifest(door="window"), "a sim of an unknown kind 'window'; update qsdk"),
        (_part(None, "manifest.json"), "is truncated or no saved sim"),
        (_part(b"{", "manifest.json"), "is no qsdk.sim file"),
        (_part(None, "plan.json"), "is damaged"),
        (_part(b"{}", "plan.json"), "is damaged"),
        (_part(b"\xff", "encodings.json"), "is damaged"),
        (_part(b"{}", "encodings.json"), "encodings.json in .* is no qsdk.encodings"),
        (_part(None, "weights.pt", "model.onnx"), "has no weights.pt|model.onnx is missing or damaged"),
        (_part(b"12345", "weights.pt", "model.onnx"), "damaged"),
        (_part(b"12345", "example.pt", "model.onnx"), "damaged"),
    ],
)
def test_a_damaged_part_is_named(door, change, message, files, tmp_path):
    path = _rewritten(files[door], tmp_path / "bad.qsdk", change)
    with pytest.raises(FileFormatError, match=message):
        loaded(path, door)


def test_other_files_are_named(tmp_path):
    (tmp_path / "text.qsdk").write_text("hello")
    with zipfile.ZipFile(tmp_path / "zip.qsdk", "w") as archive:
        archive.writestr("a.txt", "hello")
    torch.save({"a": torch.ones(1)}, tmp_path / "torch.qsdk")
    for name, message in (
        ("none.qsdk", r"there is no file .*none.qsdk; check the path, or write one with qsdk.save"),
        ("text.qsdk", "is truncated or no saved sim"),
        ("zip.qsdk", "is truncated or no saved sim"),
        ("torch.qsdk", "is truncated or no saved sim"),
    ):
        with pytest.raises(FileFormatError, match=message):
            load(tmp_path / name, Islands())


class _Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("evil"),)


@pytest.mark.slow
def test_a_file_never_runs_code(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"args": (_Evil(),), "kwargs": {}}, tmp_path / "evil.pt")
    evil = (tmp_path / "evil.pt").read_bytes()
    for part in ("example.pt", "weights.pt"):
        path = _rewritten(
            files["torch"], tmp_path / "bad.qsdk", lambda name, content, part=part: evil if name == part else content
        )
        with pytest.raises(FileFormatError, match="damaged"):
            load(path, Islands())
    assert not (tmp_path / "evil").exists()


def test_what_cannot_be_saved_says_why_and_leaves_the_old_file(tmp_path):
    pair = Pair(seeded(2, 4), seeded(2, 4))
    example = ((seeded(2, 4), seeded(2, 4)), {"a": seeded(2, 4), "b": [seeded(2, 4)]}, pair, seeded(1))
    path = tmp_path / "sim.qsdk"
    path.write_text("old")
    with pytest.raises(ExportError, match=r"the example cannot be saved as plain data.*use tensors, numbers"):
        save(calibrated(Containers(), example), path)
    patterned = sim_at("onnx", w8a8().pattern(Pattern("Root", op("Sqrt", op("Abs", "x")))))
    with pytest.raises(ConfigError, match="a file cannot hold the patterns Root; save the config without"):
        save(patterned, path)
    with pytest.raises(ExportError, match="create the folder"):
        save(sim_at("onnx"), tmp_path / "none" / "sim.qsdk")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@both
def test_a_plan_survives_json(door):
    sim = rich(door)
    back = read_plan(json.loads(json.dumps(plan_to_json(sim.plan))))
    assert back == sim.plan
    assert different_sites(back, sim.plan) == []
    sim.set_precision("fc1", qsdk.float32)
    assert set(different_sites(back, sim.plan)) >= {"fc1:weight", "relu3:output"}
    assert isinstance(sim, qsdk.QuantSim) == (door == "torch")
