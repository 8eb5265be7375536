"""Writing files so that nothing is ever half-written: temporary files beside the target, then renames.

Several files that belong together are staged first; the one that is renamed last makes the others count.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from qsdk.core.errors import ExportError

if sys.platform != "win32":
    import fcntl

_TOKEN = r"[0-9a-f]{16}"
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)


class Stage:
    """Files under temporary names in the folder of `target`, until `commit` gives them their own.

    Attributes:
        target: the file that is renamed last; a symbolic link keeps pointing where it did.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._open: dict[Path, int] = {}

    def write(self, write: Callable[[Path], None]) -> Path:
        """Call `write(temporary_path)` to produce a file, and return that path."""
        temporary = self._new()
        write(temporary)
        return temporary

    def commit(self, renames: Sequence[tuple[Path, Path]], *, drop: Callable[[], Collection[Path]] = tuple) -> None:
        """Rename staged files in order, then remove the files that `drop` names, without other commits in between."""
        for _, final in renames:
            _require_replaceable(final)
        with _locked(self.target.parent):
            for temporary, final in renames:
                temporary.replace(final)
            for path in drop():
                with contextlib.suppress(OSError):  # the new files are in place; a leftover does no harm
                    path.unlink()

    def close(self) -> None:
        """Remove what was not committed."""
        for temporary, descriptor in self._open.items():
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            os.close(descriptor)
        self._open.clear()

    def _new(self) -> Path:
        temporary = self.target.with_name(f".{self.target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with _locked(self.target.parent):
                if not self._open:
                    _remove_abandoned(self.target)
                # it stays open and locked: a temporary file without a lock was left by a process that died
                self._open[temporary] = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                _lock(self._open[temporary])
        except OSError as error:
            raise ExportError(
                f"cannot write {self.target}: {error.strerror}; create the folder {self.target.parent} or choose a "
                "writable one"
            ) from error
        return temporary


@contextlib.contextmanager
def staging(path: str | os.PathLike[str]) -> Iterator[Stage]:
    """Open a stage beside `path`; files that are not committed are removed at the end."""
    target = Path(os.path.realpath(path))
    _require_replaceable(target)
    stage = Stage(target)
    try:
        yield stage
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error}; choose a folder with room and write access") from error
    finally:
        stage.close()


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Call `write(temporary_path)` to produce a file in `path`'s folder, then rename it to `path`.

    A symbolic link keeps pointing where it did; new files have the mode that the process's umask gives.
    """
    with staging(path) as stage:
        stage.commit([(stage.write(write), stage.target)])


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically; see `write_atomically`."""
    write_atomically(path, partial(_write, data=data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path` atomically; see `write_atomically`."""
    write_bytes(path, text.encode())


def write_with_companions(
    path: str | os.PathLike[str], data: bytes, companions: Mapping[str | os.PathLike[str], str | bytes]
) -> None:
    """Write `data` to `path` and others beside it or elsewhere; `path` appears last, so that it commits the others."""
    with staging_with(path, companions) as (stage, others):
        stage.commit([*others, (stage.write(partial(_write, data=data)), stage.target)])


@contextlib.contextmanager
def staging_with(
    path: str | os.PathLike[str], companions: Mapping[Any, str | bytes | IO[bytes]]
) -> Iterator[tuple[Stage, list[tuple[Path, Path]]]]:
    """Open a stage beside `path`, and stage its companions in their own folders; yield the stage and the renames."""
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(staging(path))
        others: list[tuple[Path, Path]] = []
        for name, held in companions.items():
            final = Path(os.path.realpath(name))
            if final in (stage.target, *(taken for _, taken in others)):
                raise ExportError(f"{name} is a link to {final}, which is written as well; remove the link")
            # a rename never crosses folders, which may be on different disks
            own = stage if final.parent == stage.target.parent else stack.enter_context(staging(final))
            content = held.encode() if isinstance(held, str) else held
            write = partial(_write, data=content) if isinstance(content, bytes) else partial(_copy, source=content)
            others.append((own.write(write), final))
        yield stage, others


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _copy(path: Path, source: IO[bytes]) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file)


def _require_replaceable(path: Path) -> None:
    """Raise an error if the target exists and is no ordinary file: root could even replace a device."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # there is no file, or writing raises the error
        return
    if stat.S_ISDIR(mode):
        raise ExportError(f"{path} is a directory; give the name of a file to write")
    if not stat.S_ISREG(mode):
        what = next((name for holds, name in _KINDS if holds(mode)), "no ordinary file")
        raise ExportError(f"{path} is {what}, and only ordinary files are replaced; give another name")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock for which every other process that stages files in this folder waits."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; on file systems without locks, do nothing."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote `target`."""
    name = re.compile(rf"\.{re.escape(target.name)}\.{_TOKEN}\.tmp")
    for entry in os.scandir(target.parent):
        if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError):
                descriptor = os.open(entry.path, os.O_RDWR)
                try:
                    if _lock(descriptor, wait=False):
                        os.unlink(entry.path)
                finally:
                    os.close(descriptor)
