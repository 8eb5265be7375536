"""The tensors that are alive between two sections of a walk, in memory or, beyond a bound, in a temporary file."""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.proto.lazy_tensors import release

Array = npt.NDArray[Any]
#: a stream, the number of a batch, the name of a tensor
Key = tuple[int, int, str]


class LiveTensors:
    """Arrays by stream, batch and name.

    Attributes:
        held: bytes of those in memory.
    """

    def __init__(self, max_memory: int | None = None) -> None:
        """Start empty; arrays beyond `max_memory` bytes go to a temporary file, which no path leads to."""
        self.held = 0
        self._most = max_memory
        self._arrays: dict[Key, Array] = {}
        self._file: Any = None

    def __contains__(self, key: Key) -> bool:
        return key in self._arrays

    def put(self, key: Key, value: Array) -> None:
        """Keep an array."""
        self.drop(key)
        if self._most is None or self.held + value.nbytes <= self._most or value.nbytes == 0:
            self.held += value.nbytes
            self._arrays[key] = value
        else:
            self._arrays[key] = self._write_to_file(value)

    def get(self, key: Key) -> Array:
        """Return an array; one in the file is read from there."""
        value = self._arrays[key]
        if not isinstance(value, np.memmap):
            return value
        found = np.array(value)
        release(value)
        return found

    def facts(self, key: Key) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return type and shape of an array."""
        return self._arrays[key].dtype, self._arrays[key].shape

    def drop(self, key: Key) -> None:
        """Drop an array."""
        value = self._arrays.pop(key, None)
        if value is not None and not isinstance(value, np.memmap):
            self.held -= value.nbytes

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Drop all arrays that are not wanted, and begin a new file; the old one ends with its last array."""
        for key in [key for key in self._arrays if not wanted(key)]:
            self.drop(key)
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """Drop all arrays."""
        self.keep(lambda _: False)

    def _write_to_file(self, value: Array) -> Array:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="qsdk-")  # noqa: SIM115  # lives as long as its arrays
        file = self._file
        start = file.seek(0, 2)
        start += -start % 64
        file.seek(start)
        file.write(np.ascontiguousarray(value).tobytes())
        file.flush()
        return np.memmap(file, value.dtype, "r", start, value.shape)
