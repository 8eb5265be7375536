"""The README's session runs as it stands, on the demo network."""

import re
import warnings
from pathlib import Path

import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F

from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

ROOT = Path(__file__).parents[2]


def session() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_the_session_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = load()
    images = torch.from_numpy(data.calibration_images[:192])
    labels = torch.from_numpy(data.calibration_labels[:192])
    model = load_pretrained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(model, (images[:2],), "float.onnx", dynamo=True, opset_version=18, verbose=False)
    losses = []

    def train(trained):
        optimizer = torch.optim.Adam(trained.parameters(), lr=2e-4)
        for start in range(0, 192, 64):
            optimizer.zero_grad()
            loss = F.cross_entropy(trained(images[start : start + 64]), labels[start : start + 64])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    names = {"model": model, "example": images[:2], "batches": list(images[:128].split(64)), "train": train}
    exec(compile(session(), "README.md", "exec"), names)

    printed = capsys.readouterr().out
    assert "stem.0:weight" in printed
    assert "passed: True" in printed
    assert len(losses) == 3
    assert all(loss < 1 for loss in losses)
    integer = ort.InferenceSession("model.int.onnx", providers=["CPUExecutionProvider"])
    logits = integer.run(None, {integer.get_inputs()[0].name: data.test_images[:500]})[0]
    assert (logits.argmax(1) == data.test_labels[:500]).mean() > 0.88
    assert (tmp_path / "model.encodings.json").exists()
    opsets = {entry.domain: entry.version for entry in onnx.load("model.onnx").opset_import}
    assert opsets == {"": 21}
    assert names["osim"].coverage().summary["quantized"] > 30


def test_the_readme_shows_the_two_commands_and_they_are_targets():
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command} " in text
        assert f"\n{command}: setup" in makefile
