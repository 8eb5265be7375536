"""Run a model in OpenVINO's CPU plug-in."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.other_runtimes.runner import SizedModel, installed_package
from onnx_backend.other_runtimes.signal_stack import kept_signal_stack
from qsdk.core.errors import ModelError

Array = npt.NDArray[Any]
#: Without the first, processors with bfloat16 compute the float parts in it. Without the second, processors with VNNI
#: quantize what Linears with stored integers for weights read, in groups of 32 and while the model runs.
AS_WRITTEN = MappingProxyType({"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})


class OpenVinoRunner:
    """A model in OpenVINO on the CPU: float parts in float32, nothing quantized that the model does not quantize.

    Attributes:
        title: name and version of the runtime.
        version: of the runtime.
        compiled: OpenVINO's own `CompiledModel`; None before the first run.
        request: its `InferRequest`, which holds the counters of a model that is compiled with `PERF_COUNT`.
    """

    def __init__(self, model: ModelProto, *, fixed_sizes: bool = False, **options: Any) -> None:
        """Keep a model until its first run.

        Args:
            model: it is not changed.
            fixed_sizes: compile it for the sizes that it is run on; else once, as it is written, with its open axes.
            options: OpenVINO's own properties to compile it with.

        Raises:
            ConfigError: OpenVINO is not installed.
        """
        self.openvino = installed_package("openvino", "openvino")
        self.version = self.openvino.__version__.split("-")[0]
        self.title = f"OpenVINO {self.version}"
        self.sized, self.fixed_sizes = SizedModel(model), fixed_sizes
        self.options = {**AS_WRITTEN, **options}
        self.compiled: Any = None
        self.request: Any = None

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        given = self.sized.given(feeds)
        fixed = self.sized.for_sizes_of(given) if self.fixed_sizes else None
        if fixed is not None or self.compiled is None:
            self.compiled = self._compiled(fixed or self.sized.model)
            self.request = self.compiled.create_infer_request()
        known = {name for port in self.compiled.inputs for name in port.get_names()}
        try:
            found = self.request.infer({name: value for name, value in given.items() if name in known})
        except Exception as error:  # its exceptions are bare RuntimeErrors
            raise ModelError(f"{self.title} cannot run the model: {_in_short(error)}") from error
        return [np.array(found[port]) for port in self.compiled.outputs]

    def _compiled(self, model: ModelProto) -> Any:
        try:
            core = self.openvino.Core()
            with kept_signal_stack():
                return core.compile_model(core.read_model(model.SerializeToString()), "CPU", self.options)
        except Exception as error:
            raise ModelError(f"{self.title} cannot compile the model: {_in_short(error)}") from error

    def precisions(self) -> list[tuple[str, str, str]]:
        """Return name, type and precision of every layer that the plug-in runs, after its fusions."""
        found = []
        for layer in self.compiled.get_runtime_model().get_ops():
            facts = layer.get_rt_info()
            found.append((layer.get_friendly_name(), _text(facts["layerType"]), _text(facts["runtimePrecision"])))
        return found


def _text(value: Any) -> str:
    return str(value.astype(str) if hasattr(value, "astype") else value)


def _in_short(error: Exception) -> str:
    """Return the lines of an error that are no places in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '")))[:600]
