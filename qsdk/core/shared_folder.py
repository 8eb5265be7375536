"""A temporary folder that belongs to several objects: the copies of one that keeps files in it."""

import shutil
import tempfile
import weakref
from pathlib import Path


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
