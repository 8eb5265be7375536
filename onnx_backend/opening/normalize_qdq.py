"""Rewrite a Q/DQ file of any tool in the one form that `qdq.read` reads.

Tools write old opsets (raised here, and compared with the original), Q/DQ of the runtime's own domain, and scales that
are computed from constants. Quantization in another form than Q/DQ cannot be read back, and is refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.opening.read_graph import inline_functions, read_graph, with_sites
from onnx_backend.passes.canonicalize import canonicalize
from onnx_backend.passes.convert_opset import raise_opset, require_known_opset
from onnx_backend.passes.integer_cache import with_float_cache
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex, initializers, nodes_reaching, unique
from onnx_backend.proto.nodes import (
    attributes,
    copied,
    drop_unused_initializers,
    lift_constants,
    metadata,
    node_label,
    rename_inputs,
    replace_nodes,
    retain,
    set_metadata,
)
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import Types, dtype_name, types_of
from onnx_backend.qdq.graph_editor import array_type
from onnx_backend.qdq.layer_inputs import PART_KEY
from onnx_backend.qdq.marks import exact_floats, exact_in, open_qdq
from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.qdq.read import CAST_KEY, FLOAT32, FLOAT_CODES, FLOAT_NAMES, LITERAL_KEY, SCALES_KEY, encoding_of_pair
from onnx_backend.readers import COPY_KEY
from qsdk.core.errors import FileFormatError
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DTYPES, DType
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.planning.from_encodings import kinds_of


@dataclass(frozen=True)
class _Pair:
    """A foreign DequantizeLinear, the QuantizeLinear in front and the Clip of codes in between, if any."""

    dequantize: NodeProto
    quantize: NodeProto | None
    source: str  # the tensor that is quantized, or stored as codes
    encoding: Encoding
    tensor_type: str  # the float type of its scales, and of its result
    written_as: str  # the float type of its scales in the rewritten model


_OURS = frozenset({"qsdk.site", COPY_KEY, LITERAL_KEY, SCALES_KEY})


def is_foreign(node: NodeProto) -> bool:
    """Return True if a node is a DequantizeLinear that records no site."""
    return node.op_type == "DequantizeLinear" and not _OURS & set(metadata(node))


def rewrite_foreign_pairs(model: ModelProto) -> None:
    """Rewrite foreign pairs in the form of `insert`, in place, under the site names of the float model.

    The model is sorted, at opset 21 or above, with stored parameters.
    """
    graph, index = model.graph, GraphIndex(model.graph)
    pairs = list(_pairs(index))
    first_pairs: dict[str, list[_Pair]] = {}  # tensor -> the first pair of each encoding
    replacements: dict[str, list[NodeProto]] = {}  # output of a foreign DequantizeLinear -> its new nodes
    renamed: dict[str, str] = {}
    for number, pair in enumerate(pairs):
        output = pair.dequantize.output[0]
        known = first_pairs.setdefault(pair.source, [])
        first = next((other for other in known if other.encoding == pair.encoding), None)
        if first is None:
            known.append(pair)
            replacements[output] = _pair_nodes(index, pair, f"#{number}")
        elif output in index.outputs:
            replacements[output] = [
                helper.make_node("Identity", [first.dequantize.output[0]], [output], node_label(pair.dequantize))
            ]
        else:
            replacements[output] = []
            renamed[output] = first.dequantize.output[0]
    nodes = []
    for node in graph.node:
        for fresh in replacements.get(next(iter(node.output), ""), [node]):
            rename_inputs([fresh], renamed)
            nodes.append(fresh)
    replace_nodes(graph, nodes_reaching(nodes, index.outputs))
    drop_unused_initializers(graph)
    still_computed = {name for node in graph.node for name in node.output}
    retain(graph.value_info, lambda value: value.name in still_computed)  # codes may be floats now
    _name_sites(model)


def _pairs(index: GraphIndex) -> Iterator[_Pair]:
    stored, makers = index.stored, index.makers
    for node in index.graph.node:
        if not is_foreign(node):
            continue
        quantize, clip = makers.get(node.input[0]), None
        if quantize is not None and quantize.op_type == "Clip" and quantize.input[0] in makers:
            quantize, clip = makers[quantize.input[0]], quantize
        if quantize is not None and quantize.op_type != "QuantizeLinear":
            quantize = None
        if quantize is None and node.input[0] not in stored:
            continue  # a tensor that arrives quantized has no site of its own
        encoding = encoding_of_pair(node, quantize, stored, makers)
        if clip is not None:
            encoding = replace(encoding, dtype=_dtype_of_clip(clip, encoding, stored))
        source = node.input[0] if quantize is None else quantize.input[0]
        if source in stored:
            rank = len(stored[source].dims)
            encoding = encoding if encoding.axis is None else replace(encoding, axis=encoding.axis % rank)
        scale = stored.get(node.input[1])
        code = TensorProto.FLOAT if scale is None else int(scale.data_type)
        kind = FLOAT_NAMES.get(code, FLOAT32)
        yield _Pair(node, quantize, source, encoding, kind, "float16" if kind == "float16" else FLOAT32)


def _dtype_of_clip(clip: NodeProto, encoding: Encoding, stored: Mapping[str, TensorProto]) -> DType:
    """Return the dtype whose grid is that of a Clip of codes."""
    if all(name in stored for name in clip.input[1:3]) and len(clip.input) == 3:
        low, high = (float(array(stored[name]).reshape(())) for name in clip.input[1:3])
        wide = encoding.dtype
        signed = [d for d in DTYPES.values() if d.is_integer and d.signed == wide.signed]
        for dtype in (*signed, *(found.strict for found in signed if found.signed)):
            if (dtype.lo, dtype.hi) == (max(low, wide.lo), min(high, wide.hi)):
                return dtype
    raise FileFormatError(
        f"node {node_label(clip)!r} clips codes to a grid that no dtype has; quantize the model again with the full "
        "grid of an integer dtype, or its strict symmetric one"
    )


def _pair_nodes(index: GraphIndex, pair: _Pair, site: str) -> list[NodeProto]:
    """Return the nodes of `insert` for a pair, under a provisional site name."""
    encoding = pair.encoding
    if pair.source not in index.stored:
        return _activation(index, pair, site)
    codes = array(index.stored[pair.source])
    if pair.quantize is not None:
        codes = encoding.quantize(codes)
    values = encoding.dequantize(codes)
    again = encoding.quantize(exact_floats(encoding, codes))
    if not np.array_equal(encoding.dequantize(again), values, equal_nan=True):
        # no float32 represents an int32 beyond 2^24: the node is kept as it is, and its tensor has no site
        set_metadata(pair.dequantize, kept="its codes have no float32")
        return [pair.dequantize]
    name = index.fresh(f"{pair.source.removesuffix('_quantized')}_quantized")
    index.graph.initializer.append(numpy_helper.from_array(again.astype(storage_type(encoding.dtype)), name))
    # in float32, where no value of the tensor's own type stands for a code (of an int32 bias)
    exact = exact_in(pair.tensor_type, encoding, again) is not None
    return _dequantized(index, pair if exact else replace(pair, written_as=FLOAT32), name, site)


def _dequantized(index: GraphIndex, pair: _Pair, codes: str, site: str) -> list[NodeProto]:
    """Return the DequantizeLinear of a pair, and the Cast of its result to the type that it had, where it needs one."""
    output = pair.dequantize.output[0]
    if pair.written_as == pair.tensor_type:
        return [_node(index, pair, "DequantizeLinear", codes, output, site)]
    wide = index.fresh(f"{output}/float32")
    return [
        _node(index, pair, "DequantizeLinear", codes, wide, site),
        _cast(wide, output, pair.tensor_type, site, index),
    ]


def _cast(source: str, output: str, tensor_type: str, site: str, index: GraphIndex) -> NodeProto:
    cast = helper.make_node("Cast", [source], [output], index.fresh(f"{output}/cast"), to=FLOAT_CODES[tensor_type])
    set_metadata(cast, cast_of=site)
    return cast


def _activation(index: GraphIndex, pair: _Pair, site: str) -> list[NodeProto]:
    encoding, source, nodes = pair.encoding, pair.source, []
    if encoding.dtype.narrows_container and encoding.axis is not None:
        raise FileFormatError(
            f"node {node_label(pair.dequantize)!r} narrows the grid of an activation per channel, which cannot be "
            "written again; make it per tensor"
        )
    if pair.written_as != pair.tensor_type:
        wide = index.fresh(f"{source}/float32")
        nodes.append(_cast(source, wide, FLOAT32, site, index))
        source = wide
    if encoding.dtype.narrows_container:
        bounds = [index.fresh(f"{source}/{end}") for end in ("low", "high")]
        for name, value in zip(bounds, (encoding.low, encoding.high), strict=True):
            typed = value.reshape(()).astype(array_type(pair.written_as))
            index.graph.initializer.append(numpy_helper.from_array(typed, name))
        clipped = index.fresh(f"{source}/clipped")
        nodes.append(helper.make_node("Clip", [source, *bounds], [clipped], index.fresh(f"{clipped}/clip")))
        set_metadata(nodes[-1], site=site)
        source = clipped
    codes = index.fresh(f"{pair.source}/codes")
    nodes.append(_node(index, pair, "QuantizeLinear", source, codes, site))
    return [*nodes, *_dequantized(index, pair, codes, site)]


def _node(index: GraphIndex, pair: _Pair, op_type: str, source: str, output: str, site: str) -> NodeProto:
    encoding, old = pair.encoding, pair.dequantize if op_type == "DequantizeLinear" else pair.quantize
    assert old is not None
    shape = () if encoding.axis is None else encoding.scale.shape
    typed = encoding.zero_point.astype(storage_type(encoding.dtype))
    inputs = [source]
    for name, value in (("scale", encoding.scale.astype(array_type(pair.written_as))), ("zero_point", typed)):
        inputs.append(index.fresh(f"{output}/{name}"))
        index.graph.initializer.append(numpy_helper.from_array(value.reshape(shape), inputs[-1]))
    options: dict[str, Any] = {} if encoding.axis is None else {"axis": encoding.axis}
    options |= {} if encoding.block_size is None else {"block_size": encoding.block_size}
    node = helper.make_node(op_type, inputs, [output], old.name or index.fresh(f"{output}/{op_type}"), **options)
    set_metadata(node, site=site, dtype=encoding.dtype.name)
    return node


# --- names ----------------------------------------------------------------------------------------------------------


def _name_sites(model: ModelProto) -> None:
    """Name foreign pairs after the sites that the float model has on the ONNX side, and note their kinds."""
    graph = read_graph(open_qdq(model).model)
    plain = with_sites(replace(graph, tensors=[replace(tensor, site=None) for tensor in graph.tensors]))
    kinds = kinds_of(graph)
    names: dict[str, str] = {}
    taken = {site for site in graph.sites if not site.startswith("#")}
    for site, tensor in graph.sites.items():
        if site.startswith("#"):
            facts, twice = plain.tensors[tensor], _quantized_before(graph, tensor)
            names[site] = unique(names.get(twice) or facts.site or facts.name, taken)
    kept = {value.name for value in model.graph.output}
    stored = initializers(model.graph)
    renamed: dict[str, str] = {}
    for node in model.graph.node:
        rename_inputs([node], renamed)
        for entry in [e for e in node.metadata_props if e.key in ("qsdk.site", CAST_KEY) and e.value in names]:
            kind, entry.value = kinds[entry.value], names[entry.value]
            if node.op_type not in ("Clip", "Cast"):
                set_metadata(node, kind=kind)
            if node.op_type == "DequantizeLinear" and node.input[0] not in stored and node.output[0] not in kept:
                renamed[node.output[0]] = node.output[0] = f"{entry.value}/dequantized"


def _quantized_before(graph: Graph, tensor: int) -> str:
    """Return the site that already quantizes the tensor under another encoding; "" where there is none.

    Such a pair is read as an Identity behind the first one, named after its mark.
    """
    maker = graph.ops[graph.producer[tensor]] if tensor in graph.producer else None
    source = None if maker is None or not maker.name.startswith("#") else maker.inputs[0]
    return "" if source is None else graph.tensors[source].site or ""


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

    The given model is not changed. What it has in a narrow float type by a rule of its config comes in float32, between
    casts, and a cache of integers as one of floats.
    """
    model = as_simulated(model)
    _require_pairs(model)
    model = with_float_cache(model)
    if not _is_foreign(model):
        return model
    require_known_opset(model)
    result = inline_functions(copied(model))
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
    parts = {name for node in nodes if PART_KEY in metadata(node) for name in node.output}
    for node in nodes:
        if parts.intersection(node.input):
            continue  # it reads codes of pairs that stand in the file (`layer_inputs`)
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
        retain(model.opset_import, lambda entry: entry.domain != _RUNTIME)


