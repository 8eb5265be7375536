"""The float and the quantized model of a sim as streams with matching nodes, and the weights that both read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.numpy_helper import from_array

from onnx_backend.proto.external_data import FLOATS, array, float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import LargeTensor, LoweredModel, from_source, narrow, on_grid, without_large
from onnx_backend.proto.nodes import drop_unused_initializers, is_mark, metadata, replace_nodes
from onnx_backend.qdq.insert import lower
from onnx_backend.qdq.kernel_casts import remove_kernel_casts
from onnx_backend.walk.sections import TAG, Stream, bfloat16_in
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.sims.state import encoding_of

Array = npt.NDArray[Any]
_NARROW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


class WalkWeights:
    """The stored tensors and encodings of a sim during a walk: their original and their current values.

    Attributes:
        own: site -> encoding, of the sites that have one of their own.
        names: site -> name of the stored tensor there.
        before: name -> value in the float model; float tensors of any type in float32.
        typed: name -> the same in the type of the tensor.
        other: name -> value in the float model, where the sim stores another one.
        changed: name -> value in the quantized model, where it is another one.
    """

    def __init__(
        self,
        model: ModelProto,
        plan: Plan,
        own: Mapping[str, Encoding],
        names: Mapping[str, str],
        floats: Mapping[str, Array],
    ) -> None:
        """Read the stored tensors; `floats`, by site, replace them in the float model."""
        stored = initializers(model.graph)
        self.plan, self.own, self.names = plan, dict(own), names
        self.other = {names[site]: value for site, value in floats.items()}
        self._types = {name: tensor.data_type for name, tensor in stored.items()}
        self.typed: Mapping[str, Array] = LazyArrays(
            stored, lambda name: self._rounded(name, self.other[name]) if name in self.other else array(stored[name])
        )
        self.before: Mapping[str, Array] = LazyArrays(
            stored, lambda name: self.other[name] if name in self.other else float_array(stored[name])
        )
        self.changed: dict[str, Array] = {name: float_array(stored[name]) for name in self.other}
        self._dims = {name: tuple(tensor.dims) for name, tensor in stored.items()}

    def now(self, name: str) -> Array:
        """Return the value of a stored tensor in the quantized model, before it is quantized."""
        return self.changed[name] if name in self.changed else self.before[name]

    def write(self, site: str, encoding: Encoding | None, weight: Array | None) -> None:
        """Change an encoding, a value, or both; a value on a grid freezes its encoding."""
        if encoding is not None:
            self.own[site] = encoding
        if weight is not None:
            self.put(self.names[site], weight)
            self.own[site] = replace(self.own[site], frozen=True)

    def put(self, name: str, value: Array) -> None:
        """Change the value of a stored tensor; it is rounded to the tensor's type.

        Raises:
            ValueError: it has another shape.
        """
        if tuple(value.shape) != self._dims[name]:
            raise ValueError(f"{name} has the shape {self._dims[name]}, not {value.shape}")
        self.changed[name] = np.ascontiguousarray(self._rounded(name, value), np.float32)

    def _rounded(self, name: str, value: Array) -> Array:
        with np.errstate(over="ignore"):
            return value.astype(helper.tensor_dtype_to_np_dtype(self._types[name]))

    def source(self, name: str, data_type: int | None = None) -> LargeTensor:
        """Return a stored float tensor whose current value is read on demand, in its own type or in another one."""
        values = from_source(partial(self.now, name), self._dims[name])
        return _in_type(values, self._types[name] if data_type is None else data_type)

    def fake_quantized(self, site: str, permutation: list[int] | None, data_type: int) -> LargeTensor:
        """Return the values that the simulation reads at a stored site, in the type of its scales."""
        encoding = encoding_of(self.plan.decisions[site], self.own)
        assert encoding is not None
        values = from_source(partial(self.now, self.names[site]), self._dims[self.names[site]])
        return _in_type(on_grid(encoding, values, permutation), data_type)


def _in_type(values: LargeTensor, data_type: int) -> LargeTensor:
    """Return float32 values in another float type."""
    return values if data_type == TensorProto.FLOAT else narrow(values, data_type)


def streams_of(marked: ModelProto, weights: WalkWeights, encodings: Mapping[str, Encoding]) -> tuple[Stream, Stream]:
    """Return the float and the quantized model; stored values are computed from `weights` for every section.

    Args:
        marked: the float model with marks; it is not changed.
        weights: of the sim.
        encodings: of every quantized site.
    """
    light = without_large(marked)
    for number, node in enumerate(light.graph.node):
        if not is_mark(node):
            node.metadata_props.add(key=TAG, value=str(number))
    stored = initializers(light.graph)
    for name, value in weights.other.items():
        stored[name].CopyFrom(from_array(value.astype(array(stored[name]).dtype), name))
    exact = _lowered(light, Plan({}, ()), {}, weights)
    computed: dict[str, Callable[[], LargeTensor]] = {}
    rounded = _lowered(light, weights.plan, encodings, weights)
    graph, bfloat16 = rounded.model.graph, bfloat16_in(rounded.model)
    stored = initializers(graph)
    computed |= {name: partial(weights.source, name) for name in weights.names.values() if name in stored}
    replace_nodes(graph, [node for node in graph.node if not _replaces_node(node, stored, weights, computed)])
    drop_unused_initializers(graph)
    return (
        Stream(exact.model, exact.large, {}, bfloat16_in(exact.model)),
        Stream(rounded.model, rounded.large, computed, bfloat16),
    )


def _lowered(light: ModelProto, plan: Plan, encodings: Mapping[str, Encoding], weights: WalkWeights) -> LoweredModel:
    found = lower(light, plan, encodings, weights=weights.typed)
    remove_kernel_casts(found.model)  # sessions insert them again; without them, layers read the tensors of the graph
    return found


def tags_of(marked: ModelProto) -> dict[str, str]:
    """Return tensor name -> tag of the node that computes it, for the names before and behind the tensor's mark."""
    found: dict[str, str] = {}
    for number, node in enumerate(marked.graph.node):
        if not is_mark(node):
            found.update(dict.fromkeys(node.output, str(number)))
        elif node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found


def _replaces_node(
    node: NodeProto,
    stored: Mapping[str, TensorProto],
    weights: WalkWeights,
    computed: dict[str, Callable[[], LargeTensor]],
) -> bool:
    """Compute the value of a DequantizeLinear or Cast at a stored site; return True if the node can go."""
    facts = metadata(node)
    site = facts.get("qsdk.site", "")
    if site not in weights.names or not node.input or node.input[0] not in stored:
        return False
    if node.op_type == "DequantizeLinear":
        permutation = [int(axis) for axis in facts["qsdk.perm"].split(",")] if "qsdk.perm" in facts else None
        scale = stored.get(node.input[1])  # block scales of two levels are computed, in float32
        data_type = scale.data_type if scale is not None and scale.data_type in FLOATS else TensorProto.FLOAT
        computed[node.output[0]] = partial(weights.fake_quantized, site, permutation, data_type)
        return True
    if node.op_type == "Cast":
        computed[node.input[0]] = partial(weights.source, weights.names[site], _NARROW[facts["qsdk.dtype"]])
    return False
