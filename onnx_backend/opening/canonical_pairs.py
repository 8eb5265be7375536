"""Rewrite the Q/DQ pairs of another tool in the form of `insert`: one pair per site, named after it.

Tools quantize stored floats at run time, put a pair in front of every reader, several DequantizeLinears behind one
QuantizeLinear, or a Clip of the codes in between. The rewritten model computes the same: pairs of bfloat16, for which
the runtime has no kernels, become pairs of float32 between Casts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph, with_sites
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, names_in, nodes_reaching, producers, unique
from onnx_backend.proto.nodes import (
    drop_unused_initializers,
    metadata,
    node_label,
    rename_inputs,
    replace_nodes,
    set_metadata,
)
from onnx_backend.qdq.float_types import array_type
from onnx_backend.qdq.fusion_barriers import COPY_KEY
from onnx_backend.qdq.marks import exact_floats, exact_in, open_qdq
from onnx_backend.qdq.read import (
    CAST_KEY,
    FLOAT32,
    FLOAT_CODES,
    FLOAT_NAMES,
    LITERAL_KEY,
    SCALES_KEY,
    encoding_of_pair,
)
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

    Args:
        model: sorted, at opset 21 or above, with stored parameters.

    Raises:
        FileFormatError: an encoding cannot be read; names the node.
    """
    graph = model.graph
    pairs = list(_pairs(model))
    taken = names_in(graph)
    first_pairs: dict[str, list[_Pair]] = {}  # tensor -> the first pair of each encoding
    replacements: dict[str, list[NodeProto]] = {}  # output of a foreign DequantizeLinear -> its new nodes
    renamed: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    for index, pair in enumerate(pairs):
        output = pair.dequantize.output[0]
        known = first_pairs.setdefault(pair.source, [])
        first = next((other for other in known if other.encoding == pair.encoding), None)
        if first is None:
            known.append(pair)
            replacements[output] = _pair_nodes(model, pair, f"#{index}", taken)
        elif output in outputs:
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
    replace_nodes(graph, nodes_reaching(nodes, outputs))
    drop_unused_initializers(graph)
    still_computed = {name for node in graph.node for name in node.output}
    declared = [value for value in graph.value_info if value.name in still_computed]  # codes may be floats now
    del graph.value_info[:]
    graph.value_info.extend(declared)
    _name_sites(model)


def _pairs(model: ModelProto) -> Iterator[_Pair]:
    stored, makers = initializers(model.graph), producers(model.graph.node)
    for node in model.graph.node:
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


def _pair_nodes(model: ModelProto, pair: _Pair, site: str, taken: set[str]) -> list[NodeProto]:
    """Return the nodes of `insert` for a pair, under a provisional site name."""
    stored, encoding = initializers(model.graph), pair.encoding
    if pair.source not in stored:
        return _activation(model, pair, site, taken)
    codes = array(stored[pair.source])
    if pair.quantize is not None:
        codes = encoding.quantize(codes)
    values = encoding.dequantize(codes)
    again = encoding.quantize(exact_floats(encoding, codes))
    if not np.array_equal(encoding.dequantize(again), values, equal_nan=True):
        # no float32 represents an int32 beyond 2^24: the node is kept as it is, and its tensor has no site
        set_metadata(pair.dequantize, kept="its codes have no float32")
        return [pair.dequantize]
    name = unique(f"{pair.source.removesuffix('_quantized')}_quantized", taken)
    model.graph.initializer.append(numpy_helper.from_array(again.astype(storage_type(encoding.dtype)), name))
    # in float32, where no value of the tensor's own type stands for a code (of an int32 bias)
    exact = exact_in(pair.tensor_type, encoding, again) is not None
    return _dequantized(model, pair if exact else replace(pair, written_as=FLOAT32), name, site, taken)


def _dequantized(model: ModelProto, pair: _Pair, codes: str, site: str, taken: set[str]) -> list[NodeProto]:
    """Return the DequantizeLinear of a pair, and the Cast of its result to the type that it had, where it needs one."""
    output = pair.dequantize.output[0]
    if pair.written_as == pair.tensor_type:
        return [_node(model, pair, "DequantizeLinear", codes, output, site, taken)]
    wide = unique(f"{output}/float32", taken)
    return [
        _node(model, pair, "DequantizeLinear", codes, wide, site, taken),
        _cast(wide, output, pair.tensor_type, site, taken),
    ]


def _cast(source: str, output: str, tensor_type: str, site: str, taken: set[str]) -> NodeProto:
    cast = helper.make_node("Cast", [source], [output], unique(f"{output}/cast", taken), to=FLOAT_CODES[tensor_type])
    set_metadata(cast, cast_of=site)
    return cast


def _activation(model: ModelProto, pair: _Pair, site: str, taken: set[str]) -> list[NodeProto]:
    encoding, source, nodes = pair.encoding, pair.source, []
    if encoding.dtype.narrows_container and encoding.axis is not None:
        raise FileFormatError(
            f"node {node_label(pair.dequantize)!r} narrows the grid of an activation per channel, which cannot be "
            "written again; make it per tensor"
        )
    if pair.written_as != pair.tensor_type:
        wide = unique(f"{source}/float32", taken)
        nodes.append(_cast(source, wide, FLOAT32, site, taken))
        source = wide
    if encoding.dtype.narrows_container:
        bounds = [unique(f"{source}/{end}", taken) for end in ("low", "high")]
        for name, value in zip(bounds, (encoding.low, encoding.high), strict=True):
            typed = value.reshape(()).astype(array_type(pair.written_as))
            model.graph.initializer.append(numpy_helper.from_array(typed, name))
        clipped = unique(f"{source}/clipped", taken)
        nodes.append(helper.make_node("Clip", [source, *bounds], [clipped], unique(f"{clipped}/clip", taken)))
        set_metadata(nodes[-1], site=site)
        source = clipped
    codes = unique(f"{pair.source}/codes", taken)
    nodes.append(_node(model, pair, "QuantizeLinear", source, codes, site, taken))
    return [*nodes, *_dequantized(model, pair, codes, site, taken)]


def _node(
    model: ModelProto, pair: _Pair, op_type: str, source: str, output: str, site: str, taken: set[str]
) -> NodeProto:
    encoding, old = pair.encoding, pair.dequantize if op_type == "DequantizeLinear" else pair.quantize
    assert old is not None
    shape = () if encoding.axis is None else encoding.scale.shape
    typed = encoding.zero_point.astype(storage_type(encoding.dtype))
    inputs = [source]
    for name, value in (("scale", encoding.scale.astype(array_type(pair.written_as))), ("zero_point", typed)):
        inputs.append(unique(f"{output}/{name}", taken))
        model.graph.initializer.append(numpy_helper.from_array(value.reshape(shape), inputs[-1]))
    options: dict[str, Any] = {} if encoding.axis is None else {"axis": encoding.axis}
    options |= {} if encoding.block_size is None else {"block_size": encoding.block_size}
    node = helper.make_node(op_type, inputs, [output], old.name or unique(f"{output}/{op_type}", taken), **options)
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
