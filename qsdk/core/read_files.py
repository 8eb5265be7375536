"""Reading files that others may have made or damaged: text, JSON and arrays.

Only ordinary files, and none that unpacks to far more than its size. Whatever is wrong with one is a `FileFormatError`.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import FileFormatError, QsdkError

_SLACK = 2**20  # bytes


def require_readable(path: str | os.PathLike[str], remedy: str) -> Path:
    """Return the path of an ordinary file."""
    result, where = Path(path), os.fspath(path)
    try:
        mode = result.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        problem = "there is no file" if not result.is_symlink() else "nothing is where the link points:"
        raise FileFormatError(f"{problem} {where}; {remedy}") from error
    if stat.S_ISDIR(mode):
        raise FileFormatError(f"{where} is a folder; {remedy}")
    if not stat.S_ISREG(mode):
        raise FileFormatError(f"{where} is no ordinary file, but a pipe or a device; {remedy}")
    return result


def read_text(path: str | os.PathLike[str], remedy: str) -> str:
    """Return the text of a UTF-8 file."""
    result = require_readable(path, remedy)
    try:
        return result.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"cannot read {result}: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{result} is no text; {remedy}") from error


def parse_json(text: str | bytes, where: str, remedy: str = "write it again") -> Any:
    """Return the values in JSON text."""

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if repeated:
            raise FileFormatError(f"{where} names {repeated[0]!r} twice; keep one of them")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=no_repeats)
    except FileFormatError:
        raise
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise FileFormatError(f"{where} is truncated or no JSON at {place} ({error.msg}); {remedy}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise FileFormatError(f"{where} holds what no file of this kind has: {error}; {remedy}") from error
    except RecursionError as error:
        raise FileFormatError(f"{where} is nested too deeply for a file of its kind; {remedy}") from error


def read_array(path: str | os.PathLike[str], remedy: str, *, mapped: bool = False) -> npt.NDArray[Any]:
    """Return the array of an `.npy` file: of numbers or truth values, `mapped` to stay in the file till needed."""
    result = require_readable(path, remedy)
    try:
        with result.open("rb") as stream:
            np.lib.format.read_magic(stream)  # anything else NumPy takes for an archive or a pickle
        array = np.load(result, mmap_mode="r", allow_pickle=False)  # mapped: a shape beyond the file takes no memory
    except Exception as error:  # NumPy raises many types, those of Python's tokenizer too
        raise _no_array(result, error, remedy) from error
    _require_numbers(array, os.fspath(result), remedy)
    return array if mapped else np.array(array)


def read_archive(
    path: str | os.PathLike[str], remedy: str, choose: Callable[[Sequence[str]], Iterable[str]]
) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of an `.npz` file by name: those that `choose` returns of all names; its errors are passed on."""
    result = require_readable(path, remedy)
    try:
        with ZipFile(result):
            pass  # what is no archive is read as something else by NumPy
        with np.load(result, allow_pickle=False) as held:
            arrays = {name: np.asarray(held[name]) for name in choose(held.files)}
    except QsdkError:
        raise
    except Exception as error:  # as above
        raise _no_array(result, error, remedy) from error
    for name, array in arrays.items():
        _require_numbers(array, f"{name!r} in {result}", remedy)
    return arrays


def _no_array(path: Path, error: Exception, remedy: str) -> FileFormatError:
    return FileFormatError(f"{path} cannot be read as an array ({first_line_of(error)}); {remedy}")


def _require_numbers(array: npt.NDArray[Any], where: str, remedy: str) -> None:
    if array.dtype.kind not in "biuf":
        raise FileFormatError(f"{where} holds {array.dtype}, which are no numbers of a network; {remedy}")


def require_modest_size(archive: ZipFile, size: int, where: str) -> None:
    """Raise an error for an archive whose contents are far larger than its `size` in bytes, before it is unpacked."""
    held = sum(info.file_size for info in archive.infolist())
    if held > size + _SLACK:
        raise FileFormatError(
            f"{where} has {size:,} bytes and would unpack to {held:,}, which no file of this kind does; write it again"
        )


def first_line_of(error: BaseException) -> str:
    """Return the first line of an exception's message, else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
