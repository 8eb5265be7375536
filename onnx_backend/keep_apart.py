"""Work-arounds for the runtime: nodes that keep it from fusing what its kernels cannot do, and from moving what leaves.

At its default level the runtime takes any 8-bit DequantizeLinear into QLinearConv, QLinearMatMul or
MatMulIntegerToFloat, whose kernels know no blocks: the session opens, and every run fails. And it puts a copy of the
Q/DQ pair behind a Transpose in front of it too, also where the tensor in front is an output of the model, which is
then quantized. A Sum of one operand in between changes no value, is fused with nothing and is moved past nothing.
"""

from collections.abc import Sequence

from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.int8_moves import COPY_KEY
from onnx_backend.model import attributes, consumers, initializers, names_in, rename_inputs, replace_nodes, unique

#: measured: the ops that the runtime fuses with an 8-bit weight behind a DequantizeLinear
FUSED = frozenset({"Conv", "MatMul", "Gemm"})


def keep_apart(model: ModelProto) -> None:
    """Put a Sum in front of the ops that would be fused with blocks, or moved past an output of the model, in place."""
    graph = model.graph
    stored, readers, taken = initializers(graph), consumers(graph.node), names_in(graph)
    outputs = {value.name for value in graph.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "DequantizeLinear":
            if _has_blocks(node, stored.get(node.input[0])):
                fused = [reader for reader in readers.get(node.output[0], []) if reader.op_type in FUSED]
                nodes += _apart(node.output[0], fused, taken)
            continue
        for name in (name for name in node.output if name in outputs):
            moved = [reader for reader in readers.get(name, []) if _is_quantized_transpose(reader, readers)]
            nodes += _apart(name, moved, taken)
    replace_nodes(graph, nodes)


def _has_blocks(node: NodeProto, weight: TensorProto | None) -> bool:
    """Whether a DequantizeLinear reads a stored 8-bit weight with blocks."""
    narrow = weight is not None and weight.data_type in (TensorProto.INT8, TensorProto.UINT8)
    return narrow and bool(attributes(node).get("block_size"))


def _is_quantized_transpose(node: NodeProto, readers: dict[str, list[NodeProto]]) -> bool:
    following = readers.get(node.output[0], []) if node.op_type == "Transpose" else []
    return any(reader.op_type == "QuantizeLinear" for reader in following)


def _apart(tensor: str, read_by: Sequence[NodeProto], taken: set[str]) -> list[NodeProto]:
    """A Sum that these nodes read in a tensor's place; none for no nodes."""
    if not read_by:
        return []
    apart = helper.make_node("Sum", [tensor], [unique(f"{tensor}/apart", taken)])
    apart.name = unique(apart.output[0], taken)
    entry = apart.metadata_props.add()
    entry.key, entry.value = COPY_KEY, tensor
    rename_inputs(read_by, {tensor: apart.output[0]})
    return [apart]
