"""Functions that a user names on the command line, as `FILE.py:function`."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsdk.core.errors import ConfigError


def names_function(text: str) -> bool:
    """Return whether a text has the form `FILE.py:function`."""
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def load_function(text: str, option: str) -> Callable[..., Any]:
    """Run a Python file, whose folder is searched for what it imports, and return a function of it."""
    if not names_function(text):
        raise ConfigError(f"{option} {text} is not of the form FILE.py:function")
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{option} {text}: there is no file {path}; check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option} {text}: {path} cannot be run as Python")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does
        raise ConfigError(f"{option} {text}: {path} raises {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        held = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{option} {text}: {path} has no function {name}; it has {', '.join(held) or 'none'}")
    return found  # type: ignore[no-any-return]
