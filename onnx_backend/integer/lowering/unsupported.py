"""Why some operators have no integer form, and what to do instead."""

from collections.abc import Mapping
from types import MappingProxyType

from onnx import NodeProto

from onnx_backend.integer.ir.values import Refused
from onnx_backend.proto.subgraphs import captured_tensors, has_bodies

_REPLACE = "replace it by operators that have one, or keep it float: name it in allow_float"
_CONTROL_FLOW = (
    "it is control flow, whose branches or steps are chosen while the model runs",
    "export the model with the condition or the number of steps fixed, or split the model there",
)
_BRANCHES = (
    _CONTROL_FLOW[0],
    "fix the input that decides it when the float model is quantized: quantize(..., inputs={name: value}), or export "
    "the model with the condition fixed, or split the model there",
)
_SEQUENCE = ("it works on a list of tensors", "export the model with separate tensors, Split or Concat instead")
_COMPOSED = (
    "it was left in one piece, because allow_float names another node of its type",
    "name all nodes of this type in allow_float, or none",
)
_DYNAMIC = (
    "its scale and zero point depend on the data of every run",
    "quantize the float model statically, with calibration data",
)
_EINSUM = (
    "it has more than two factors, a diagonal, a sum over an axis of one factor alone, or several dynamic axes",
    "write it as several Einsums of two tensors, with a QuantizeLinear/DequantizeLinear pair between them, or fix the "
    "dynamic axes: shapes={input name: sizes}",
)
_REASONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("Loop", "Scan"), _CONTROL_FLOW),
        "If": _BRANCHES,
        **{f"Sequence{rest}": _SEQUENCE for rest in ("At", "Construct", "Empty", "Erase", "Insert", "Length", "Map")},
        **dict.fromkeys(("ConcatFromSequence", "SplitToSequence"), _SEQUENCE),
        "DynamicQuantizeLinear": _DYNAMIC,
        **dict.fromkeys(("Attention", "RotaryEmbedding"), _COMPOSED),
        "Einsum": _EINSUM,
    }
)


def refusal(node: NodeProto) -> Refused:
    """Return the refusal of an operator that has no lowering."""
    found = _REASONS.get(node.op_type)
    return Refused(*found) if found else Refused(f"{node.op_type} has no integer form in this version", _REPLACE)


def require_no_bodies(node: NodeProto) -> None:
    """Refuse control flow that computes on more than integers that are its own inputs.

    Raises:
        Refused: a body reads tensors from outside, which have other names in the integer model, or none.
    """
    if has_bodies(node) and captured_tensors(node):
        raise Refused(*_REASONS.get(node.op_type, _CONTROL_FLOW))
