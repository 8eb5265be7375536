"""What the copies of an object share, a temporary folder, and what each of them has of its own, a lock."""

import shutil
import tempfile
import weakref
from _thread import RLock
from pathlib import Path
from typing import Any


class PerCopyLock(RLock):  # type: ignore[misc]  # may be subclassed, although typeshed says it is final
    """A lock that its holder may take again, and that copies of the holder, also in another process, do not share.

    Taking and releasing it runs no Python code, so that no interrupt can come in between and leave it taken.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return PerCopyLock, ()


class SharedFolder:
    """A temporary folder that is removed when nothing holds it any more; deep copies of its holder hold it too.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="qsdk-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __deepcopy__(self, memo: object) -> "SharedFolder":
        return self
