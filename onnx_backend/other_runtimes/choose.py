"""Choose a runtime by its name."""

from collections.abc import Mapping
from types import MappingProxyType

from onnx import ModelProto

from onnx_backend.other_runtimes.onnxruntime_runner import OnnxRuntimeRunner
from onnx_backend.other_runtimes.openvino_runner import OpenVinoRunner
from onnx_backend.other_runtimes.qnn_runner import QnnRunner
from onnx_backend.other_runtimes.runner import OpenRunner, Runner
from qsdk.core.errors import ConfigError

RUNTIMES: Mapping[str, OpenRunner] = MappingProxyType(
    {"onnxruntime": OnnxRuntimeRunner, "openvino": OpenVinoRunner, "qnn": QnnRunner}
)


def open_in(runtime: str, model: ModelProto) -> Runner:
    """Open a model in a runtime.

    Raises:
        ConfigError: there is no such runtime, or it is not installed.
        ModelError: it cannot compile the model.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime={runtime!r} is unknown; choose one of {', '.join(RUNTIMES)}")
    return RUNTIMES[runtime](model)


def open_part(runtime: str, model: ModelProto) -> Runner:
    """Open a part of a model, whose inputs may lack a rank: compiled for the sizes of the values that it is run on.

    Raises:
        ConfigError: as `open_in`.
        ModelError: as `open_in`.
    """
    return OpenVinoRunner(model, fixed_sizes=True) if runtime == "openvino" else open_in(runtime, model)
