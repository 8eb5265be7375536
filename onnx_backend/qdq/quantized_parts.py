"""Find out if anything in a model is quantized: Q/DQ, integer kernels, stored codes, sites in a narrow float type."""

from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import all_nodes, bodies
from onnx_backend.qdq.islands.entries import TYPE_KEY

_STARTS = (
    "QLinear",
    "QGemm",
    "QAttention",
    "QOrdered",
    "QEmbed",
    "QMoE",
    "MatMulNBits",
    "MatMulInteger",
    "ConvInteger",
)
_PAIRS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantize", "GatherBlockQuantized")
_CODES = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN}
    | {TensorProto.FLOAT8E5M2, TensorProto.FLOAT4E2M1}
)
NOTHING_QUANTIZED = "nothing in the file is quantized; give the file that qsdk.export or `qsdk quantize` wrote"


def is_anything_quantized(model: ModelProto) -> bool:
    """Return True if a model, its functions and bodies included, holds anything quantized."""
    nodes = [node for part in (model.graph, *model.functions) for node in all_nodes(part.node)]
    stored = [tensor.data_type for tensor in model.graph.initializer]
    stored += [tensor.data_type for node in nodes for _, body in bodies(node) for tensor in body.initializer]
    return any(code in _CODES for code in stored) or any(_is_quantized(node) for node in nodes)


def _is_quantized(node: NodeProto) -> bool:
    if node.op_type in _PAIRS or node.op_type.startswith(_STARTS):
        return True
    return _is_narrow_site(node)


def has_narrow_sites(model: ModelProto) -> bool:
    """Return True if our export kept a site of a model in a narrow float type."""
    return any(_is_narrow_site(node) for node in model.graph.node)


def _is_narrow_site(node: NodeProto) -> bool:
    facts = metadata(node)
    return (node.op_type == "Cast" and "qsdk.site" in facts) or TYPE_KEY in facts
