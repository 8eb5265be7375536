"""Write a firmware program as a file: a NumPy archive, which holds everything, or a C header."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backend.integer.convert import IntegerResult
from onnx_backend.integer.firmware.header import header
from onnx_backend.integer.firmware.program import FirmwareProgram, firmware_program
from onnx_backend.integer.ir.context import FIXED_SIZES
from qsdk.core.errors import ConfigError, IntegerError

_SUFFIXES = (".npz", ".h")
_PROGRAM = "program.json"


def require_firmware_path(path: str | os.PathLike[str] | None, *others: str | os.PathLike[str]) -> None:
    """Refuse a path without a known suffix, or one that is among the other files to write; None is fine.

    Raises:
        ConfigError: the suffix is neither `.npz` nor `.h`, or the path is taken.
    """
    if path is None:
        return
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"firmware={os.fspath(path)!r} ends in no known format; end it in .npz or .h")
    if os.path.realpath(path) in [os.path.realpath(other) for other in others]:
        raise ConfigError(f"firmware={os.fspath(path)!r} is the model's own path; give it another name")


def require_straight(result: IntegerResult) -> None:
    """Refuse a conversion whose operations are not in a straight line.

    Raises:
        IntegerError: a Scan is among them, which firmware programs do not have.
    """
    for node in result.model.graph.node:
        if node.op_type == "Scan":
            raise IntegerError(
                f"firmware has no loops, and the length of the sequence of {node.name!r} is dynamic; {FIXED_SIZES}"
            )


def firmware_file(result: IntegerResult, path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of the file `path`: a NumPy archive for `.npz`, a C99 header for `.h`.

    Raises:
        ConfigError: the suffix is another, or the conversion is not one to integers alone.
        IntegerError: a header cannot express an operation; it is named.
    """
    require_firmware_path(path)
    require_straight(result)
    program = firmware_program(result)
    return archive(program) if Path(path).suffix == ".npz" else header(program).encode()


def archive(program: FirmwareProgram) -> bytes:
    """Return a program as the bytes of a NumPy archive.

    The member `program.json` is a 0-dimensional array with the text of `Program.to_dict()` as JSON, and in it `arrays`,
    which leads from the names of arrays to the members that hold them. Equal programs have equal bytes.
    """
    members = {name: f"array_{index}" for index, name in enumerate(program.arrays)}
    text = json.dumps({**program.to_dict(), "arrays": members}, indent=1)
    contents: dict[str, Any] = {_PROGRAM: np.array(text)}
    contents |= {members[name]: values for name, values in program.arrays.items()}
    file = io.BytesIO()
    np.savez_compressed(file, **contents)
    return file.getvalue()
