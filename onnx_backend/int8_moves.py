"""A work-around for the runtime: int8 tensors that are only moved get a Q/DQ pair of their own.

At opset 21 and its default level the runtime pushes an int8 DequantizeLinear past MaxPool, Reshape and their like,
writes `output_dtype` on the QuantizeLinear that it adds, and then fails on its own node, unless a QuantizeLinear
follows the move already. The pair added here has the encoding of what is moved, so it changes no value.
"""

from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.model import consumers, initializers, metadata, names_in, producers, replace_nodes, unique

#: measured: the ops past which the runtime pushes a DequantizeLinear
MOVES = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
COPY_KEY = "qsdk.copy_of"


def separate_moves(model: ModelProto) -> None:
    """Put a Q/DQ pair behind every moved int8 tensor that anything but a QuantizeLinear reads, in place."""
    graph = model.graph
    readers, makers, stored = consumers(graph.node), producers(graph.node), initializers(graph)
    outputs, taken = {value.name for value in graph.output}, names_in(graph)
    pairs: dict[str, tuple[NodeProto, NodeProto]] = {}  # int8 tensor, dequantized -> the pair whose encoding it has
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "DequantizeLinear":
            quantize = makers.get(node.input[0])
            zero_point = None if quantize is None or len(quantize.input) < 3 else stored.get(quantize.input[2])
            if quantize is not None and zero_point is not None and zero_point.data_type == TensorProto.INT8:
                pairs[node.output[0]] = (quantize, node)
        if node.op_type not in MOVES or node.input[0] not in pairs:
            continue
        moved, pair = node.output[0], pairs[node.input[0]]
        if moved not in outputs and all(_quantizes(reader, moved) for reader in readers.get(moved, [])):
            continue
        node.output[0] = unique(f"{moved}/moved", taken)
        nodes += _copy(pair, node.output[0], moved, taken)
        pairs[moved] = pair
    replace_nodes(graph, nodes)


def _quantizes(reader: NodeProto, tensor: str) -> bool:
    return reader.op_type == "QuantizeLinear" and reader.input[0] == tensor


def _copy(pair: tuple[NodeProto, NodeProto], source: str, output: str, taken: set[str]) -> list[NodeProto]:
    codes = unique(f"{output}/codes", taken)
    made = []
    for node, read, written in zip(pair, (source, codes), (codes, output), strict=True):
        inputs = [read, *node.input[1:]]
        copy = helper.make_node(node.op_type, inputs, [written], unique(f"{written}/again", taken))
        copy.attribute.extend(node.attribute)
        entry = copy.metadata_props.add()
        facts = metadata(node)
        entry.key, entry.value = COPY_KEY, facts.get("qsdk.site") or facts.get(COPY_KEY, node.output[0])
        made.append(copy)
    return made
