"""Say whether the 8-bit kernels of ONNX Runtime can overflow for a model on this processor."""

from onnx import ModelProto, NodeProto

from onnx_backend.integer.exact_products import products_saturate
from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes
from onnx_backend.qdq.read import QdqPair, qdq_pairs, stored_tensors
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.numerics.exact_sums import are_exact
from qsdk.core.report import Report


def overflow_reason(model: ModelProto) -> str:
    """Return why a session at the runtime's default level may be off on this processor, with the remedies.

    Processors of the x86 family without VNNI add pairs of products of uint8 activations and int8 weights in 16 bits,
    which saturate. A model can only meet that where two neighbours among a layer's weights add up to more than 128.

    Args:
        model: a Q/DQ model.

    Returns:
        The reason, or "" where nothing can overflow.
    """
    if not products_saturate():
        return ""
    pairs = {pair.output: pair for pair in qdq_pairs(model)}
    stored = stored_tensors(model)

    def overflows(read: QdqPair | None, weight: QdqPair | None) -> bool:
        if read is None or weight is None or weight.stored is None or read.encoding.dtype.name != "uint8":
            return False
        axis = attributes(weight.dequantize).get("axis", 1) if weight.encoding.scale.size > 1 else None
        return weight.encoding.dtype.container == "int8" and not are_exact(array(stored[weight.stored]), axis)

    # a Gemm runs on codes only where both operands have zero-point tensors
    layers = ((node, *map(pairs.get, node.input[:2])) for node in model.graph.node if node.op_type in LINEAR)
    if not any(overflows(read, weight) and _in_integers(node, read, weight) for node, read, weight in layers):
        return ""
    return (
        "this processor has no VNNI, and the 8-bit kernels of ONNX Runtime's default session overflow on it: "
        "weights of int8_exact (quantize with config.for_dialect('onnxruntime')), of int7 and of uint8 are exact "
        "there, and so is to_integer with weights='unsigned'"
    )


def _in_integers(node: NodeProto, *pairs: QdqPair | None) -> bool:
    """Return whether the runtime computes a layer in integers; a Gemm without zero-point tensors stays float."""
    return node.op_type != "Gemm" or all(pair is not None and len(pair.dequantize.input) > 2 for pair in pairs)


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
