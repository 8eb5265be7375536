"""The house only gets smaller: every figure of `scripts/house_size.py` stays below its ceiling."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "house_size.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house_size", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house_size() -> ModuleType:
    return script()


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(house_size):
    source = '"""A module."""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Two\n    lines."""\n    return x\n'
    assert house_size.code_lines(source) == 3


@pytest.mark.slow  # `make check` runs it
def test_no_figure_of_the_house_is_above_its_ceiling(house_size):
    ceilings = json.loads(house_size.CEILINGS.read_text("utf-8"))
    sizes = house_size.sizes()
    assert sizes.keys() == ceilings.keys()
    above = {name: (size, ceilings[name]) for name, size in sizes.items() if size > ceilings[name]}
    assert not above, f"larger than allowed, (size, ceiling): {above}; delete, or unify, before you add"
