"""The README runs from its top as it stands, and shows the commands that exist."""

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from pages import ROOT, blocks_of, run_page


@pytest.mark.usefixtures("exact_products")
def test_the_first_lines_print_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page("README.md", until="text")


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
def test_the_readme_runs_from_its_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("README.md")
    data = names["data"]
    integer = ort.InferenceSession("model.int.onnx", providers=["CPUExecutionProvider"])
    feed = integer.get_inputs()[0].name
    logits = integer.run(None, {feed: data.test_images[:500]})[0]
    assert (logits.argmax(1) == data.test_labels[:500]).mean() > 0.88
    assert (tmp_path / "model.encodings.json").exists()
    assert (tmp_path / "model.html").exists()
    opsets = {entry.domain: entry.version for entry in onnx.load("model.onnx").opset_import}
    assert opsets == {"": 21}
    assert names["osim"].coverage().summary["quantized"] > 30


def test_the_first_block_is_short():
    first = next(block for block in blocks_of("README.md") if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 20


def test_the_readme_shows_the_two_commands_and_they_are_targets():
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command} " in text
        assert f"\n{command}: setup" in makefile
