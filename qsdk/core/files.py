"""Writing files so that nothing is ever half-written: temporary files beside the target, then renames.

Several files that belong together are staged first; the one that is renamed last makes the others count.
"""

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from qsdk.core.errors import ExportError

if sys.platform != "win32":
    import fcntl

_TOKEN = r"[0-9a-f]{16}"


class Stage:
    """Files under temporary names in the folder of `target`, until `commit` gives them their own.

    Attributes:
        target: the file that is renamed last; a symbolic link keeps pointing where it did.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._open: dict[Path, int] = {}

    def write(self, write: Callable[[Path], None]) -> Path:
        """Let `write(temporary_path)` produce a file; gives that path."""
        temporary = self._new()
        write(temporary)
        return temporary

    def commit(self, renames: Sequence[tuple[Path, Path]], *, drop: Callable[[], Collection[Path]] = tuple) -> None:
        """Rename staged files in order, then remove what `drop` names; no other commit in this folder comes between."""
        for _, final in renames:
            _refuse_folder(final)
        with _locked(self.target.parent):
            for temporary, final in renames:
                temporary.replace(final)
            for path in drop():
                with contextlib.suppress(OSError):  # the new files are in place; what stays is only litter
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
    """Stage files beside `path`; whatever is not committed is gone afterwards.

    Raises:
        ExportError: the folder is missing, full or cannot be written; what was there is left as it was.
    """
    target = Path(os.path.realpath(path))
    _refuse_folder(target)
    stage = Stage(target)
    try:
        yield stage
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error}; choose a folder with room and write access") from error
    finally:
        stage.close()


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write(temporary_path)` produce a file in `path`'s folder, then rename it to `path`.

    A symbolic link keeps pointing where it did; new files have the mode that the process's umask gives.

    Raises:
        ExportError: the folder is missing or cannot be written; the target is left as it was.
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
    """Write `data` to `path` and others beside it or elsewhere; `path` appears last, so that it commits the others.

    Raises:
        ExportError: something cannot be written; all is left as it was.
    """
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(staging(path))
        others = []
        for name, held in companions.items():
            # a rename never crosses folders, which may be on different disks
            near = Path(os.path.realpath(name)).parent == stage.target.parent
            own = stage if near else stack.enter_context(staging(name))
            content = held.encode() if isinstance(held, str) else held
            others.append((own.write(partial(_write, data=content)), Path(name) if near else own.target))
        stage.commit([*others, (stage.write(partial(_write, data=data)), stage.target)])


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a directory; give the name of a file to write")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep every other process that stages files in this folder waiting."""
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
    """Lock an open file until it is closed; some file systems know no locks, and go without."""
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
