"""Reading files that others may have made or damaged: ordinary ones, and none that unpacks to far more than it is."""

import os
import stat
from pathlib import Path
from zipfile import ZipFile

from qsdk.core.errors import FileFormatError

_SLACK = 2**20  # bytes


def require_readable(path: str | os.PathLike[str], remedy: str) -> Path:
    """Give the path of an ordinary file.

    Raises:
        FileFormatError: there is none, or a folder, or what would be waited for: a pipe, a device. `remedy` ends it.
    """
    found, where = Path(path), os.fspath(path)
    try:
        mode = found.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        said = "there is no file" if not found.is_symlink() else "nothing is where the link points:"
        raise FileFormatError(f"{said} {where}; {remedy}") from error
    if stat.S_ISDIR(mode):
        raise FileFormatError(f"{where} is a folder; {remedy}")
    if not stat.S_ISREG(mode):
        raise FileFormatError(f"{where} is no ordinary file, but a pipe or a device; {remedy}")
    return found


def text_of(path: str | os.PathLike[str], remedy: str) -> str:
    """Read a file of UTF-8 text.

    Raises:
        FileFormatError: it cannot be read, or is no text. `remedy` ends the message.
    """
    found = require_readable(path, remedy)
    try:
        return found.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"cannot read {found}: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{found} is no text; {remedy}") from error


def require_unpacked(archive: ZipFile, size: int, where: str, *, times: int = 1) -> None:
    """Refuse an archive whose contents are far larger than it is, before they are unpacked.

    Args:
        archive: open.
        size: of the archive, in bytes.
        where: its name, for messages.
        times: how many times as large they may be; 1 for what is stored uncompressed.

    Raises:
        FileFormatError: they are larger.
    """
    held = sum(info.file_size for info in archive.infolist())
    if held > times * size + _SLACK:
        raise FileFormatError(
            f"{where} has {size:,} bytes and would unpack to {held:,}, which no file of this kind does; write it again"
        )


def said_by(error: BaseException) -> str:
    """The first line of what an exception says, else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
