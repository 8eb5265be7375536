"""The README runs from its top as it stands, and shows the commands that exist."""

import re
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from pages import ROOT, blocks_of, difference, refreshed, run_page

from qsdk.demo.run import run_demo


@pytest.mark.usefixtures("exact_products")
def test_the_first_lines_print_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page("README.md", until="text")


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
def test_the_readme_runs_from_its_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.chdir(tmp_path)
    names = run_page("README.md", write=request.config.getoption("--write-pages"))
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


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
def test_the_table_of_the_demo_is_what_it_prints(request: pytest.FixtureRequest):
    made = [f"| {row['network']} | {row['accuracy']} | {row['bytes']:,} |" for row in run_demo().rows]
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^\| .+ \| [\d.]+ % \| [\d,]+ \|$", text, re.MULTILINE)
    if request.config.getoption("--write-pages"):
        written = refreshed("\n".join(made), "\n".join(shown))
        page.write_text(text.replace("\n".join(shown), written), encoding="utf-8")
        shown = written.splitlines()
    assert difference("\n".join(made), "\n".join(shown)) is None


def test_the_first_block_is_short():
    first = next(block for block in blocks_of("README.md") if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 20


def test_the_readme_shows_the_two_commands_and_they_are_targets():
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command} " in text
        assert f"\n{command}: setup" in makefile
