"""Hand a model of any size to ONNX Runtime: weights that lie in files are mapped from there, not copied."""

import tempfile
from pathlib import Path

import onnxruntime as ort
from onnx import ModelProto, TensorProto

from onnx_backend.proto.external_data import reference
from onnx_backend.proto.write_file import SINGLE, spool_large_tensors

_FOLDER = "session.model_external_initializers_file_folder_path"


def session_of(
    model: ModelProto, options: ort.SessionOptions, *, disabled: tuple[str, ...] = (), most: int = SINGLE
) -> ort.InferenceSession:
    """Open a session on the CPU; exceptions of the runtime are passed on.

    Args:
        model: it is not changed.
        options: of the session.
        disabled: the optimizers that are not to run.
        most: bytes that are handed over at once; of a larger model, large weights go by way of a temporary file.

    Raises:
        FileFormatError: a file that holds weights has changed since the model was opened, or was never opened.
        ExportError: the temporary file cannot be written.
    """
    if model.ByteSize() <= most:
        return _session(model, options, disabled)
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:  # the runtime keeps its mapping of the file
        return _session(spool_large_tensors(model, {}, Path(folder) / "weights"), options, disabled)


def _session(model: ModelProto, options: ort.SessionOptions, disabled: tuple[str, ...]) -> ort.InferenceSession:
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer):
        model = _with_paths_from_root(model)
        # the runtime takes only files below a folder of its own choice
        options.add_session_config_entry(_FOLDER, Path.cwd().anchor)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )


def _with_paths_from_root(model: ModelProto) -> ModelProto:
    """Return a copy whose references are paths from the root."""
    found = ModelProto()
    found.CopyFrom(model)
    for tensor in found.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            file, offset, length = reference(tensor)
            del tensor.external_data[:]
            place = {"location": file.relative_to(file.anchor).as_posix(), "offset": offset, "length": length}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
    return found
