"""From a checkpoint folder to an exported model, in one call and in one command."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from checkpoints import digests, token_rows, write_checkpoint
from safetensors.torch import load_file, save_file
from tiny_decoders import VOCABULARY
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification

import qsdk
from qsdk.cli import main
from qsdk.commands import quantize as checkpoint
from qsdk.commands.data.tokens import token_batches
from qsdk.verbs.checkpoints import RUN, apply_verbs

DATA = token_rows(3, 12, VOCABULARY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", num_hidden_layers=1)


@pytest.mark.slow
def test_the_written_folder_runs_texts_of_any_length(folder: Path, tmp_path: Path):
    (folder / "tokenizer.json").write_text("{}")
    config = qsdk.weight_only("int4", block_size=16)
    report = qsdk.quantize_checkpoint(folder, tmp_path / "out", config, verbs=["gptq"], data=DATA, progress=False)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.onnx", "model.encodings.json", "config.json", "tokenizer.json"} <= written
    assert RUN not in written
    assert report.summary["verbs"] == "gptq"
    assert report.summary["resumed"] is False
    (folder / "tokenizer.json").unlink()
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx")
    for rows, length in ((1, 5), (3, 20)):
        (logits, *_) = session.run(None, {"input_ids": np.zeros((rows, length), np.int64)})
        assert logits.shape == (rows, length, VOCABULARY)


@pytest.mark.slow
def test_without_data_only_weights_can_be_quantized(folder: Path, tmp_path: Path):
    with pytest.raises(qsdk.ConfigError, match=r"quantizes activations.*pass data=.*weight_only"):
        qsdk.quantize_checkpoint(folder, tmp_path / "out", "w4a16", progress=False)
    report = qsdk.quantize_checkpoint(folder, tmp_path / "out", qsdk.weight_only("int4"), progress=False)
    assert report.summary["by_type"]
    assert (tmp_path / "out" / "model.onnx").exists()


def run_cli(*arguments: object) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "qsdk.cli", *map(str, arguments)], env=environment)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_writes_the_same_files(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "llama", num_hidden_layers=2)
    np.save(tmp_path / "ids.npy", torch.cat([row["input_ids"] for row in DATA]).numpy())
    command = ["quantize", folder, tmp_path / "killed", "--config", "weight_only", "--block-size", "16"]
    command += ["--data", tmp_path / "ids.npy", "--verbs", "awq,gptq"]
    first = run_cli(*command)
    steps = tmp_path / "killed" / RUN / "1-gptq"
    while first.poll() is None and len(list(steps.glob("step-*.npz"))) < 3:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    solved = {path.name: path.stat().st_mtime_ns for path in steps.glob("step-*.npz")}
    assert len(solved) >= 3
    assert not (tmp_path / "killed" / "model.onnx").exists()

    assert run_cli(*command).wait() == 0
    command[2] = tmp_path / "whole"
    assert run_cli(*command).wait() == 0
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_a_verb_that_keeps_no_checkpoint_runs_behind_one_that_does(tmp_path: Path):
    torch.manual_seed(0)
    x = torch.randn(32, 6)
    sim = qsdk.quantize(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    reports = apply_verbs(sim, [x], ["seq_mse", "equalize"], run=tmp_path)
    assert all(report.rows for report in reports)
    assert [path.name for path in tmp_path.iterdir()] == ["0-seq_mse"]


def test_the_command_needs_data_for_ranges_and_verbs_alone(folder: Path, tmp_path: Path, capsys):
    command = ["quantize", str(folder), str(tmp_path / "model.gguf"), "--format", "gguf", "--block-size", "32"]
    assert main([*command, "--config", "w4a16", "--verbs", "gptq"]) == 2
    assert "--verbs gptq needs data: give --data with text or token ids" in capsys.readouterr().err
    assert main([*command[:3], "--config", "w8a8"]) == 2
    assert "--config w8a8 quantizes activations, and needs data" in capsys.readouterr().err
    assert main([*command, "--config", "w4a16"]) == 0  # activations of 16 bits stay float in llama.cpp
    said = capsys.readouterr()
    assert "random tokens" not in said.err
    assert "Q4_0" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_the_command_takes_text_and_says_what_it_cannot_do(folder: Path, tmp_path: Path, capsys):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("once upon a time " * 50)
    assert main(["quantize", str(folder), str(out), "--random", "1", "--labels", "labels.txt"]) == 2
    assert "--labels is not for a checkpoint folder" in capsys.readouterr().err
    assert main(["quantize", str(folder), str(out), "--data", str(text)]) == 2
    assert "holds no tokenizer that can be read" in capsys.readouterr().err
    np.save(tmp_path / "ids.npy", np.full((1, 4), VOCABULARY))
    assert main(["quantize", str(folder), str(out), "--data", str(tmp_path / "ids.npy")]) == 1
    assert f"ids {VOCABULARY} to {VOCABULARY}; those of the model are 0 to" in capsys.readouterr().err
    np.save(tmp_path / "ids.npy", np.zeros((1, 4), np.float32))
    assert main(["quantize", str(folder), str(out), "--data", str(tmp_path / "ids.npy")]) == 1
    assert "token ids are integers" in capsys.readouterr().err
    assert not out.exists()


def test_folders_of_token_ids_and_texts_are_read_by_name(folder: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(qsdk.FileFormatError, match=r"empty holds no text \(\.txt, \.md\) and no token ids \(\.npy\)"):
        token_batches(str(folder), [str(tmp_path / "empty")], length=4, most=None)
    for number in (2, 0, 1):
        np.save(tmp_path / f"{number}.npy", np.full((2, 4), number))
    (tmp_path / "notes.json").write_text("{}")
    batches = token_batches(str(folder), [str(tmp_path)], length=4, most=5)
    assert [int(batch["input_ids"][0, 0]) for batch in batches] == [0, 0, 1, 1, 2]


def test_the_command_writes_a_folder_of_compressed_tensors(folder: Path, tmp_path: Path, monkeypatch, capsys):
    called: list[Any] = []
    report = qsdk.Report("", [], {})
    monkeypatch.setattr(checkpoint, "quantize_checkpoint", lambda *a, **options: called.append((a, options)) or report)
    command = ["quantize", str(folder), str(tmp_path / "out"), "--random", "1", "--config", "weight_only"]
    assert main([*command, "--format", "compressed-tensors"]) == 0
    ((_, _, config), options) = called[0]
    assert (options["format"], config.only_linear) == ("compressed-tensors", True)
    assert main(command) == 0
    assert called[1][1]["format"] == "onnx"


@pytest.mark.slow
def test_a_folder_of_compressed_tensors_comes_from_a_folder(folder: Path, tmp_path: Path):
    config = qsdk.weight_only("int8").for_dialect("compressed-tensors")
    report = qsdk.quantize_checkpoint(folder, tmp_path, config, data=DATA, progress=False, format="compressed-tensors")
    assert (report.summary["format"], report.summary["verbs"]) == ("pack-quantized", "none")
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert not (tmp_path / RUN).exists()
    ids = DATA[0]["input_ids"]
    with torch.no_grad():
        again, given = (AutoModelForCausalLM.from_pretrained(path)(ids).logits.float() for path in (tmp_path, folder))
    assert float((again - given).norm() / given.norm()) < 0.05


def test_an_incomplete_checkpoint_is_refused(folder: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    index = copy / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    del listed["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    index.write_text(json.dumps(listed))
    for path in copy.glob("*.safetensors"):
        tensors = {k: v for k, v in load_file(path).items() if k != "model.layers.0.mlp.up_proj.weight"}
        save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        qsdk.ModelError, match=r"no complete checkpoint.*missing weights model\.layers\.0\.mlp\.up_proj"
    ):
        qsdk.quantize(copy, None, "w8a8")


@pytest.mark.parametrize("pattern", ["*.safetensors", "*.index.json"])
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, pattern: str):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    damaged = sorted(copy.glob(pattern))[0]
    damaged.write_bytes(damaged.read_bytes()[:-7])  # as a download that was cut off leaves it
    with pytest.raises(qsdk.ModelError, match=rf"^{re.escape(damaged.name)} of .* is damaged; download it again, or"):
        qsdk.quantize(copy, None, "w8a8")


def test_the_checkpoint_itself_is_not_written_over(folder: Path):
    with pytest.raises(qsdk.ConfigError, match="is the checkpoint itself"):
        qsdk.quantize_checkpoint(folder, folder, "w4a16", data=DATA)


def test_a_folder_of_no_checkpoint_is_refused_by_what_it_lacks(tmp_path: Path):
    with pytest.raises(qsdk.FileFormatError, match=r"config\.json.*give the folder of a checkpoint"):
        qsdk.quantize(tmp_path, None, "w8a8")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "llama"}))
    with pytest.raises(qsdk.ConfigError, match="transformers has no class NoSuchModel"):
        qsdk.quantize(tmp_path, None, "w8a8")


def changed(folder: Path, target: Path, **settings: object) -> Path:
    """Return a copy of a checkpoint with other settings in its config."""
    path = Path(shutil.copytree(folder, target)) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": [5]}, "does not name the class of the model"),
        ({"architectures": [None]}, "does not name the class of the model"),
        ({"architectures": [["a"]]}, "does not name the class of the model"),
        ({"architectures": "LlamaForCausalLM"}, "does not name the class of the model"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10,000,000, which no model has"),
        (
            {"num_hidden_layers": 10**5},
            r"more than [\d,]+ parameters, its files hold \d+; correct its numbers of layers",
        ),
        ({"num_labels": 10**9}, "num_labels is 1,000,000,000"),
        ({"attn_implementation": "someone/kernels"}, "asks for the attention 'someone/kernels'.* known are eager"),
        ({"text_config": {"_attn_implementation": "a/b"}}, "asks for the attention 'a/b'"),
    ],
)
def test_settings_of_strangers_are_refused_at_once(folder: Path, tmp_path: Path, settings: dict, message: str):
    copy = changed(folder, tmp_path / "copy", **settings)
    started = time.perf_counter()
    with pytest.raises(qsdk.FileFormatError, match=rf"config\.json.*{message}"):
        qsdk.quantize(copy, None, qsdk.weight_only("int8"))
    assert time.perf_counter() - started < 5  # it is 0.2 s on a quiet machine, and was minutes


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", '{"a": 1, "a": 2}'])
def test_a_config_that_is_no_settings_is_refused(folder: Path, tmp_path: Path, text: str):
    copy = changed(folder, tmp_path / "copy")
    (copy / "config.json").write_text(text)
    with pytest.raises(qsdk.FileFormatError, match=r"config\.json .*read it yourself|config\.json names 'a' twice"):
        qsdk.quantize(copy, None, qsdk.weight_only("int8"))


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "{top}/outside.safetensors", "a/../../outside.safetensors"]
)
def test_an_index_that_names_files_outside_of_its_folder_is_refused(folder: Path, tmp_path: Path, outside: str):
    copy = changed(folder, tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    shard = sorted(set(listed["weight_map"].values()))[0]
    shutil.move(copy / shard, tmp_path / "outside.safetensors")
    named = {k: outside.format(top=tmp_path) if v == shard else v for k, v in listed["weight_map"].items()}
    index.write_text(json.dumps({**listed, "weight_map": named}))
    with pytest.raises(qsdk.FileFormatError, match=r"index\.json names '.*', a file outside of its folder"):
        qsdk.quantize(copy, None, qsdk.weight_only("int8"))


def test_a_device_among_the_files_is_refused_and_a_link_to_a_file_taken(folder: Path, tmp_path: Path):
    copy = changed(folder, tmp_path / "copy")
    shard = sorted(copy.glob("*.safetensors"))[0]
    kept = shutil.move(shard, tmp_path / "blob")
    shard.symlink_to(kept)  # as the hub's cache lays them
    assert qsdk.quantize(copy, None, qsdk.weight_only("int8")).coverage().rows
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(qsdk.FileFormatError, match=rf"{shard.name} is no ordinary file, but a pipe or a device"):
        qsdk.quantize(copy, None, qsdk.weight_only("int8"))


@pytest.mark.slow
def test_a_cache_crosses_the_edges_of_the_file_in_float32(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "llama", num_hidden_layers=1)
    sim = qsdk.quantize(folder, None, qsdk.weight_only("int4", kv_cache="int8"))
    qsdk.calibrate(sim, [sim.example.kwargs], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [sim.example.kwargs], progress=False).summary["passed"]
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert {value.type for value in session.get_outputs()} == {"tensor(float)"}
    qsdk.save(sim, tmp_path / "saved.qsdk")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    again = qsdk.load(tmp_path / "saved.qsdk", model)
    assert qsdk.check_parity(again, tmp_path / "model.onnx", [sim.example.kwargs], progress=False).summary["passed"]


@pytest.mark.slow
def test_an_encoder_from_a_folder_gets_a_mask_in_its_example(tmp_path: Path):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path)
    sim = qsdk.quantize(tmp_path, None, "w8a8")
    assert set(sim.example.kwargs) == {"input_ids", "attention_mask"}
