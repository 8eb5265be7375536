"""The files and folders that the guides name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
PATHS = re.compile(r"`((?:qsdk|torch_bridge|onnx_backend|tests|benchmarks|scripts|examples)/[\w./-]*)`")


@pytest.mark.parametrize("guide", GUIDES)
def test_the_files_that_a_guide_names_exist(guide: str):
    named = PATHS.findall((ROOT / guide).read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_guide_to_the_architecture_names_files():
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    assert len(PATHS.findall(text)) > 40
