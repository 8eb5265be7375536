"""The guide to the command line lists every rule of `qsdk validate`."""

import re
from pathlib import Path

from onnx_backend import runtimes, validation
from onnx_backend.profiling import speed

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "command_line.md").read_text(encoding="utf-8")


def test_the_guide_lists_every_rule():
    listed = set(re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE))
    files = [
        Path(speed.__file__),
        *(path for room in (validation, runtimes) for path in Path(room.__file__).parent.glob("*.py")),
    ]
    sources = [path.read_text(encoding="utf-8") for path in files]
    written = {
        rule
        for text in sources
        for rule in re.findall(r'(?:error|warning|note)\([^,()]*(?:\([^()]*\))?[^,()]*, "(\w+)"', text)
    }
    assert len(written) > 10
    assert written == listed
