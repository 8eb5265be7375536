"""Rewrite a Q/DQ file of any tool in the one form that `qdq.read` reads.

Tools write old opsets (raised here, and compared with the original), Q/DQ of the runtime's own domain, and scales that
are computed from constants. Quantization in another form than Q/DQ cannot be read back, and is refused by name.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.opening.canonical_pairs import is_foreign, rewrite_foreign_pairs
from onnx_backend.opening.read_graph import inline_functions
from onnx_backend.passes.canonicalize import canonicalize
from onnx_backend.passes.convert_opset import raise_opset, require_known_opset
from onnx_backend.passes.integer_cache import with_float_cache
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, nodes_reaching, producers
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import attributes, drop_unused_initializers, lift_constants, node_label, replace_nodes
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import Types, dtype_name, types_of
from onnx_backend.qdq.islands.narrow import as_simulated
from qsdk.core.errors import FileFormatError

_RUNTIME = "com.microsoft"
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_BARRIERS = frozenset({*_PAIR, "DynamicQuantizeLinear"})
_FREE_TYPES = 23  # the opset from which scales may be of another type than the tensor
_FLOATS = ("float32", "float16", "bfloat16")
_KERNELS = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"})
_RUNTIME_KERNELS = (
    *("QLinear", "QGemm", "QAttention", "QOrdered", "QEmbed", "QMoE", "DynamicQuantize", "MatMulIntegerToFloat"),
    *("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "ConvTransposeWithDynamicPads"),
)


def normalize_qdq(model: ModelProto) -> ModelProto:
    """Return a Q/DQ model of any tool as standard Q/DQ at opset 21 or above, with stored parameters.

    Args:
        model: it is not changed. What it has in a narrow float type by a rule of its config comes in float32, between
            casts, and a cache of integers as one of floats.

    Raises:
        FileFormatError: it holds quantization that is no Q/DQ, or Q/DQ that no encoding describes; names the node.
        ModelError: it cannot be raised.
    """
    model = as_simulated(model)
    _require_pairs(model)
    model = with_float_cache(model)
    if not _is_foreign(model):
        return model
    require_known_opset(model)
    result = inline_functions(load(model))
    lift_constants(result)
    canonicalize(result)
    result, _ = raise_opset(result, None)
    _to_standard_domain(result)
    _store_parameters(result)
    _require_described(result)
    rewrite_foreign_pairs(result)
    return result


def _is_foreign(model: ModelProto) -> bool:
    """Return True if another tool wrote the Q/DQ of a model, or some of it."""
    graphs = [model.graph, *model.functions]
    nodes = [node for graph in graphs for node in graph.node]
    old = 0 < opset_of(model) < OPSET
    return any(is_foreign(node) and (node.domain in ("", "ai.onnx", _RUNTIME)) for node in nodes) or (
        old and any(node.op_type in _PAIR for node in nodes)
    )


def _require_pairs(model: ModelProto) -> None:
    """Refuse the runtime's integer kernels: the Q/DQ that they were fused from is lost."""
    nodes = [node for graph in (model.graph, *model.functions) for node in all_nodes(graph.node)]
    for node in nodes:
        ours = node.domain in ("", "ai.onnx") and node.op_type in _KERNELS
        if ours or (node.domain == _RUNTIME and node.op_type.startswith(_RUNTIME_KERNELS)):
            raise FileFormatError(
                f"node {node_label(node)!r} is {node.op_type}: the file holds integer kernels instead of Q/DQ pairs; "
                "write it in the QDQ format (quant_format=QuantFormat.QDQ in onnxruntime.quantization), or quantize "
                "the float model it came from"
            )


def _to_standard_domain(model: ModelProto) -> None:
    """Move Q/DQ of the runtime's domain to the standard one; they mean the same from opset 21 on."""
    for node in all_nodes(model.graph.node):
        if node.domain == _RUNTIME and node.op_type in _PAIR:
            node.domain = ""
    if not any(node.domain == _RUNTIME for node in all_nodes(model.graph.node)):
        kept = [entry for entry in model.opset_import if entry.domain != _RUNTIME]
        del model.opset_import[:]
        model.opset_import.extend(kept)


# --- parameters -----------------------------------------------------------------------------------------------------


