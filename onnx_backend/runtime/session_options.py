"""The session options that ONNX Runtime needs so that its default level computes the simulated values."""

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.dialects.dialect import Dialect
from onnx_backend.proto.graph_queries import initializers, producers
from onnx_backend.proto.nodes import attributes

#: MatMulNBits, to which the default level fuses a weight-only MatMul, quantizes activations to int8 unless this is set
EXACT_MATMUL = ("session.qdq_matmulnbits_accuracy_level", "0")
_INTEGERS = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2}
)
_BLOCKS = frozenset({16, 32, 64, 128, 256})


def needed_options(model: ModelProto, dialect: Dialect) -> dict[str, str]:
    """Return the session configuration entries (key -> value) that a lowered model needs to be exact.

    Weight-only MatMul and Gemm run as MatMulNBits, which is several times as fast as float, but at its default level
    of accuracy rounds the activations to int8: the results are off by some thousandths of their size.

    Args:
        model: with Q/DQ nodes.
        dialect: entries are for ONNX Runtime's CPU alone, so the others need none.
    """
    if dialect != "onnxruntime":
        return {}
    stored, makers = initializers(model.graph), producers(model.graph.node)
    fused = any(_becomes_nbits(node, stored, makers) for node in model.graph.node)
    return dict([EXACT_MATMUL]) if fused else {}


def _becomes_nbits(node: NodeProto, stored: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]) -> bool:
    """Return True if the runtime turns a node into MatMulNBits (measured, onnxruntime 1.31 and 1.32)."""
    if node.op_type not in ("MatMul", "Gemm") or (node.op_type == "Gemm" and attributes(node).get("transB")):
        return False
    source, weight = makers.get(node.input[0]), makers.get(node.input[1])
    if weight is None or weight.op_type != "DequantizeLinear" or weight.input[0] not in stored:
        return False
    if source is not None and source.op_type == "DequantizeLinear":
        return False
    codes = stored[weight.input[0]]
    if codes.data_type not in _INTEGERS or len(codes.dims) != 2:
        return False
    facts = attributes(weight)
    axis, block = facts.get("axis", 1) % 2, facts.get("block_size", 0)
    per_tensor = len(stored[weight.input[1]].dims) == 0
    return per_tensor or (axis == 1 and not block) or (axis == 0 and block in _BLOCKS)
