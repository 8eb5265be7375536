"""A folder of dumped tensors: one file per tensor, or per tensor and sample."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qsdk.core.comparing.place import Array, Place
from qsdk.core.errors import DataError, FileFormatError
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.read_files import read_array

_RAW = (".raw", ".bin")
_AGAIN = "dump it again"
#: `Result_0`, `batch1`, `7`; and not `layer1`, which is a part of names
_SAMPLE = re.compile(r"^(?:(?:result|batch|sample|image|input|frame)[_-]?)?(\d+)$", re.IGNORECASE)


class DumpedFolder:
    """The tensors that a device dumped: `.npy` files, or raw ones whose dtype and shape the other side tells.

    A name is a file's path in the folder without its suffix. Sub-folders `Result_0` (as `qnn-net-run` writes them),
    `batch_0`, `sample_0`, `image_0`, `input_0`, `frame_0` or `0` hold one sample or batch each, in the order of their
    numbers; without them, the samples lie along the first axis of each file.
    """

    def __init__(self, folder: Path) -> None:
        """List the files."""
        self.folder = folder
        samples = sorted((path for path in folder.iterdir() if _is_sample(path)), key=_number)
        self._by_sample = bool(samples)
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
        self._dtypes: dict[str, np.dtype[Any]] = {}

    @property
    def places(self) -> Sequence[Place]:
        """Return a place for each name, in order of the names: a folder does not tell the order of execution."""
        return [Place(name, values=(name, name.rpartition("/")[2])) for name in self._files]

    def is_raw(self, name: str) -> bool:
        """Return whether the files of a tensor say nothing about its shape."""
        return self._files[name][0].suffix in _RAW

    def whole(self, name: str) -> Array:
        """Return all that was dumped of a tensor; raw files as a row of float32."""
        raw, files = self.is_raw(name), self._files[name]
        found = self._joined(
            name, [np.fromfile(path, np.float32) if raw else read_array(path, _AGAIN) for path in files]
        )
        if not found.size:
            raise DataError(f"{files[0]} holds no values of {name!r}; {_AGAIN}")
        return found

    def take(self, name: str, like: Array, encoding: Encoding | None) -> Array:
        """Return the next values of a tensor, as many as the other side has; integers are codes of its encoding."""
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
            left.append(self._values(name, path, like, encoding))
            self._next[name] = at + 1
        return self._cut(name, wanted)

    def _values(self, name: str, path: Path, like: Array, encoding: Encoding | None) -> Array:
        if self.is_raw(name):
            if name not in self._dtypes:  # the first file begins with the first sample
                self._dtypes[name] = _dtype_of_raw(path, like, encoding)
            return _decoded(np.fromfile(path, self._dtypes[name]), encoding, path)
        values = _decoded(read_array(path, _AGAIN), encoding, path)
        alone = self._by_sample and values.ndim == like.ndim - 1  # a sample without the batch axis
        return values[None] if alone else values

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
        return self._joined(name, taken)

    def _joined(self, name: str, parts: Sequence[Array]) -> Array:
        """Return arrays of several files as one, along the first axis."""
        if len(parts) == 1:
            return parts[0]
        try:
            return np.concatenate([np.atleast_1d(part) for part in parts])
        except ValueError as error:
            shapes = ", ".join(str(shape) for shape in dict.fromkeys(part.shape for part in parts))
            raise DataError(
                f"{self.folder}: the files of {name!r} hold {shapes}, which do not fit; {_AGAIN}"
            ) from error


def _is_sample(path: Path) -> bool:
    return path.is_dir() and _SAMPLE.match(path.name) is not None


def _number(path: Path) -> int:
    found = _SAMPLE.match(path.name)
    return int(found[1]) if found else 0


def _dtype_of_raw(path: Path, like: Array, encoding: Encoding | None) -> np.dtype[Any]:
    """Return the dtype of a raw file: float32, float16 or codes of the site.

    The size must be that of whole samples. Where several dtypes fit, it is the one in which the first sample is the
    most like that of the other side, in whatever order its values lie.
    """
    held = path.read_bytes()
    sample = like.size // len(like) if like.ndim and len(like) else max(like.size, 1)
    codes = None if encoding is None else storage_type(encoding.dtype)
    fitting = [
        np.frombuffer(held, dtype)
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), codes)
        if dtype is not None and held and len(held) % (dtype.itemsize * sample) == 0
    ]
    if not fitting:
        raise DataError(
            f"{path} has {len(held)} bytes, the other side {sample} values per sample: neither float32 nor float16 nor "
            "codes of the site fit; dump this tensor in float32"
        )
    decoded = [_decoded(values, encoding, path) for values in fitting]
    wanted = np.sort(like.reshape(-1)[:sample])
    with np.errstate(all="ignore"):
        unlike = [float(np.sum((np.sort(values[:sample]) - wanted).astype(np.float64) ** 2)) for values in decoded]
    return fitting[int(np.argmin([value if np.isfinite(value) else np.inf for value in unlike]))].dtype


def _decoded(values: Array, encoding: Encoding | None, path: Path) -> Array:
    """Return values in float32; integers are codes of the site."""
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype.kind == "b":
        raise DataError(f"{path} holds truth values, which no grid has codes for; dump floats")
    if encoding is None:
        raise DataError(
            f"{path} holds {values.dtype}, and the other side has no quantized site here, whose codes these could be; "
            "dump floats, or compare with the Q/DQ file or its sim"
        )
    return encoding.dequantize(values)
