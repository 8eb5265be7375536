"""Run a model on Qualcomm's HTP, or on its emulation, by the QNN plug-in of ONNX Runtime."""

import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.other_runtimes.runner import SizedModel, installed_package
from onnx_backend.runtime.feeds import as_declared
from qsdk.core.errors import ModelError

Array = npt.NDArray[Any]
_PROVIDER = "QNNExecutionProvider"
#: The processor to emulate: Snapdragon X Elite, whose HTP is a v73. Where none is named, the emulation takes one
#: without float16 (v68), and does not compile floats in front of a layer: error 1002, MEM_ALLOC.
EMULATED = MappingProxyType({"soc_model": "60", "htp_arch": "73"})
_EMULATING = frozenset({"x86_64", "amd64"})


class QnnRunner:
    """A model on the HTP backend of QNN; on x86-64, its package holds an emulation of the processor.

    The processor computes for fixed sizes: the model is compiled for those that it is run on.

    Attributes:
        title: name and version of the runtime.
        processor: the plug-in's options that name the processor.
        session: ONNX Runtime's session; None before the first run.
    """

    def __init__(
        self, model: ModelProto, *, cpu_fallback: bool = True, processor: Mapping[str, str] | None = None
    ) -> None:
        """Keep a model until its sizes are known.

        Args:
            model: it is not changed.
            cpu_fallback: let ONNX Runtime's CPU run what QNN does not take; else such a model is refused.
            processor: the plug-in's options that name one; None for `EMULATED`, and on a device for its own.

        Raises:
            ConfigError: the plug-in is not installed.
        """
        self.package = installed_package("onnxruntime_qnn", "qnn")
        self.title = f"QNN HTP by onnxruntime-qnn {self.package.__version__}"
        self.sized, self.cpu_fallback = SizedModel(model), cpu_fallback
        emulated = EMULATED if platform.machine().lower() in _EMULATING else {}
        self.processor = dict(emulated if processor is None else processor)
        self.session: ort.InferenceSession | None = None

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        given = self.sized.given(feeds)
        fixed = self.sized.for_sizes_of(given)
        if fixed is not None or self.session is None:
            self.session = self._session(fixed or self.sized.model)
        types = {value.name: value.type for value in self.session.get_inputs()}
        known = {name: as_declared(value, types[name]) for name, value in given.items() if name in types}
        try:
            return [np.asarray(value) for value in self.session.run(None, known)]
        except Exception as error:  # the runtime's own exception types are private
            raise ModelError(f"{self.title} cannot run the model: {error}") from error

    def fell_back(self) -> list[tuple[str, str]]:
        """Return name and op type of the nodes that run on ONNX Runtime's CPU."""
        parts = [] if self.session is None else self.session.get_provider_graph_assignment_info()
        return [(node.name, node.op_type) for part in parts if part.ep_name != _PROVIDER for node in part.get_nodes()]

    def _session(self, model: ModelProto) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if not self.cpu_fallback:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        backend = {"backend_path": self.package.get_qnn_htp_path(), **self.processor}
        try:
            options.add_provider_for_devices([_device(self.package)], backend)
            return ort.InferenceSession(model.SerializeToString(), options)
        except Exception as error:
            raise ModelError(f"{self.title} cannot compile the model: {error}") from error


def _device(package: Any) -> Any:
    """Return the device of the plug-in, which is registered with ONNX Runtime once per process."""
    if not _devices():
        ort.register_execution_provider_library(_PROVIDER, package.get_library_path())
    return _devices()[0]


def _devices() -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == _PROVIDER]
