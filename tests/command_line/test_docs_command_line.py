"""The commands of the guide run as they stand, on a small network."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from qdq_models import classifier

import qsdk
from onnx_backend import validation
from qsdk.cli import main

pytestmark = pytest.mark.usefixtures("exact_products")

FLOAT = qsdk.w8a8().skip("*")
MINE = """
import torch

def make_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))

def largest(outputs, labels):
    return -abs(outputs[0]).max()
"""
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "command_line.md").read_text(encoding="utf-8")


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "float.onnx")
    np.savez("images.npz", x=np.random.default_rng(0).normal(size=(64, 3, 8, 8)).astype(np.float32))
    with np.load("images.npz") as held:
        np.save("images.npy", held["x"])
    np.save("labels.npy", np.argmax(qsdk.quantize("float.onnx", None, FLOAT).run(np.load("images.npy"))[0], axis=1))
    Path("mine.py").write_text(MINE)
    for name in "abcde":
        Path("pictures", name).mkdir(parents=True)
        Image.new("RGB", (20, 10), f"#{name * 6}").save(f"pictures/{name}/1.png")
    (block,) = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    printed = {}
    for line in block.splitlines():
        name, *command = shlex.split(line)
        assert name == "qsdk"
        capsys.readouterr()
        assert main(command) == 0, line
        printed[command[0]] = capsys.readouterr().out
    assert json.loads(printed["validate"])["summary"] == {"errors": 0, "warnings": 0}
    assert printed["sensitivity"].startswith("Sensitivity")
    assert "passed: True" in printed["parity"]
    assert (tmp_path / "model.html").exists()
    assert onnx.load("model.int.onnx").graph.node


def test_the_guide_lists_every_rule():
    listed = set(re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE))
    folder = Path(validation.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    written = {
        rule
        for text in sources
        for rule in re.findall(r'(?:error|warning)\([^,()]*(?:\([^()]*\))?[^,()]*, "(\w+)"', text)
    }
    assert len(written) > 10
    assert written == listed
