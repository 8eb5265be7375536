"""Sites quantized with a range computed while the model runs: DynamicQuantizeLinear -> DequantizeLinear."""

from dataclasses import dataclass

from onnx import ModelProto, NodeProto

from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import metadata


@dataclass(frozen=True)
class DynamicPair:
    """A dynamically quantized site.

    Attributes:
        site: from the node's metadata, else the name of the tensor that is quantized.
        kind: activation, input or output.
        quantize: the DynamicQuantizeLinear.
        dequantize: the DequantizeLinear behind it.
    """

    site: str
    kind: str
    quantize: NodeProto
    dequantize: NodeProto


def dynamic_pairs(model: ModelProto) -> list[DynamicPair]:
    """List the dynamically quantized sites of a model in graph order, the first DequantizeLinear of each."""
    made_by = producers(model.graph.node)
    found: dict[str, DynamicPair] = {}
    for node in model.graph.node:
        quantize = made_by.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if quantize is None or quantize.op_type != "DynamicQuantizeLinear" or node.input[:] != quantize.output[:]:
            continue
        facts = metadata(node)
        place = DynamicPair(
            facts.get("qsdk.site") or quantize.input[0], facts.get("qsdk.kind") or "activation", quantize, node
        )
        found.setdefault(place.site, place)
    return list(found.values())
