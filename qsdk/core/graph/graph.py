"""The neutral graph that planning reads: ops and tensors, built by both sides. Names are labels; identity is an id."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.op_facts import SHAPE_OPS, VIEWS

#: ops that return a stored tensor in another shape, order or type
_VIEWS = VIEWS | {"Cast", "Expand"}
#: the open axes of a decoder with a cache: tokens of the past, new ones, and all of them
PAST, STEP, TOTAL = "past_sequence_length", "sequence_length", "total_sequence_length"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph.

    Attributes:
        name: a label for messages.
        dtype: NumPy-style name (`float32`, `int64`), or "" where unknown.
        shape: dimensions; a name or None where dynamic; None where even the rank is unknown.
        site: the site that can be quantized here, or None inside an op.
        constant: whether it is stored in the model.
        value: the value of a small constant (axes, bounds), else None.
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int | str | None, ...] | None = None
    site: str | None = None
    constant: bool = False
    value: npt.NDArray[Any] | None = field(default=None, compare=False)

    @property
    def is_float(self) -> bool:
        """Return whether the tensor holds floating-point values."""
        return self.dtype in ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Op:
    """An operation: ONNX type, tensor ids in and out (None for an absent input), attributes.

    Absent outputs are left out; `places` has the place of each output among those that ONNX defines, where it is known.
    `module` is the path of the PyTorch module that the op was exported from, where the file says it.
    """

    type: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    name: str = ""
    domain: str = ""
    places: tuple[int, ...] = field(default=(), compare=False)
    module: str = field(default="", compare=False)


@dataclass(frozen=True)
class Graph:
    """Ops in topological order over tensors addressed by index."""

    tensors: Sequence[Tensor]
    ops: Sequence[Op]
    inputs: Sequence[int]
    outputs: Sequence[int]

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """Return, by tensor id, the id of the op that computes it; constants and inputs are absent."""
        return {tensor: index for index, op in enumerate(self.ops) for tensor in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[int, Sequence[int]]:
        """Return, by tensor id, the ids of the ops that read it, once for each reading op."""
        result: dict[int, list[int]] = {index: [] for index in range(len(self.tensors))}
        for index, op in enumerate(self.ops):
            for tensor in dict.fromkeys(op.inputs):
                if tensor is not None:
                    result[tensor].append(index)
        return result

    @cached_property
    def output_set(self) -> frozenset[int]:
        """Return the ids of the tensors that leave the model."""
        return frozenset(self.outputs)

    @cached_property
    def sites(self) -> Mapping[str, int]:
        """Return the tensor id of each site, in graph order."""
        return {tensor.site: index for index, tensor in enumerate(self.tensors) if tensor.site is not None}

    def sole_consumer(self, tensor: int) -> int | None:
        """Return the id of the only op that reads a tensor which does not leave the model, else None."""
        readers = self.consumers[tensor]
        return readers[0] if len(readers) == 1 and tensor not in self.output_set else None

    def reads_values(self, tensor: int) -> bool:
        """Return whether an op reads more of a tensor than its shape, or the tensor leaves the model."""
        return tensor in self.output_set or any(self.ops[i].type not in SHAPE_OPS for i in self.consumers[tensor])

    @cached_property
    def _roots(self) -> Mapping[int, int]:
        """Return, by tensor id, the stored tensor that it is, or is a view of; one pass, even for long chains."""
        result = {index: index for index, tensor in enumerate(self.tensors) if tensor.constant}
        for op in self.ops:
            source = op.inputs[0] if op.type in ("Identity", "Transpose", "Cast") and op.inputs else None
            between_floats = all(self.tensors[t].is_float for t in (*op.inputs, *op.outputs) if t is not None)
            if source in result and (op.type != "Cast" or between_floats):
                result.update(dict.fromkeys(op.outputs, result[source]))
        return result

    def constant_root(self, tensor: int | None) -> int | None:
        """Return the stored tensor behind Identity, Transpose and Casts of floats, or None for a computed tensor."""
        return None if tensor is None else self._roots.get(tensor)

    def maker(self, tensor: int | None) -> Op | None:
        """Return the op that computes a tensor; None for an input, a constant or an absent tensor."""
        index = None if tensor is None else self.producer.get(tensor)
        return None if index is None else self.ops[index]

    def shape_of(self, tensor: int | None) -> tuple[int | str | None, ...] | None:
        """Return the shape of a tensor, or None where even its rank is unknown."""
        return None if tensor is None else self.tensors[tensor].shape

    def reduced_axes(self, op: Op) -> tuple[int, ...] | None:
        """Return the axes of a reduction, ascending and counted from the first; None where they are not known."""
        shape, axes = self.shape_of(op.inputs[0]), op.attributes.get("axes")
        if axes is None and len(op.inputs) > 1:
            axes = self.value(op.inputs[1])
        if axes is None or shape is None:
            return None
        return tuple(sorted(int(axis) % len(shape) for axis in np.reshape(axes, -1)))

    def origin(self, tensor: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the stored tensor that a tensor is a reordered, reshaped or cast form of, with the ops between."""
        current, between = tensor, []
        while not self.tensors[current].constant:
            op = self.maker(current)
            source = op.inputs[0] if op is not None and op.inputs else None
            if op is None or source is None or op.type not in _VIEWS:
                return None
            between.append(self.producer[current])
            current = source
        return current, tuple(between)

    def axis_at_root(self, tensor: int, axis: int) -> int:
        """Return the axis of the stored tensor that an axis of a constant comes from, through its Transpose ops."""
        current = tensor
        while not self.tensors[current].constant:
            op = self.ops[self.producer[current]]
            if op.type == "Transpose":
                rank = len(self.tensors[current].shape or ())
                permutation = op.attributes.get("perm") or list(reversed(range(rank)))
                axis = permutation[axis % len(permutation)]
            source = op.inputs[0]
            assert source is not None
            current = source
        return axis

    def value(self, tensor: int | None) -> npt.NDArray[Any] | None:
        """Return the value of a small constant, or None."""
        return None if tensor is None else self.tensors[tensor].value

    def scalar(self, tensor: int | None) -> float | None:
        """Return the value of a one-element constant, or None."""
        result = self.value(tensor)
        return None if result is None or np.size(result) != 1 else float(np.reshape(result, ()))


# --- ReLU6 cuts every channel at the same value, so factors do not pass it as they pass a ReLU ------------------------


def clips_at_six(graph: Graph) -> dict[str, int]:
    """Return, by the site of its result, the id of the op of each Clip from 0 to 6."""
    result = {}
    for index, op in enumerate(graph.ops):
        site = graph.tensors[op.outputs[0]].site if op.outputs else None
        if op.type == "Clip" and [graph.scalar(bound) for bound in op.inputs[1:]] == [0.0, 6.0] and site is not None:
            result[site] = index
    return result


def as_relu(graph: Graph, sites: Container[str]) -> Graph:
    """Return the graph with a Relu in place of each Clip whose result has one of these sites."""
    clips = {op for site, op in clips_at_six(graph).items() if site in sites}
    ops = [replace(op, type="Relu", inputs=op.inputs[:1]) if i in clips else op for i, op in enumerate(graph.ops)]
    return replace(graph, ops=ops)
