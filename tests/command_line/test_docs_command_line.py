"""The commands of the guide run as they stand, on a small network."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from qdq_models import classifier

from onnx_backend import validation
from qsdk.cli import main

pytestmark = pytest.mark.usefixtures("exact_products")

GUIDE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "float.onnx")
    np.savez("images.npz", x=np.random.default_rng(0).normal(size=(64, 3, 8, 8)).astype(np.float32))
    (block,) = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    printed = {}
    for line in block.splitlines():
        name, *command = shlex.split(line)
        assert name == "qsdk"
        capsys.readouterr()
        assert main(command) == 0, line
        printed[command[0]] = capsys.readouterr().out
    assert json.loads(printed["validate"])["summary"] == {"errors": 0, "warnings": 0}
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
