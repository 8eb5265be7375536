"""Every page of the documentation runs from its top as it stands, and prints what it shows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks_of, difference, pages, refreshed, run_page

RUN = {"python", "bash"}
NEEDS = {"docs/guides/runtimes.md": ("openvino", "onnxruntime_qnn"), "docs/guides/litert.md": ("ai_edge_litert",)}
RUNNING = [page for page in pages() if page != "README.md" and RUN & {block.language for block in blocks_of(page)}]


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("page", RUNNING)
def test_a_page_runs_from_its_top(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package, reason=f"{package} has no wheel for this system")
    monkeypatch.chdir(tmp_path)
    run_page(page, write=request.config.getoption("--write-pages"))


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page: str):
    """A block of Python that does not run has no place on a page: `py` and the like would hide it from the test."""
    known = RUN | {"text", "sh", "json", "c", "ini"}
    assert [block for block in blocks_of(page) if block.language not in known] == []


@pytest.mark.parametrize(
    ("printed", "shown", "fine"),
    [
        ("accuracy 0.941\n", "accuracy 0.938", True),
        ("accuracy 0.741\n", "accuracy 0.938", False),
        ("17.3 dB\n", "17.2 dB", True),
        ("17.3 dB\n", "16.7 dB", False),
        ("steps 1\n", "steps 0", False),
        ("steps 0.0\n", "steps 0", False),
        ("a  b\n-----  ---\n", "a b\n--  --", True),
        ("one\ntwo\nthree\n", "one\nthree", False),
        ("one\ntwo\nthree\n", "one\n...\nthree", True),
        ("one\ntwo\n", "two\none", False),
        ("bytes: 145,345 in all\n", "bytes: 145,345 ...", True),
        ("bytes: 145,345 in all\n", "bytes: 144,300 ...", False),
        ("30%\n", "31%", False),
        ("layer1.conv2 is off\n", "layer1.conv1 is off", False),
    ],
)
def test_what_counts_as_the_same_output(printed: str, shown: str, fine: bool):
    assert (difference(printed, shown) is None) is fine


@pytest.mark.parametrize(
    ("printed", "shown", "written"),
    [
        ("accuracy 0.941\n", "accuracy 0.938\n", "accuracy 0.938\n"),
        ("145345 bytes\n", "144300 bytes\n", "145345 bytes\n"),
        ("one 1\ntwo 2 of 3\n4 of 5\n", "...\ntwo 3 ...\n4 of 6\n", "...\ntwo 2 ...\n4 of 5\n"),
        ("two 2\n", "...\none 1\n", "...\none 1\n"),
    ],
)
def test_a_page_takes_the_numbers_that_were_printed(printed: str, shown: str, written: str):
    """`--write-pages`; what is left out stays out, and other words fail as they do without it."""
    assert refreshed(printed, shown) == written


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_its_search_finds_the_names_of_other_tools(tmp_path: Path):
    """As `make docs` does: links, anchors and docstrings hold, and nothing is fetched."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    text = "\n".join(entry["text"] for entry in found)
    assert [name for name in ("QuantizationSimModel", "prepare_pt2e", "quantize_static") if name not in text] == []
    assert 'href="../glossary.html#sim"' in (tmp_path / "guides" / "qat.html").read_text()
    fetched = re.compile(r"""(?:src|<link[^>]*href)=["']?https?://""")
    assert [str(page) for page in tmp_path.rglob("*.html") if fetched.search(page.read_text())] == []
