"""Why some operators have no integer form, and what to do instead."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from onnx import NodeProto

from onnx_backend.integer.ir.context import label
from onnx_backend.integer.ir.values import Refused
from onnx_backend.proto.graph_queries import consumers, producers
from onnx_backend.proto.nodes import metadata
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
_SEQUENCE = (
    "it works on a list of tensors",
    "export the model with separate tensors, Split or Concat instead; where this is an nn.EmbeddingBag with offsets, "
    "give it indices [bags, length], with padding_idx where a bag is shorter",
)
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


def origins(nodes: Iterable[NodeProto]) -> dict[str, tuple[str, str]]:
    """Return name of a node or tensor of a Q/DQ model -> op type and name of the node that the user knows it by.

    A QuantizeLinear stands for the node whose result it quantizes.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in nodes:
        known = (node.op_type, label(node))
        if node.op_type == "QuantizeLinear":
            known = found.get(node.input[0], known)
        found.update(dict.fromkeys((label(node), *node.output), known))
    return found


def origin(name: str, known: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Return op type and name of the node of the Q/DQ model that a node of the integer model was written for."""
    name = name.removesuffix("_node")
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return known.get(name)


def sites_in_front(nodes: Iterable[NodeProto]) -> dict[str, str]:
    """Return name of a node -> the site in front of whose quantizer it stands, of a file that qsdk has written."""
    listed = list(nodes)
    readers, makers, found = consumers(listed), producers(listed), dict[str, str]()
    for node in listed:
        site = metadata(node).get("qsdk.site") if node.op_type == "DequantizeLinear" else None
        quantize = makers.get(node.input[0]) if site else None
        made_by = makers.get(quantize.input[0]) if quantize is not None else None
        while site and made_by is not None and made_by.op_type != "DequantizeLinear" and label(made_by) not in found:
            found[label(made_by)] = site
            alone = [makers[name] for name in made_by.input if name in makers and len(readers[name]) == 1]
            made_by = alone[0] if alone else None
    return found
