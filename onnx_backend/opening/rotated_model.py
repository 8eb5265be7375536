"""A marked model without its marks, with a product by a constant matrix in front of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.opening.untied_model import without_marks
from onnx_backend.proto.graph_queries import initializers, names_in, producers, unique
from onnx_backend.proto.nodes import replace_nodes
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.operands import operands_of
from qsdk.core.site import site_name

Factors = Sequence[npt.NDArray[np.float64]]


@dataclass
class RotatedModel:
    """A model with rotations in front of layers, whose weights are yet to take up the inverse.

    Attributes:
        model: without marks.
        axes: name of each layer's weight -> its axis of input channels.
        matrices: sites of the stored factors.
        between: sites of what is computed between two factors.
    """

    model: ModelProto
    axes: dict[str, int] = field(default_factory=dict)
    matrices: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=list)


def rotated_model(marked: ModelProto, factors: Mapping[str, Factors]) -> RotatedModel:
    """Return an unmarked copy of a model with rotations in front of the layers that read these weights.

    A rotation of one factor is a MatMul; of two, [b, b] and [a, a], the input is viewed as [..., a, b], multiplied by
    the first, transposed and multiplied by the second.

    Args:
        marked: the model.
        factors: name of a weight -> those of the rotation; one MatMul or Gemm alone reads the weight.
    """
    result = RotatedModel(without_marks(marked))
    graph, taken = read_graph(result.model), names_in(result.model.graph)
    makers = producers(result.model.graph.node)
    added: dict[int, list[NodeProto]] = {}
    for name, own in factors.items():
        op_id, result.axes[name] = _reader(graph, name)
        op = graph.ops[op_id]
        node = makers[graph.tensors[op.outputs[0]].name]
        label = unique(f"{node.name or node.output[0]}.rotation", taken)
        rank = len(graph.tensors[op.inputs[0] or 0].shape or ())
        dtype = initializers(result.model.graph)[name].data_type
        stored = [
            _matrix(f"{label}.{place}", matrix, dtype) for place, matrix in zip(("first", "second"), own, strict=False)
        ]
        nodes, shapes = _nodes(label, node.input[0], [tensor.name for tensor in stored], rank, [len(m) for m in own])
        result.model.graph.initializer.extend([*stored, *shapes])
        node.input[0] = nodes[-1].output[0]
        added[id(node)] = nodes
        result.matrices += [site_name(one.name, "weight") for one in nodes if one.op_type == "MatMul"]
        result.between += [site_name(one.name, "output") for one in nodes[:-2]]
    replace_nodes(
        result.model.graph, [new for node in result.model.graph.node for new in (*added.get(id(node), ()), node)]
    )
    return result


def _reader(graph: Graph, name: str) -> tuple[int, int]:
    """Return the op that multiplies by a stored weight, and the weight's axis of input channels."""
    for op_id in range(len(graph.ops)):
        for operand in operands_of(graph, op_id):
            if graph.tensors[operand.root].name == name and operand.input_axis is not None:
                return op_id, operand.input_axis
    raise AssertionError(f"no layer reads {name}")


def _matrix(name: str, values: npt.NDArray[np.float64], dtype: int) -> TensorProto:
    return numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(dtype)), name)


def _nodes(
    label: str, x: str, matrices: Sequence[str], rank: int, sizes: Sequence[int]
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes of a rotation, and the shapes that they read."""

    def node(op_type: str, inputs: list[str], number: int = 0, **attributes: Any) -> NodeProto:
        owner = f"{label}/{op_type.lower()}.{number}"
        return helper.make_node(op_type, inputs, [f"{owner}:output"], owner, **attributes)

    if len(matrices) == 1:
        return [node("MatMul", [x, matrices[0]])], []
    b, a = sizes
    kept = [0] * (rank - 1)  # which copies the size of the input
    apart = numpy_helper.from_array(np.array([*kept, a, b], np.int64), f"{label}.runs")
    whole = numpy_helper.from_array(np.array([*kept, a * b], np.int64), f"{label}.whole")
    nodes = [node("Reshape", [x, apart.name])]
    nodes.append(node("MatMul", [nodes[-1].output[0], matrices[0]]))
    order = [*range(rank - 1), rank, rank - 1]
    nodes.append(node("Transpose", [nodes[-1].output[0]], perm=order))
    nodes.append(node("MatMul", [nodes[-1].output[0], matrices[1]], 1))
    nodes.append(node("Reshape", [nodes[-1].output[0], whole.name], 1))
    return nodes, [apart, whole]
