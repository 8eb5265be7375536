"""What the format compressed-tensors has no field for, and folders that are not written over."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_decoders import VOCABULARY, decoder
from torch import nn
from transformers.pytorch_utils import Conv1D

import qsdk
from qsdk import QuantConfig
from torch_bridge.compressed import write

W4 = qsdk.weight_only("int4", block_size=32).for_dialect("compressed-tensors")


def x() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def sim_of(model: nn.Module, config: QuantConfig, batch=None):
    batch = x() if batch is None else batch
    sim = qsdk.quantize(model, batch, config)
    qsdk.calibrate(sim, [batch], progress=False)
    return sim


def refusal(sim, folder: Path, **options) -> str:
    with pytest.raises(qsdk.QsdkError) as caught:
        qsdk.export(sim, folder / "out", format="compressed-tensors", **options)
    assert not (folder / "out" / "config.json").exists()
    return str(caught.value)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.two(x) + x


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x))


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (qsdk.w8a8(), r"2:output \(uint8, and it leaves the model\)"),
        (
            qsdk.weight_only("int3").for_dialect("onnx"),
            r"0:weight \(a weight of int3 has no field; int4, int8, float8",
        ),
        (qsdk.weight_only("float8e5m2"), "a weight of float8e5m2 has no field"),
        (qsdk.weight_only("mxint8"), "blocks of mxint8 have no layout; nvfp4, mxfp4, mxfp8 have"),
        (qsdk.weight_only("float8e4m3fn", block_size=16), "blocks of float8 have no field; leave block_size out"),
        (qsdk.weight_only("float4e2m1"), "a weight of float4e2m1 has no field"),
        (
            qsdk.weight_only("int4", block_size=24),
            "blocks of 24 do not divide its 64 input channels; 32, 16, 64, 8, 4, 2 do",
        ),
        (
            QuantConfig(only_linear=True, activation="int16"),
            r"0:weight \(an activation of int16 has no field; int8 and",
        ),
        (QuantConfig(only_linear=True, activation="int8_strict"), "an activation of int8_strict has no field"),
        (QuantConfig(only_linear=True, dynamic_activations=True), "a range found while the model runs"),
        (W4.override("0", activation="float16"), r"1:output \(rounded to float16\)"),
        (W4.override("2", weight="float16"), r"2:weight \(float16 in Gemm; linear layers alone"),
    ],
)
def test_sites_without_a_field(config: QuantConfig, message: str, tmp_path: Path):
    said = refusal(sim_of(two_layers(), config), tmp_path)
    assert "compressed-tensors has no field for" in said
    assert re.search(message, said), said
    assert 'quantize with config.for_dialect("compressed-tensors"), and skip what is named here' in said


@pytest.mark.slow
def test_models_without_a_field(tmp_path: Path):
    full = qsdk.w8a8(symmetric_activations=True).for_dialect("compressed-tensors")
    said = refusal(sim_of(Branches(), full), tmp_path)
    assert "x:input (int8, and Add reads it)" in said
    said = refusal(sim_of(Shared(), full), tmp_path)
    assert "one:weight (two.weight shares it, and has no codes of its own)" in said
    said = refusal(sim_of(CalledTwice(), full), tmp_path)
    assert "layer:weight (it is called with inputs of several scales)" in said
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 8))
    said = refusal(sim_of(convolution, qsdk.weight_only("int8"), torch.randn(2, 3, 8, 8)), tmp_path)
    assert "0:weight (int8 in Conv; linear layers alone are quantized)" in said
    # a float convolution beside quantized linear layers is no obstacle
    report = qsdk.export(
        sim_of(convolution, qsdk.weight_only("int8").for_dialect("compressed-tensors"), torch.randn(2, 3, 8, 8)),
        tmp_path / "float convolution",
        format="compressed-tensors",
    )
    assert report.summary["layers"] == 1


def test_conv1d_of_gpt2_has_no_field(tmp_path: Path):
    said = refusal(
        sim_of(nn.Sequential(Conv1D(32, 64)), qsdk.weight_only("int8").for_dialect("compressed-tensors")), tmp_path
    )
    assert "0:weight (int8 in Gemm; linear layers alone are quantized)" in said


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)))


def test_a_table_shared_with_the_last_layer(tmp_path: Path):
    said = refusal(sim_of(Tied(), qsdk.weight_only("int8"), torch.arange(8)[None]), tmp_path)
    assert "table:weight (head.weight shares it, and has no codes of its own)" in said
    assert "norm:weight (int8 in LayerNormalization; linear layers alone are quantized)" in said


def test_folded_batch_norms_and_uncalibrated_sims(tmp_path: Path):
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).eval()
    assert "of this sim is folded into other weights" in refusal(sim_of(model, W4), tmp_path)
    sim = qsdk.quantize(two_layers(), x(), W4)
    assert "these sites have no encoding" in refusal(sim, tmp_path) or "calibrate" in refusal(sim, tmp_path)
    report = qsdk.export(sim, tmp_path / "float", format="compressed-tensors", uncalibrated="float")
    assert report.summary["ignored"] == ["0", "2"]


def test_options_of_onnx(tmp_path: Path):
    sim = sim_of(two_layers(), W4)
    assert refusal(sim, tmp_path, opset=20, shapes={"x": (1, 64)}).startswith("opset, shapes: for ONNX alone")
    with pytest.raises(qsdk.ConfigError, match="format='pickle'; choose 'onnx', 'compressed-tensors'"):
        qsdk.export(sim, tmp_path / "out", format="pickle")
    with pytest.raises(qsdk.ConfigError, match="max_shard_bytes= is for format='compressed-tensors'"):
        qsdk.export(sim, tmp_path / "model.onnx", max_shard_bytes=5)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert "not ONNX models; quantize the nn.Module" in refusal(qsdk.quantize(tmp_path / "model.onnx"), tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch):
    def missing(name: str):
        if name.startswith("safetensors"):
            raise ModuleNotFoundError(name)
        return import_module(name)

    sim = sim_of(two_layers(), W4)
    monkeypatch.setattr(write, "import_module", missing)
    assert "pip install 'qsdk[safetensors]'" in refusal(sim, tmp_path)


def test_shards_and_what_an_earlier_export_left(tmp_path: Path):
    sim = sim_of(two_layers(), W4)
    first = qsdk.export(sim, tmp_path, format="compressed-tensors", max_shard_bytes=600)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {name: value for shard in shards for name, value in load_file(tmp_path / shard).items()}
    assert index["weight_map"] == {name: shard for shard in shards for name in load_file(tmp_path / shard)}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in held.values())
    assert first.summary["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    qsdk.export(sim, tmp_path, format="compressed-tensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == held.keys()
    assert all(torch.equal(again[name], value) for name, value in held.items())


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch):
    qsdk.export(sim_of(two_layers(), W4), tmp_path, format="compressed-tensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class FullDisk:
        written = 0

        def save_file(self, tensors, path, metadata):
            self.written += 1
            if self.written == 2:
                raise import_module("safetensors").SafetensorError("No space left on device")
            save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(write, "_library", FullDisk)
    with pytest.raises(qsdk.ExportError, match="No space left on device; choose a folder with room"):
        qsdk.export(sim_of(two_layers(), W4), tmp_path, format="compressed-tensors", max_shard_bytes=600)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folders_of_others_are_left_alone(tmp_path: Path):
    sim = sim_of(two_layers(), W4)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    assert "holds another checkpoint (model.safetensors); empty it, or choose another" in refusal(sim, tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(qsdk.ExportError, match="file: File exists; choose a writable one"):
        qsdk.export(sim, tmp_path / "file", format="compressed-tensors")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_the_folder_of_the_model_and_its_tokenizer(tmp_path: Path):
    source = tmp_path / "float"
    decoder("Llama", num_hidden_layers=1).save_pretrained(source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    model = type(decoder("Llama", num_hidden_layers=1)).from_pretrained(source)
    sim = sim_of(model.eval(), W4, {"input_ids": torch.randint(0, VOCABULARY, (1, 8))})
    with pytest.raises(qsdk.ExportError, match="holds the checkpoint that the model was read from"):
        qsdk.export(sim, source, format="compressed-tensors")
    qsdk.export(sim, tmp_path / "out", format="compressed-tensors")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["model_type"] == "llama"


def test_tensors_that_a_checkpoint_holds_otherwise(tmp_path: Path):
    """transformers renames tensors of some architectures on the way in; the file would have the wrong names."""

    class Renaming:
        def reverse_transform(self):
            return self

        def rename_source_key(self, name):
            return name.replace("0", "first"), "0" if name.startswith("0") else None

    sim = sim_of(two_layers(), W4)
    sim.model._weight_conversions = [Renaming()]
    assert "0.weight has another form in a checkpoint of Sequential than in the module" in refusal(sim, tmp_path)
