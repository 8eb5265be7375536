"""Run a model in ONNX Runtime on the CPU as an application opens it: at its default level, all optimizers on."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.runtime.feeds import as_declared
from onnx_backend.runtime.user_session import EndedProcessError, user_session
from qsdk.core.errors import ModelError

Array = npt.NDArray[Any]


class OnnxRuntimeRunner:
    """A model in ONNX Runtime's default session, in a process of its own.

    Attributes:
        title: name and version of the runtime.
    """

    def __init__(self, model: ModelProto) -> None:
        """Open a model.

        Raises:
            ModelError: the runtime cannot load it at its default level.
        """
        self.title = f"ONNX Runtime {ort.__version__}"
        try:
            self.session = user_session(model)
        except (EndedProcessError, RuntimeError) as error:
            raise ModelError(f"{self.title} cannot load the model: {error}") from error
        self.types = {value.name: value.type for value in self.session.get_inputs()}

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        known = {name: as_declared(value, self.types[name]) for name, value in feeds.items() if name in self.types}
        try:
            return [np.asarray(value) for value in self.session.run(None, known)]
        except (EndedProcessError, RuntimeError) as error:
            raise ModelError(f"{self.title} cannot run the model: {error}") from error
