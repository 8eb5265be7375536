"""Read a Q/DQ model of float16, bfloat16 or float64 tensors as one of float32, whose pairs are the same.

Integers know no float type between two pairs, and fused kernels have none but float32: what the file rounds to its own
type, they compute more exactly.
"""

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import LargeTensor, is_stub, narrow
from onnx_backend.proto.nodes import attributes, metadata, rename_inputs, replace_nodes
from onnx_backend.proto.subgraphs import bodies
from onnx_backend.proto.weightless import types_of
from onnx_backend.qdq.narrow_regions import ENTRY_KEY, remove_entries
from onnx_backend.qdq.read import CAST_KEY, FLOAT_NAMES
from onnx_backend.workarounds.kernel_casts import remove_kernel_casts

_OTHERS = frozenset(code for code in FLOAT_NAMES if code != TensorProto.FLOAT)
_DTYPE_ATTRIBUTES = frozenset({"dtype", "output_dtype", "precision", "to"})
_PAIR = ("QuantizeLinear", "DequantizeLinear")


def in_float32(model: ModelProto, large: dict[str, LargeTensor] | None = None) -> ModelProto:
    """Return a model whose pairs quantize tensors of other float types with all of these as float32.

    Sites that a rule keeps in a float type, casts and back, stay, but what their ops read is not rounded. A model of
    float32 pairs alone is returned as it is.

    Args:
        model: it is not changed.
        large: the stored tensors that it has only stubs of, by name; those of other types become float32 in place.
    """
    others = _quantizes_other_floats(model)
    if not others and not any(ENTRY_KEY in metadata(node) for node in model.graph.node):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    remove_entries(result)
    if not others:
        return result
    remove_kernel_casts(result)
    floats = {name for name, (dtype, _) in types_of(result).items() if dtype in FLOAT_NAMES.values()}
    _rewrite(result.graph, floats, large or {})
    return result


def _quantizes_other_floats(model: ModelProto) -> bool:
    stored = initializers(model.graph)
    return any(
        (node.op_type == "Cast" and CAST_KEY in metadata(node))
        or (node.op_type in _PAIR and node.input[1] in stored and stored[node.input[1]].data_type in _OTHERS)
        for node in model.graph.node
    )


def _rewrite(graph: GraphProto, floats: set[str], large: dict[str, LargeTensor]) -> None:
    kept_casts = {node.input[0] for node in graph.node if _is_site_cast(node)}
    for tensor in graph.initializer:
        if tensor.data_type in _OTHERS and tensor.name not in kept_casts:
            if is_stub(tensor):
                large[tensor.name] = narrow(large[tensor.name], TensorProto.FLOAT)
                tensor.CopyFrom(large[tensor.name].stub(tensor.name))
            else:
                tensor.CopyFrom(numpy_helper.from_array(array(tensor).astype("float32"), tensor.name))
    floats |= {tensor.name for tensor in graph.initializer if tensor.data_type in FLOAT_NAMES}
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        rename_inputs([node], renamed)
        for _, body in bodies(node):
            _rewrite(body, floats, large)
        if node.op_type == "Cast" and not _is_site_cast(node) and _casts_float_to_float(node, floats):
            if node.output[0] not in outputs:
                renamed[node.output[0]] = node.input[0]
                continue
            node.op_type = "Identity"
            del node.attribute[:]
        elif not _is_site_cast(node) or node.name.endswith("/cast_back"):
            _name_float32(node)
        nodes.append(node)
    replace_nodes(graph, nodes)
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _OTHERS:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _is_site_cast(node: NodeProto) -> bool:
    return node.op_type == "Cast" and "qsdk.site" in metadata(node)


def _casts_float_to_float(node: NodeProto, floats: set[str]) -> bool:
    return node.input[0] in floats and attributes(node)["to"] in FLOAT_NAMES  # `saturate` may stand before it


def _name_float32(node: NodeProto) -> None:
    """Change the attributes of a node that name another float type, or hold a tensor of one."""
    for attribute in node.attribute:
        if attribute.name in _DTYPE_ATTRIBUTES and attribute.i in _OTHERS:
            attribute.i = TensorProto.FLOAT
        elif attribute.HasField("t") and attribute.t.data_type in _OTHERS:
            attribute.t.CopyFrom(numpy_helper.from_array(array(attribute.t).astype("float32"), attribute.t.name))
