"""Rules on valid models on which ONNX Runtime's default level fails, or computes wrong values."""

from collections.abc import Iterator

from onnx import ModelProto

from onnx_backend.proto.graph_queries import consumers, initializers, producers
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.proto.weightless import skeleton
from onnx_backend.qdq.fusion_barriers import COPY_KEY, HALVES, insert_barriers, needed_options, reads_moved_batch
from onnx_backend.qdq.kernel_casts import has_other_floats
from onnx_backend.validation.finding import Finding, warning
from onnx_backend.validation.scope import is_quantizer


def default_session(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning for each reader that export would separate from a quantized tensor by a barrier.

    Files that note the options with which a session is right have one for these.
    """
    yield from _ends_process(model)
    if opset_of(model) < OPSET or not any(is_quantizer(node) for node in model.graph.node):
        return  # the table was measured from this opset on
    for key, value in needed_options(model).items():
        problem = "ONNX Runtime's default level rounds the float input of layers with quantized weights to 8 bits"
        yield warning("", "default_session", problem, f"open sessions with the configuration entry {key}={value}")
    light = _headers(model)
    before = {name for node in light.graph.node for name in node.output}
    insert_barriers(light)
    readers, makers = consumers(light.graph.node), producers(light.graph.node)
    for node in light.graph.node:
        if COPY_KEY not in metadata(node) or node.output[0] in before:
            continue
        for reader in readers.get(node.output[0], []):
            if COPY_KEY in metadata(reader):
                continue  # it has a barrier already
            if reads_moved_batch(reader, metadata(node)[COPY_KEY], makers):
                continue  # that was said
            name = reader.name or reader.output[0]
            problem = (
                f"ONNX Runtime's default level fails on {reader.op_type} beside {metadata(node)[COPY_KEY]!r}, as it is "
                "quantized, or may give other values"
            )
            remedy = "export with dialect='onnxruntime', or open sessions at ORT_ENABLE_BASIC; qsdk parity tells"
            yield warning(name, "default_session", problem, remedy)


def _ends_process(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning for each MatMul at which ONNX Runtime's default level ends its process."""
    if not open_inputs(model) or not has_other_floats(model, HALVES):
        return
    makers = producers(model.graph.node)
    for node in model.graph.node:
        if any(reads_moved_batch(node, tensor, makers) for tensor in node.input):
            problem = (
                "ONNX Runtime 1.32 ends its process at its default level where a MatMul in float16 or bfloat16 reads a "
                "Transpose that moves an open first axis"
            )
            remedy = "export with dialect='onnxruntime', fix the sizes, or open sessions at ORT_ENABLE_EXTENDED"
            yield warning(node.name or node.output[0], "default_session", problem, remedy)


def _headers(model: ModelProto) -> ModelProto:
    """Return the model with only names, types and shapes of its large weights; parameters and biases are whole."""
    light = skeleton(model)
    known = initializers(light.graph)
    whole = {name for node in model.graph.node if is_quantizer(node) for name in node.input[1:]}
    for tensor in model.graph.initializer:
        if tensor.name in known:
            continue
        if tensor.name in whole or len(tensor.dims) <= 1:
            light.graph.initializer.append(tensor)
        else:
            light.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return light
