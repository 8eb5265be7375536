"""The examples, imported from the folder that users read them in."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[3] / "examples"


def example(name: str) -> ModuleType:
    """Return an example as a module that has just been imported."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
