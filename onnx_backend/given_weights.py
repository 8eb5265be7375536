"""The float values that the user gave, kept for those tensors of an ONNX sim that verbs have changed since."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import IO, Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.sim import OnnxSim
from qsdk.core.errors import FileFormatError
from qsdk.core.sims.sim_file import Part

_FOLDER = "given/"


@contextmanager
def as_given(sim: OnnxSim) -> Iterator[bool]:
    """Set the stored tensors of the sim to the user's own inside the block; yield True if any had changed."""
    if not sim.given.before:  # to restore what is stored already would cost the session
        yield False
        return
    before = sim.snapshot(weights=True)
    _, *rest = before.stored
    sim.restore(replace(before, stored=(sim.given, *rest)))
    try:
        yield True
    finally:
        sim.restore(before)


def parts_of(sim: OnnxSim) -> dict[str, Part]:
    """Return a part of a sim's file for each given value that was replaced since, in that order."""
    return {f"{_FOLDER}{n}": partial(_write, tensor=tensor) for n, tensor in enumerate(sim.given.before.values())}


def take(sim: OnnxSim, names: Any, parts: Mapping[str, bytes], where: str) -> None:
    """Restore the values that `parts_of` wrote into a sim, for the tensors of these names.

    Raises:
        FileFormatError: it is damaged.
    """
    stored = initializers(sim.traced().model.graph)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileFormatError(f"{where} is damaged (given={names!r}); write it again with qsdk.save(sim, path)")
    for number, name in enumerate(names):
        part = f"{_FOLDER}{number}"
        sim.given.before[name] = _read(parts.get(part, b""), stored.get(name), f"{part} in {where}")


def _write(stream: IO[bytes], tensor: TensorProto) -> None:
    values = array(tensor)
    if values.dtype == ml_dtypes.bfloat16:  # which NumPy's format does not know
        values = values.astype(np.float32)
    np.lib.format.write_array(stream, values, allow_pickle=False)


def _read(data: bytes, stored: TensorProto | None, where: str) -> TensorProto:
    try:
        values: Any = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise FileFormatError(f"{where} is damaged ({error}); write it again with qsdk.save(sim, path)") from error
    if stored is None or math.prod(stored.dims) != values.size or values.dtype.kind != "f":
        raise FileFormatError(f"{where} is no tensor of the model beside it; write it again with qsdk.save(sim, path)")
    dtype = helper.tensor_dtype_to_np_dtype(stored.data_type)
    return numpy_helper.from_array(values.astype(dtype), stored.name)
