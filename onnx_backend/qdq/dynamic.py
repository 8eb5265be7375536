"""Sites quantized with a range computed while the model runs: DynamicQuantizeLinear -> DequantizeLinear."""

from dataclasses import dataclass

from onnx import ModelProto, NodeProto

from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.read import FLOAT32, casts_behind_pairs, type_of_cast


@dataclass(frozen=True)
class DynamicPair:
    """A dynamically quantized site.

    Attributes:
        site: from the node's metadata, else the name of the tensor that is quantized.
        kind: activation, input or output.
        quantize: the DynamicQuantizeLinear.
        source: the tensor that is quantized; where it is not float32, the pair has casts around it.
        output: the tensor that readers read.
        tensor_type: the float type of both.
    """

    site: str
    kind: str
    quantize: NodeProto
    source: str
    output: str
    tensor_type: str


def dynamic_pairs(model: ModelProto) -> list[DynamicPair]:
    """List the dynamically quantized sites of a model in graph order, the first DequantizeLinear of each."""
    made_by = producers(model.graph.node)
    casts = casts_behind_pairs(model.graph.node)
    found: dict[str, DynamicPair] = {}
    for node in model.graph.node:
        quantize = made_by.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if quantize is None or quantize.op_type != "DynamicQuantizeLinear" or node.input[:] != quantize.output[:]:
            continue
        facts = metadata(node)
        site, kind = facts.get("qsdk.site") or quantize.input[0], facts.get("qsdk.kind") or "activation"
        source, output, tensor_type = quantize.input[0], node.output[0], FLOAT32
        if output in casts:
            source, output, tensor_type = made_by[source].input[0], casts[output].output[0], type_of_cast(casts[output])
        found.setdefault(site, DynamicPair(site, kind, quantize, source, output, tensor_type))
    return list(found.values())
