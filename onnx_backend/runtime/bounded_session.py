"""Sessions of models whose large tensors are yet to be computed: in memory if they fit, else from a temporary file."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.proto.lazy_tensors import LargeTensor, with_large
from onnx_backend.proto.write_file import spool_large_tensors
from onnx_backend.runtime.providers import Providers
from onnx_backend.runtime.session import simulation_session


def bounded_session(
    model: ModelProto,
    large: Mapping[str, LargeTensor],
    in_memory: int,
    *,
    providers: Providers,
    shares_memory: bool = False,
) -> ort.InferenceSession:
    """Open a session in the settings of the simulation.

    Args:
        model: with stubs for its large tensors, which are put into it if they fit.
        large: these, by name.
        in_memory: bytes of them that the model may hold.
        providers: to run on.
        shares_memory: see `simulation_session`.

    Raises:
        FileFormatError: the runtime cannot load the model.
        ExportError: the temporary file cannot be written.
    """
    if sum(tensor.nbytes for tensor in large.values()) <= in_memory:
        return simulation_session(with_large(model, large), shares_memory=shares_memory, providers=providers)
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:  # the runtime keeps its mapping of the file
        spooled = spool_large_tensors(model, large, Path(folder) / "weights")
        return simulation_session(spooled, shares_memory=shares_memory, providers=providers)
