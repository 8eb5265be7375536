"""`qsdk compare` on files and folders."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from qdq_models import convnet

from qsdk.cli import main

IMAGES = np.random.default_rng(0).normal(size=(20, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("compare")
    onnx.save(convnet(), home / "float.onnx")
    np.savez(home / "images.npz", x=IMAGES)
    assert run(home, "quantize", "float.onnx", "model.onnx", "--data", "images.npz") == 0
    return home


def run(folder: Path, *arguments: str) -> int:
    return main([str(folder / a) if (folder / a).exists() or a.endswith((".onnx", ".npz")) else a for a in arguments])


def changed(model: ModelProto) -> tuple[ModelProto, str]:
    """Return the model with a convolution whose weights are all 0, and the name of its result."""
    dead = next(node for node in model.graph.node if node.op_type == "Conv")
    stored = next(tensor for tensor in model.graph.initializer if tensor.name == dead.input[1])
    values = onnx.numpy_helper.to_array(stored)
    stored.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(values), stored.name))
    return model, dead.output[0]


def test_a_file_and_its_quantized_form_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "compare", "float.onnx", "model.onnx", "--data", "images.npz", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["first_off"] is None
    assert report["summary"]["matched"] == len(report["rows"]) > 3
    assert list(report["rows"][0]) == [
        "site",
        "other",
        "layout",
        "max_difference",
        "sqnr_db",
        "max_lsb",
        "own_sqnr_db",
        "off",
    ]


def test_a_fault_gives_exit_code_1_and_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, name = changed(onnx.load(folder / "float.onnx"))
    onnx.save(model, folder / "changed.onnx")
    assert run(folder, "compare", "float.onnx", "changed.onnx", "--data", "images.npz") == 1
    assert f"first_off: {name}\n" in capsys.readouterr().out
    assert run(folder, "compare", "float.onnx", "changed.onnx", "--data", "images.npz", "--tolerance", "1e6") == 0


def test_inputs_of_other_names_are_fed_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(folder / "float.onnx")
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = "image" if name == model.graph.input[0].name else name
    model.graph.input[0].name = "image"
    onnx.save(model, folder / "renamed.onnx")
    assert run(folder, "compare", "float.onnx", "renamed.onnx", "--random", "2", "--shape", "x=2,3,8,8") == 0


def test_folders_and_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, name in (("ours", "relu"), ("theirs", "zz")):
        (folder / side).mkdir()
        np.save(folder / side / f"{name}.npy", IMAGES)
        np.save(folder / side / f"{name}_more.npy", IMAGES)
    assert run(folder, "compare", "ours", "theirs") == 2
    assert "no tensor of side a (2) has the name of one of side b" in capsys.readouterr().err
    assert run(folder, "compare", "ours", "theirs", "--name", "relu=zz") == 0
    assert "matched: 1\n" in capsys.readouterr().out
    assert run(folder, "compare", "ours", "float.onnx") == 2
    assert "--data is missing" in capsys.readouterr().err
    assert run(folder, "compare", "float.onnx", "nowhere.onnx", "--data", "images.npz") == 2
