"""Open a model in another runtime by name."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

import numpy as np
from onnx import ModelProto, TensorProto

from onnx_backend.passes.static_sizes import propagate_static_sizes
from onnx_backend.proto.graph_queries import declared_sizes, input_names, nodes_reaching
from onnx_backend.proto.inputs import with_sizes_of
from onnx_backend.proto.nodes import copied, replace_nodes
from onnx_backend.runtime.session_input import cast_bfloat16_edges
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, DataError


class Runner(Protocol):
    """A model that is open in a runtime, whose name and version `title` says."""

    title: str

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; return its outputs in graph order.

        Values of inputs that the model lacks are left out; a ModelError if the runtime cannot compile the model for
        these sizes, or run it.
        """
        ...


class SizedModel:
    """A model of which a copy is compiled for the sizes of the values that it is to be run on.

    Some runtimes need the sizes of all tensors, or at least their ranks; an application fixes them before it compiles.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.inputs = _with_float32_edges(model), input_names(model.graph)
        self.declared = {value.name: declared_sizes(value.type) for value in model.graph.input}
        self.sizes: dict[str, tuple[int, ...]] | None = None

    def given(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of the model's own inputs; a DataError if the model was written for another size."""
        found = {name: np.asarray(feeds[name]) for name in self.inputs if name in feeds}
        for name, value in found.items():
            sizes = self.declared[name]
            if len(sizes) == value.ndim and any(n not in (None, m) for n, m in zip(sizes, value.shape, strict=True)):
                shown = tuple("?" if size is None else size for size in sizes)
                raise DataError(
                    f"the model takes {name!r} of the size {shown}, and the batch has {value.shape}; give batches of "
                    "that size, or export with other shapes="
                )
        return found

    def for_sizes_of(self, values: Mapping[str, Array]) -> ModelProto | None:
        """Return a copy with the sizes of these values, or None if the last one that was returned has them."""
        sizes = {name: value.shape for name, value in values.items()}
        if sizes == self.sizes:
            return None
        self.sizes = sizes
        fixed = propagate_static_sizes(with_sizes_of(self.model, values))
        replace_nodes(fixed.graph, nodes_reaching(fixed.graph.node, [value.name for value in fixed.graph.output]))
        return fixed


def _with_float32_edges(model: ModelProto) -> ModelProto:
    """Return the model, or a copy whose inputs and outputs in bfloat16 are float32: NumPy has no such type."""
    edges = (*model.graph.input, *model.graph.output)
    if all(value.type.tensor_type.elem_type != TensorProto.BFLOAT16 for value in edges):
        return model
    found = copied(model)
    cast_bfloat16_edges(found)
    return found


def installed_package(name: str, extra: str) -> ModuleType:
    """Import the package of a runtime; a ConfigError names the extra of qsdk that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the runtime {extra!r} needs the package {name}, which cannot be imported ({error}); install it: "
            f"pip install 'qsdk[{extra}]'"
        ) from error
