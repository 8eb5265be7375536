"""Sites quantized with a range computed while the model runs: DynamicQuantizeLinear -> DequantizeLinear."""

from collections.abc import Iterable
from dataclasses import dataclass

from onnx import ModelProto, NodeProto

from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.read import FLOAT32, casts_behind_pairs, type_of_cast
from qsdk.core.errors import ExportError
from qsdk.core.planning.plan import Decision


def require_written(decisions: Iterable[Decision]) -> None:
    """Refuse sites with the range of each token, for which ONNX has no quantizer.

    Raises:
        ExportError: names the first of them, and the remedy.
    """
    for decision in decisions:
        if decision.spec is not None and decision.spec.dynamic == "token":
            raise ExportError(
                f"{decision.site} has the range of each token, for which an ONNX file has no quantizer; export the "
                'module with format="compressed-tensors", or choose dynamic_activations=True (the range of each tensor)'
            )


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
