"""Writing files so that nothing is ever half-written: a temporary file beside the target, then a rename."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from qsdk.core.errors import ExportError


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write(temporary_path)` produce a file in `path`'s folder, then rename it to `path`.

    Raises:
        ExportError: the folder is missing or cannot be written; the target is left as it was.
    """
    target = Path(path)
    if target.is_dir():
        raise ExportError(f"{target} is a directory; give the name of a file to write")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise ExportError(
            f"cannot write {target}: {error.strerror}; create the folder {target.parent} or choose a writable one"
        ) from error
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
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


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
