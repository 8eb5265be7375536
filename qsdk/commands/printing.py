"""Reports on standard output, as tables or as one JSON document; errors in the shell's words; paths to write."""

import ast
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsdk.core.errors import ConfigError
from qsdk.core.report import Report

_OTHER_NAMES = {"float_model": "float", "names": "name", "shapes": "shape"}
#: what the shell has no option for, or one of another meaning
_NO_OPTIONS = {"model", "a", "b", "out", "run", "input", "method"}
#: an argument of Python: its name, and its value where one is shown
_ARGUMENT = re.compile(r"""\b([a-z_]+)=("[^"]*"|'[^']*'|\{[^}]*\}|\[[^\]]*\]|[\w.%-]*)""")


def show(report: Report, *, as_json: bool) -> None:
    """Print the whole of a report; as JSON it is `{"title", "rows", "summary"}`, with infinities and NaN as strings."""
    print(json.dumps(_plain(report.to_dict()), indent=1) if as_json else report.full())


def in_shell_words(message: str, options: Mapping[str, Any]) -> str:
    """Return an error with the options of a command in place of the arguments of Python that they stand for."""

    def option_of(found: re.Match[str]) -> str:
        name, value = _OTHER_NAMES.get(found[1], found[1]), found[2]
        if name not in options or name in _NO_OPTIONS or value == "None":
            return found[0]
        option = f"--{name.replace('_', '-')}"
        if value.startswith("{"):
            return f"{option} {_pair(value)}"
        shown = value.strip("\"'")
        return option if not value or value.startswith("[") else f"{option} {shown}"

    return _ARGUMENT.sub(option_of, message)


def _pair(mapping: str) -> str:
    """Return the first entry of a mapping as options take it, such as `x=1,3,224,224`."""
    try:
        name, value = next(iter(ast.literal_eval(mapping).items()))
    except (ValueError, SyntaxError, StopIteration):  # words in place of an example
        return "NAME=VALUE"
    return shlex.quote(f"{name}={value if isinstance(value, str) else ','.join(map(str, value))}")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def require_output(path: str) -> None:
    """Raise an error for an output path that cannot be written, before minutes of work are spent."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise ConfigError(f"cannot write: {path or 'the path'} is a directory; give the name of a file")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write {path}: create the folder {target.parent} first, or choose another")
