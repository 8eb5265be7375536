"""`qsdk sensitivity` names the modules that a file was exported from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qsdk.cli import main
from qsdk.commands.quantize import made_module


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.conv2(torch.relu(self.conv1(x))))


def test_inputs_of_a_module_are_called_as_its_forward_calls_them(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text("""
import torch
from torch import nn

class Sum(nn.Module):
    def forward(self, left, right):
        return left + right

class Any(nn.Module):
    def forward(self, *given):
        return sum(given)

def alone():
    return Sum()

def pair():
    return Sum(), (torch.ones(2, 3), torch.ones(2, 3))

def named():
    return Sum(), {"right": torch.ones(2, 3), "left": torch.ones(2, 3)}

def more():
    return Any(), (torch.ones(2), torch.ones(2))
""")
    names = {
        name: [item.name for item in made_module(f"{file}:{name}").inputs]
        for name in ("alone", "pair", "named", "more")
    }
    assert names == {
        "alone": ["left"],
        "pair": ["left", "right"],
        "named": ["right", "left"],
        "more": ["given", "input1"],
    }


def test_rows_show_paths_of_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(48, 4)).eval()
    torch.onnx.export(model, (torch.randn(4, 3, 4, 4),), tmp_path / "float.onnx", dynamo=True, verbose=False)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(8, 3, 4, 4)).astype(np.float32))
    capsys.readouterr()
    assert main(["sensitivity", str(tmp_path / "float.onnx"), "--data", str(tmp_path / "x.npy"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    weights = {row["module"]: row["layer"] for row in rows if row["kind"] == "weights"}
    assert sorted(weights) == ["0.conv1", "0.conv2", "1.conv1", "1.conv2", "3"]
    assert weights["0.conv1"] == "node_conv2d"
    activations = {(row["layer"], row["module"]) for row in rows if row["kind"] == "activations"}
    assert activations >= {("input", ""), ("node_relu", "0"), ("node_relu_1", "0")}  # two ReLUs of one module
    skipped = ["--config", "w4a8", "--skip", "0.conv1"]
    assert main(["sensitivity", str(tmp_path / "float.onnx"), "--data", str(tmp_path / "x.npy"), *skipped]) == 0
    assert " 0.conv1 " not in capsys.readouterr().out
