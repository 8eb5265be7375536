"""TensorRT: how to write for it and what it refuses, from NVIDIA's documents; no engine was built to check them.

The sections are those of "Working with Quantized Types", docs.nvidia.com/deeplearning/tensorrt/latest.
"""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes, node_label
from onnx_backend.readers import Readers, type_name
from onnx_backend.runtimes.runtime import Runtime
from onnx_backend.runtimes.tables import lacks_zero_point, ranges_at_run_time
from onnx_backend.validation.scope import Finding, error, is_quantizer, warning
from qsdk.core.config.target import load_target
from qsdk.core.graph.op_facts import LINEAR

_TYPES = frozenset({"int8", "float8e4m3fn", "float4e2m1"})  # and int4 for weights
_BLOCKS = (64, 128)
_FLOAT_OUTPUT = 'leave the output of that layer float: .override("the layer", activation="float32")'


def _findings(model: ModelProto) -> Iterator[Finding]:
    known = Readers(model.graph)
    for node in model.graph.node:
        yield from ranges_at_run_time(node)
        yield from _placement(node, known)
        if is_quantizer(node):
            yield from lacks_zero_point(node, "from which this runtime takes the type of its codes", "tensorrt")
            yield from _of_quantizer(node, known)


def _of_quantizer(node: NodeProto, known: Readers) -> Iterator[Finding]:
    """Yield what a QuantizeLinear or DequantizeLinear cannot be: types, zero points, blocks.

    Section "Quantization Schemes": int8, int4 for weights alone, FP8 of E4M3 and FP4, all symmetric; int4 has scales
    per block of 64 or 128 along one of the last two axes. Operators reference, "Quantize": the zero points are 0, and
    no 8-bit type has blocks. An int32 bias is refused by the importer (onnx/onnx-tensorrt, issue 850).
    """
    name = node_label(node)
    stored = known.stored.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
    maker = known.makers.get(node.input[0])
    if stored is not None:
        dtype = type_name(stored.data_type)
    else:
        quantize = maker if node.op_type == "DequantizeLinear" else node
        if quantize is None or quantize.op_type != "QuantizeLinear":
            return
        dtype = known.dtype(quantize)
    if stored is not None and stored.data_type == TensorProto.INT32:
        remedy = 'quantize with config.for_dialect("tensorrt"), which leaves biases float'
        yield error(name, "dialect", "TensorRT reads no int32 bias behind a DequantizeLinear", remedy)
    elif stored is not None and dtype == "int4":
        yield from _int4_blocks(node, stored)
    elif dtype not in _TYPES:
        remedy = 'quantize with config.for_dialect("tensorrt"): int8, symmetric'
        yield error(name, "dialect", f"TensorRT has no quantized type {dtype}", remedy)
    elif attributes(node).get("block_size") and dtype != "float4e2m1":
        yield error(name, "dialect", f"TensorRT has no scales per block of {dtype}", "quantize it per channel")
    zero_point = known.stored.get(node.input[2]) if len(node.input) > 2 else None
    if zero_point is not None and array(zero_point).any():
        remedy = "quantize with symmetric_activations=True and symmetric weights"
        yield error(name, "dialect", "TensorRT takes zero points of 0 alone", remedy)


def _int4_blocks(node: NodeProto, stored: TensorProto) -> Iterator[Finding]:
    """Yield what is wrong with the scales of int4 weights; see `_of_quantizer`."""
    facts = attributes(node)
    size, rank = int(facts.get("block_size", 0)), len(stored.dims)
    if size not in _BLOCKS:
        has = f"has blocks of {size}" if size else "has none"
        problem = f"TensorRT takes int4 weights in blocks of 64 or 128, and this one {has}"
        yield error(node_label(node), "dialect", problem, "quantize with block_size=128, or with int8 weights")
    elif int(facts.get("axis", 1)) % rank < rank - 2:
        problem = "TensorRT takes blocks of int4 along one of the last two axes alone"
        yield error(node_label(node), "dialect", problem, "quantize this layer with int8 weights")


def _placement(node: NodeProto, known: Readers) -> Iterator[Finding]:
    """Yield where pairs keep a layer from computing in integers, or from being fused: right, but slow.

    Section "Explicit Quantization", Q/DQ layer-placement recommendations: all inputs of convolutions and matrix
    products are quantized; activations are fused by TensorRT itself; the residual input of a skip connection is
    quantized, and an extra pair between a layer and the addition behind it separates the two.
    """
    name = node_label(node)
    if node.op_type in LINEAR:
        quantized = [_is_dequantized(source, known) for source in node.input[:2]]
        if any(quantized) and not all(quantized) and known.weight(node.input[1]) not in ("int4", "int4 blocks"):
            problem = "one of its two operands is quantized, and the other is float, so TensorRT computes it in floats"
            yield warning(name, "placement", problem, "quantize both, or leave both float")
        for reader in _behind_its_pair(node, known):
            problem = (
                f"the pair between it and the {reader.op_type} {node_label(reader)!r} keeps TensorRT from fusing them"
            )
            yield warning(name, "placement", problem, _FLOAT_OUTPUT)
    if node.op_type == "Add" and len(node.input) == 2:
        makers = [known.makers.get(source) for source in node.input]
        layers = [maker is not None and maker.op_type in LINEAR for maker in makers]
        others = [not layer and not _is_dequantized(s, known) for layer, s in zip(layers, node.input, strict=True)]
        if any(layers) and any(others) and not any(source in known.stored for source in node.input):
            problem = "its residual input is float, so TensorRT computes the layer in front of it with a float result"
            yield warning(name, "placement", problem, "quantize the residual input")


def _is_dequantized(source: str, known: Readers) -> bool:
    maker = known.makers.get(source)
    return maker is not None and maker.op_type == "DequantizeLinear"


def _behind_its_pair(layer: NodeProto, known: Readers) -> list[NodeProto]:
    """Return the Relu or Add that reads a layer's output, which nothing else reads, through a pair."""
    readers, source = [layer], layer.output[0]
    for op_type in ("QuantizeLinear", "DequantizeLinear"):
        readers = known.readers.get(source, [])
        if len(readers) != 1 or readers[0].op_type != op_type or source in known.outputs:
            return []
        source = readers[0].output[0]
    readers = known.readers.get(source, [])
    return readers if len(readers) == 1 and readers[0].op_type in ("Relu", "Add") else []


TENSORRT = Runtime(load_target("tensorrt"), findings=_findings)
