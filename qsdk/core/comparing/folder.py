"""A folder of dumped tensors: one file per tensor, or per tensor and sample."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qsdk.core.comparing.place import Array, Place
from qsdk.core.errors import DataError, FileFormatError
from qsdk.core.numerics.encoding import Encoding, storage_type

_RAW = (".raw", ".bin")
_SAMPLE = re.compile(r"^(?:[A-Za-z]+[_-]?)?\d+$")  # Result_0, batch1, 7
_ENDS_OF_SAMPLE = 12


class DumpedFolder:
    """The tensors that a device dumped: `.npy` files, or raw ones whose dtype and shape the other side tells.

    A name is a file's path in the folder without its suffix. Sub-folders whose names end in a number
    (`Result_0/conv1.raw`, as `qnn-net-run` writes them) hold one sample or batch each, in the order of these numbers;
    without them, the samples lie along the first axis of each file.
    """

    def __init__(self, folder: Path) -> None:
        """List the files.

        Raises:
            FileFormatError: the folder holds no dumped tensor.
        """
        self.folder = folder
        samples = sorted((path for path in folder.iterdir() if _is_sample(path)), key=_number)
        self._files: dict[str, list[Path]] = {}
        for root in samples or [folder]:
            for path in sorted(root.rglob("*")):
                if path.suffix in (".npy", *_RAW) and path.is_file():
                    name = path.relative_to(root).with_suffix("").as_posix()
                    self._files.setdefault(name, []).append(path)
        if not self._files:
            raise FileFormatError(f"the folder {folder} holds no .npy, .raw or .bin file; give one of dumped tensors")
        self._read: dict[str, list[Array]] = {}  # what is left of each tensor, file by file
        self._next: dict[str, int] = {}

    @property
    def places(self) -> Sequence[Place]:
        """Return a place for each name, in order of the names: a folder does not tell the order of execution."""
        return [Place(name, values=(name, name.rpartition("/")[2])) for name in self._files]

    def is_raw(self, name: str) -> bool:
        """Return whether the files of a tensor say nothing about its shape."""
        return self._files[name][0].suffix in _RAW

    def whole(self, name: str) -> Array:
        """Return all that was dumped of a tensor; raw files as a row of float32."""
        parts = [_loaded(path, np.dtype(np.float32)) for path in self._files[name]]
        return parts[0] if len(parts) == 1 else np.concatenate([np.atleast_1d(part) for part in parts])

    def take(self, name: str, like: Array, encoding: Encoding | None) -> Array:
        """Return the next values of a tensor, as many as the other side has.

        Args:
            name: of the tensor.
            like: the values of the other side on the same batch.
            encoding: of the grid that integers in the file are codes of.

        Raises:
            DataError: the files end before that, or their size fits no dtype; names the file.
        """
        left, wanted = self._read.setdefault(name, []), like.size
        while sum(part.size for part in left) < wanted:
            at = self._next.get(name, 0)
            if at == len(self._files[name]):
                have = sum(part.size for part in left)
                raise DataError(
                    f"{self._files[name][-1]}: {have} values are left of {name!r}, the other side has {wanted}; dump "
                    "the same samples in the same order"
                )
            path = self._files[name][at]
            left.append(_decoded(_loaded(path, self._dtype(path, wanted, encoding)), encoding, path))
            self._next[name] = at + 1
        return self._cut(name, wanted)

    def _dtype(self, path: Path, wanted: int, encoding: Encoding | None) -> np.dtype[np.generic]:
        """Return the dtype of a raw file: by its bytes per value, where it holds one sample of those wanted, or all."""
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty; dump it again")
        codes = None if encoding is None else storage_type(encoding.dtype)
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), codes):
            if dtype is None:
                continue
            count, rest = divmod(size, dtype.itemsize)
            if not rest and count == wanted and not (dtype == np.float16 and codes is not None and codes.itemsize == 2):
                return np.dtype(dtype)
        if size % 4 == 0 and (wanted % (size // 4) == 0 or (size // 4) % wanted == 0):
            return np.dtype(np.float32)
        raise DataError(
            f"{path} has {size} bytes, the other side {wanted} values: neither float32, float16 nor codes of the site "
            "fit; dump this tensor in float32"
        )

    def _cut(self, name: str, wanted: int) -> Array:
        """Take a number of values off the front; the first axis is cut where that is possible."""
        left = self._read[name]
        taken: list[Array] = []
        missing = wanted
        while missing:
            part = left.pop(0)
            if part.size > missing:
                row = part.size // len(part) if part.ndim else 1
                if missing % row:
                    raise DataError(
                        f"{self.folder}: {name!r} has the shape {part.shape}, of which {missing} values are no whole "
                        "samples; dump the samples along the first axis"
                    )
                left.insert(0, part[missing // row :])
                part = part[: missing // row]
            taken.append(part)
            missing -= part.size
        if len(taken) == 1:
            return taken[0]
        return np.stack(taken) if taken[0].ndim == 0 else np.concatenate(taken)


def _is_sample(path: Path) -> bool:
    return path.is_dir() and _SAMPLE.match(path.name) is not None


def _number(path: Path) -> tuple[int, str]:
    digits = re.search(r"\d+$", path.name[-_ENDS_OF_SAMPLE:])
    return int(digits.group()) if digits else 0, path.name


def _loaded(path: Path, dtype: np.dtype[np.generic]) -> Array:
    try:
        if path.suffix in _RAW:
            return np.fromfile(path, dtype)
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise FileFormatError(f"{path} cannot be read as an array ({error}); dump it again") from error


def _decoded(values: Array, encoding: Encoding | None, path: Path) -> Array:
    """Return values in float32; integers are codes of the site."""
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if encoding is None:
        raise DataError(
            f"{path} holds {values.dtype}, and the other side has no quantized site here, whose codes these could be; "
            "dump floats, or compare with the Q/DQ file or its sim"
        )
    return encoding.dequantize(values)