def _store_parameters(model: ModelProto) -> None:
    """Compute and store what Q/DQ nodes read of constants: scales, zero points, views of integer weights."""
    graph = model.graph
    stored, makers = initializers(graph), producers(graph.node)
    wanted = [name for node in graph.node if node.op_type in _PAIR for name in _operands(node, makers)]
    scales = {node.input[1] for node in graph.node if node.op_type in _PAIR}
    found: dict[str, TensorProto] = {}
    for name in dict.fromkeys(wanted):
        if name not in stored and name in makers:
            value = _computed(name, stored, makers, model, through=("DequantizeLinear",) if name in scales else ())
            found |= {} if value is None else {name: value}
    if not found:
        return
    kept = [node for node in graph.node if not any(name in found for name in node.output)]
    graph.initializer.extend(found.values())
    replace_nodes(graph, nodes_reaching(kept, {value.name for value in graph.output}))
    drop_unused_initializers(graph)


def _operands(node: NodeProto, makers: Mapping[str, NodeProto]) -> Iterator[str]:
    yield from (name for name in node.input[1:3] if name)
    if node.op_type == "DequantizeLinear":
        yield node.input[0]
        clip = makers.get(node.input[0])
        if clip is not None and clip.op_type == "Clip":
            yield from (name for name in clip.input[1:3] if name)


def _computed(
    name: str,
    stored: Mapping[str, TensorProto],
    makers: Mapping[str, NodeProto],
    model: ModelProto,
    *,
    through: tuple[str, ...] = (),
) -> TensorProto | None:
    """Return the value of a tensor that depends on stored tensors alone, without Q/DQ in between; else None.

    Block scales may come `through` a DequantizeLinear of their own (NVFP4).
    """
    needed: dict[int, NodeProto] = {}
    pending, leaves = [name], {}
    while pending:
        current = pending.pop()
        if current in stored:
            leaves[current] = array(stored[current])
        elif current not in makers or makers[current].op_type in _BARRIERS.difference(through):
            return None
        elif id(makers[current]) not in needed:
            needed[id(makers[current])] = makers[current]
            pending += [source for source in makers[current].input if source]
    nodes = [node for node in model.graph.node if id(makers.get(next(iter(node.output), ""))) in needed]
    inputs = [helper.make_tensor_value_info(leaf, stored[leaf].data_type, list(stored[leaf].dims)) for leaf in leaves]
    output = helper.make_empty_tensor_value_info(name)
    piece = helper.make_model(helper.make_graph(nodes, "parameter", inputs, [output]), opset_imports=model.opset_import)
    try:
        (value,) = ReferenceEvaluator(piece).run(None, leaves)
    except Exception:  # it stays computed, and is refused by name where it is read
        return None
    return numpy_helper.from_array(np.asarray(value), name)


# --- what an encoding can describe ---------------------------------------------------------------------------------


def _require_described(model: ModelProto) -> None:
    """Refuse Q/DQ that scale, zero point and dtype of a tensor do not fully describe.

    Raises:
        FileFormatError: names the node.
    """
    stored = initializers(model.graph)
    types = types_of(model) if opset_of(model) >= _FREE_TYPES else {}
    for node in model.graph.node:
        if node.op_type in _PAIR:
            problem = _undescribed(node, stored, types)
            if problem:
                raise FileFormatError(f"node {node_label(node)!r} {problem}")


def _undescribed(node: NodeProto, stored: Mapping[str, TensorProto], types: Types) -> str:
    options = attributes(node)
    scale = stored.get(node.input[1])
    of_scale = dtype_name(TensorProto.FLOAT if scale is None else scale.data_type)
    if options.get("precision", 0) not in (0, TensorProto.FLOAT):
        return "computes in another type than float32 (precision); leave that to its scale, or write FLOAT"
    tensor = node.input[0] if node.op_type == "QuantizeLinear" else node.output[0]
    kind = types.get(tensor, (of_scale, None))[0]
    if scale is not None and dtype_name(scale.data_type) in _FLOATS and kind in _FLOATS and kind != of_scale:
        return f"has {of_scale} scales for a {kind} tensor; write the scales in its type"
    if node.op_type == "QuantizeLinear" and options.get("saturate", 1) == 0:
        return "turns what is too large into NaN (saturate=0), which no encoding says; write it with saturate=1"
    zero_point = stored.get(node.input[2]) if len(node.input) > 2 else None
    if zero_point is not None and zero_point.data_type == TensorProto.INT32 and array(zero_point).any():
        return "has an int32 tensor with a zero point other than 0, which runtimes read differently; write 0"
    return ""
