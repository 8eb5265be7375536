"""IREE on the CPU: a compiler of whole graphs to machine code, one of the runtimes that compute what is written."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from onnx import ModelProto, helper, shape_inference

from onnx_backend.proto.model_io import with_weights
from onnx_backend.runtimes.runner import SizedModel, installed_package
from onnx_backend.runtimes.runtime import Runtime
from qsdk.core.arrays import Array
from qsdk.core.config.target import load_target
from qsdk.core.errors import ModelError

#: for this processor, and with room on the stack for what it joins of integer graphs (its own limit is 32 KiB)
_OPTIONS = ("--iree-llvmcpu-target-cpu=host", "--iree-llvmcpu-stack-allocation-limit=4194304")


class IreeRunner:
    """A model that IREE has compiled for the sizes of the values that it is run on."""

    def __init__(self, model: ModelProto) -> None:
        """Keep a model until its first run, which compiles it."""
        self.compiler = installed_package("iree.compiler", "iree")
        self.runtime = installed_package("iree.runtime", "iree")
        self.version = version("iree-base-compiler")
        self.title = f"IREE {self.version}"
        self.sized = SizedModel(with_weights(model))
        # its integers have no sign of their own: it hands codes of uint8 out as int8
        outputs = self.sized.model.graph.output
        self.dtypes = [helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type) for one in outputs]
        self._context: Any = None
        self._run: Any = None

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        given = self.sized.given(feeds)
        fixed = self.sized.for_sizes_of(given)
        if fixed is not None:
            self._open(fixed)
        try:
            found = self._run(*(np.ascontiguousarray(given[name]) for name in self.sized.inputs))
        except Exception as error:  # what its bindings raise is no common class
            raise ModelError(f"{self.title} cannot run the model: {_in_short(error)}") from error
        values = found if isinstance(found, list | tuple) else [found]
        return [np.array(one).view(dtype) for one, dtype in zip(values, self.dtypes, strict=True)]

    def _open(self, model: ModelProto) -> None:
        importer = installed_package("iree.compiler.extras.onnx_importer", "iree")
        try:
            info = importer.ModelInfo(shape_inference.infer_shapes(model))  # it takes the types of all values as given
            module = info.create_module(context=self.compiler.ir.Context()).operation
            importer.NodeImporter.define_function(info.main_graph, module).import_all()
            options = {"target_backends": ["llvm-cpu"], "input_type": "onnx", "extra_args": list(_OPTIONS)}
            code = self.compiler.compile_str(module.get_asm(), **options)
        except Exception as error:  # what its bindings raise is no common class
            raise ModelError(f"{self.title} cannot compile the model: {_in_short(error)}") from error
        self._context = self.runtime.SystemContext(config=self.runtime.Config("local-sync"))
        loaded = self.runtime.VmModule.copy_buffer(self._context.instance, code)
        self._context.add_vm_module(loaded)
        name = next(one for one in loaded.function_names if "$" not in one and not one.startswith("__"))
        self._run = self._context.modules[loaded.name][name]


def _in_short(error: Exception) -> str:
    """Return what an error says, without the command that was run."""
    return " ".join(str(error).partition("Invoked with")[0].split())[:600]


IREE = Runtime(load_target("iree"), "3.13", open=IreeRunner)
