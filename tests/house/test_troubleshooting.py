"""The messages that the page of troubleshooting explains are messages of qsdk."""

import ast
import re
from functools import cache

import pytest
from pages import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^\| the message says \|.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
QUOTED = sorted({quoted for table in TABLES for quoted in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)})


@cache
def texts() -> list[str]:
    """Every text in the packages, with a space where a value is filled in."""
    found = []
    for package in ("qsdk", "torch_bridge", "onnx_backend"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize("message", QUOTED)
def test_an_explained_message_is_one_of_qsdk(message: str):
    wanted = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
    assert any(wanted.search(text) for text in texts())


def test_many_messages_are_explained():
    assert len(QUOTED) > 18
