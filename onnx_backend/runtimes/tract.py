"""tract on the CPU: an engine of its own, in Rust, that gives the integers of `portable` files once more."""

import ctypes
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from onnx import ModelProto

from onnx_backend.proto.model_io import with_weights
from onnx_backend.runtimes.runner import SizedModel, installed_package
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, ModelError


class TractRunner:
    """A model that tract optimizes for the sizes of the values that it is run on."""

    def __init__(self, model: ModelProto) -> None:
        """Keep a model until its first run, which optimizes it."""
        self.tract = installed_package("tract", "tract")
        self.bindings = installed_package("tract.bindings", "tract")
        self.version = version("tract")
        self.title = f"tract {self.version}"
        self.sized = SizedModel(with_weights(model))
        self._run: Any = None

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        given = self.sized.given(feeds)
        fixed = self.sized.for_sizes_of(given)
        try:
            if fixed is not None:
                self._run = self._opened(fixed, given)
            found = self._run.run([self.tract.Value.from_numpy(given[name]) for name in self.sized.inputs])
        except Exception as error:  # what its bindings raise is no common class
            raise ModelError(f"{self.title} cannot run the model: {' '.join(str(error).split())[:600]}") from error
        return [self._array(value) for value in found]

    def _opened(self, model: ModelProto, given: Mapping[str, Array]) -> Any:
        if not self.version.startswith("0.22."):
            # from 0.23 on a pass over regions of interest takes exponential time on integers that are split and joined
            raise ConfigError("qsdk runs tract 0.22; install it: pip install 'qsdk[tract]'")
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            path.write_bytes(model.SerializeToString())
            opened = self.tract.onnx().model_for_path(path)
        for index, name in enumerate(self.sized.inputs):
            dtype, sizes = given[name].dtype, given[name].shape
            opened.set_input_fact(index, ",".join([*map(str, sizes), f"{dtype.kind}{8 * dtype.itemsize}"]))
        return opened.into_optimized().into_runnable()

    def _array(self, value: Any) -> Array:
        """Return a value of any type; the method of its own reads what it holds as float32."""
        kind, rank, data = ctypes.c_uint32(), ctypes.c_size_t(), ctypes.c_void_p()
        sizes = ctypes.POINTER(ctypes.c_size_t)()
        where = map(ctypes.byref, (kind, rank, sizes, data))
        self.bindings.check(self.bindings.lib.tract_value_as_bytes(value.ptr, *where))
        dtype, shape = np.dtype(f"{'buif'[kind.value >> 4]}{kind.value & 15}"), sizes[: rank.value]
        held = ctypes.string_at(data, int(np.prod(shape)) * dtype.itemsize)
        return np.frombuffer(held, dtype).reshape(shape).copy()