# --- parameters -----------------------------------------------------------------------------------------------------


def _store_parameters(model: ModelProto) -> None:
    """Compute and store what Q/DQ nodes read of constants: scales, zero points, views of integer weights."""
    graph, index = model.graph, GraphIndex(model.graph)
    wanted = [name for node in graph.node if node.op_type in _PAIR for name in _operands(node, index.makers)]
    scales = {node.input[1] for node in graph.node if node.op_type in _PAIR}
    found: dict[str, TensorProto] = {}
    for name in dict.fromkeys(wanted):
        if name not in index.stored and name in index.makers:
            value = _computed(name, index, model, through=("DequantizeLinear",) if name in scales else ())
            found |= {} if value is None else {name: value}
    if not found:
        return
    kept = [node for node in graph.node if not any(name in found for name in node.output)]
    graph.initializer.extend(found.values())
    replace_nodes(graph, nodes_reaching(kept, index.outputs))
    drop_unused_initializers(graph)


def _operands(node: NodeProto, makers: Mapping[str, NodeProto]) -> Iterator[str]:
    yield from (name for name in node.input[1:3] if name)
    if node.op_type == "DequantizeLinear":
        yield node.input[0]
        clip = makers.get(node.input[0])
        if clip is not None and clip.op_type == "Clip":
            yield from (name for name in clip.input[1:3] if name)


def _computed(name: str, index: GraphIndex, model: ModelProto, *, through: tuple[str, ...]) -> TensorProto | None:
    """Return the value of a tensor that depends on stored tensors alone, without Q/DQ in between; else None.

    Block scales may come `through` a DequantizeLinear of their own (NVFP4).
    """
    stored, makers = index.stored, index.makers
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
    """Refuse Q/DQ that scale, zero point and dtype of a tensor do not fully describe."""
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
