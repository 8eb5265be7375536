"""Writing files so that nothing is ever half-written: a temporary file beside the target, then a rename."""

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from qsdk.core.errors import ExportError


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write(temporary_path)` produce a file in `path`'s folder, then rename it to `path`.

    A symbolic link keeps pointing where it did; new files have the mode that the process's umask gives.

    Raises:
        ExportError: the folder is missing or cannot be written; the target is left as it was.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ExportError(f"{target} is a directory; give the name of a file to write")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise ExportError(
            f"cannot write {target}: {error.strerror}; create the folder {target.parent} or choose a writable one"
        ) from error
    try:
        write(temporary)
        temporary.replace(target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error}; choose a folder with room and write access") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically; see `write_atomically`."""
    write_atomically(path, lambda temporary: _write(temporary, data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path` atomically; see `write_atomically`."""
    write_bytes(path, text.encode())


def write_with_companions(
    path: str | os.PathLike[str], data: bytes, companions: Mapping[str | os.PathLike[str], str]
) -> None:
    """Write `data` to `path` and texts to files beside it; `path` appears last, so that it commits the others.

    Raises:
        ExportError: something cannot be written; `path` is left as it was, and so are companions if `path` is at fault.
    """

    def write(temporary: Path) -> None:
        temporary.write_bytes(data)
        for companion, text in companions.items():
            write_text(companion, text)

    write_atomically(path, write)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
