"""Reading files that others may have made or damaged.

Only ordinary files, and none that unpacks to far more than its size.
"""

import os
import stat
from pathlib import Path
from zipfile import ZipFile

from qsdk.core.errors import FileFormatError

_SLACK = 2**20  # bytes


def require_readable(path: str | os.PathLike[str], remedy: str) -> Path:
    """Return the path of an ordinary file.

    Raises:
        FileFormatError: there is no file, or it is a folder, or a pipe or device, which could block. The message ends
            with `remedy`.
    """
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
    """Return the text of a UTF-8 file.

    Raises:
        FileFormatError: it cannot be read, or is no text. `remedy` ends the message.
    """
    result = require_readable(path, remedy)
    try:
        return result.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"cannot read {result}: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{result} is no text; {remedy}") from error


def require_modest_size(archive: ZipFile, size: int, where: str, *, times: int = 1) -> None:
    """Raise an error for an archive whose contents are far larger than itself, before it is unpacked.

    Args:
        archive: open.
        size: of the archive, in bytes.
        where: its name, for messages.
        times: their allowed size as a multiple; 1 for uncompressed archives.

    Raises:
        FileFormatError: they are larger.
    """
    held = sum(info.file_size for info in archive.infolist())
    if held > times * size + _SLACK:
        raise FileFormatError(
            f"{where} has {size:,} bytes and would unpack to {held:,}, which no file of this kind does; write it again"
        )


def first_line_of(error: BaseException) -> str:
    """Return the first line of an exception's message, else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
