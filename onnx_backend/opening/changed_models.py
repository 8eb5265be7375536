"""A marked model without its marks, with a product by a constant matrix in front of layers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.graph_queries import GraphIndex
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import MARK_DOMAIN, is_mark, rename_inputs, replace_nodes, retain
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.operands import operands_of
from qsdk.core.site import site_name


def untied_model(marked: ModelProto, names: Collection[str]) -> tuple[ModelProto, Mapping[str, tuple[str, ...]]]:
    """Return an unmarked copy of a model, and the names of the copies of each initializer.

    The first node that reads one of these initializers keeps it, each further one reads a copy.
    """
    model = without_marks(marked)
    index = GraphIndex(model.graph)
    copies: dict[str, tuple[str, ...]] = {}
    for name in names:
        readers = [node for node in model.graph.node if name in node.input]
        made = []
        for node in readers[1:]:
            copy = TensorProto()
            copy.CopyFrom(index.stored[name])
            copy.name = index.fresh(f"{name}/untied")
            made.append(copy)
            rename_inputs([node], {name: copy.name})
        model.graph.initializer.extend(made)
        copies[name] = tuple(copy.name for copy in made)
    return model, copies


def without_marks(marked: ModelProto) -> ModelProto:
    """Return a copy of a marked model as `mark` was given it."""
    model = load(marked)
    nodes = [node for node in model.graph.node if not is_mark(node)]
    computed = {name for node in nodes for name in node.output}
    pairs = [(node.input[0], node.output[0]) for node in model.graph.node if is_mark(node)]
    rename_inputs(nodes, {output: source for source, output in pairs if source not in computed})
    outputs = {source: output for source, output in pairs if source in computed}
    rename_inputs(nodes, outputs)
    for node in nodes:
        for position, name in enumerate(node.output):
            node.output[position] = outputs.get(name, name)
    replace_nodes(model.graph, nodes)
    retain(model.opset_import, lambda entry: entry.domain != MARK_DOMAIN)
    return model


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
    the first, transposed and multiplied by the second. `factors` are by the name of a weight, which one MatMul or Gemm
    alone reads.
    """
    result = RotatedModel(without_marks(marked))
    graph, index = read_graph(result.model), GraphIndex(result.model.graph)
    added: dict[int, list[NodeProto]] = {}
    for name, own in factors.items():
        op_id, result.axes[name] = _reader(graph, name)
        op = graph.ops[op_id]
        node = index.makers[graph.tensors[op.outputs[0]].name]
        label = index.fresh(f"{node.name or node.output[0]}.rotation")
        rank = len(graph.tensors[op.inputs[0] or 0].shape or ())
        dtype = index.stored[name].data_type
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
