"""Say whether the 8-bit kernels of ONNX Runtime can overflow for a model on this processor."""

from onnx import ModelProto, NodeProto

from onnx_backend.integer.exact_products import products_saturate
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import attributes
from onnx_backend.qdq.read import QdqPair, qdq_pairs, stored_tensors
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.numerics.exact_sums import are_exact
from qsdk.core.report import Report

_BYTES = frozenset({"uint8", "int8"})
_DYNAMIC = "DynamicQuantizeLinear"


def overflow_reason(model: ModelProto) -> str:
    """Return why a session at the runtime's default level may be off on this processor, with the remedies.

    Processors of the x86 family without VNNI add pairs of products of uint8 activations (int8 ones are turned into
    them) and int8 weights in 16 bits, which saturate. A model can only meet that where two neighbours among a layer's
    weights add up to more than 128, or where the second operand of int8 is computed as well.

    Args:
        model: a Q/DQ model.

    Returns:
        The reason, or "" where nothing can overflow.
    """
    if not products_saturate():
        return ""
    stored, made_by = stored_tensors(model), producers(model.graph.node)
    pairs = {pair.output: pair for pair in qdq_pairs(model)}
    of_bytes = {name for name, pair in pairs.items() if pair.stored is None and pair.encoding.dtype.name in _BYTES}
    moving = {  # with ranges that are found while the model runs, which no convolution has a kernel for
        node.output[0]
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and getattr(made_by.get(node.input[0]), "op_type", "") == _DYNAMIC
    }

    def overflows(op_type: str, read: str, weight: QdqPair | None) -> bool:
        known = of_bytes | moving if op_type in ("MatMul", "Gemm") else of_bytes
        if weight is None or read not in known or weight.encoding.dtype.container != "int8":
            return False
        axis = attributes(weight.dequantize).get("axis", 1) if weight.encoding.scale.size > 1 else None
        return weight.stored is None or not are_exact(array(stored[weight.stored]), axis)

    # a Gemm runs on codes only where both operands have zero-point tensors
    layers = ((node, node.input[0], pairs.get(node.input[1])) for node in model.graph.node if node.op_type in LINEAR)
    if not any(
        overflows(node.op_type, read, weight) and _in_integers(node, made_by.get(read), weight)
        for node, read, weight in layers
    ):
        return ""
    return (
        "this processor has no VNNI, and the 8-bit kernels of ONNX Runtime's default session overflow on it: "
        "weights of int8_exact (quantize with config.for_dialect('onnxruntime')), of int7 and of uint8 are exact "
        "there, and so is to_integer with weights='unsigned'"
    )


def _in_integers(node: NodeProto, read: NodeProto | None, weight: QdqPair | None) -> bool:
    """Return whether the runtime computes a layer in integers; a Gemm without zero-point tensors stays float."""
    nodes = (read, None if weight is None else weight.dequantize)
    return node.op_type != "Gemm" or all(one is not None and len(one.input) > 2 for one in nodes)


def with_overflow(report: Report, model: ModelProto, *, in_session: bool) -> Report:
    """Add to a report on parity what the processor's 8-bit kernels do to the model.

    Args:
        report: on parity.
        model: the Q/DQ model that it is about.
        in_session: whether the default session was compared; then this is the `reason` of a failure. Else it is
            a warning, `default_session`, that what was compared is not what an application runs here.
    """
    reason = "" if in_session and report.summary["passed"] else overflow_reason(model)
    if not reason:
        return report
    warning = f"not what was compared: {reason}; runtime='onnxruntime' compares it"
    fact = {"reason": reason} if in_session else {"default_session": warning}
    return Report(report.title, report.rows, {**report.summary, **fact})
