"""Marks for models that have none: every site becomes a node, so that both doors share one lowering."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, initializers, names_in, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import (
    MARK_DOMAIN,
    MARK_OP,
    drop_unused_initializers,
    lift_constants,
    metadata,
    rename_inputs,
    replace_nodes,
)
from onnx_backend.qdq.graph_editor import array_type
from onnx_backend.qdq.layer_inputs import input_blocks, without_rounded_inputs
from onnx_backend.qdq.narrow_regions import as_simulated, remove_entries
from onnx_backend.qdq.read import CAST_KEY, FLOAT32, QdqPair, dynamic_pairs, qdq_pairs, type_of_cast
from onnx_backend.readers import COPY_KEY
from onnx_backend.workarounds.kernel_casts import remove_kernel_casts
from qsdk.core.arrays import Array, Floats
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec


def mark(model: ModelProto, graph: Graph, *, in_place: bool = False) -> ModelProto:
    """Return an unmarked model, or a copy of it, with a mark at every site of its graph.

    Graph inputs and outputs keep their names; readers of an input or a stored tensor read its mark, bodies of control
    flow too.
    """
    marked = model if in_place else load(model)
    lift_constants(marked)
    taken = names_in(marked.graph)
    sites = {tensor.name: tensor.site for tensor in graph.tensors if tensor.site is not None}
    types = {tensor.name: tensor.dtype for tensor in graph.tensors}
    computed = {name for node in marked.graph.node for name in node.output}
    heads, renamed = [], {}
    for name, site in sites.items():
        if name not in computed:
            renamed[name] = unique(f"{name}/marked", taken)
            heads.append(mark_node(site, name, renamed[name], types[name]))
    nodes = list(heads)
    for node in marked.graph.node:
        rename_inputs([node], renamed)
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name in sites:
                node.output[position] = unique(f"{name}/unmarked", taken)
                nodes.append(mark_node(sites[name], node.output[position], name, types[name]))
    replace_nodes(marked.graph, nodes)
    marked.opset_import.append(helper.make_opsetid(MARK_DOMAIN, 1))
    return marked


def mark_node(site: str, source: str, output: str, tensor_type: str = FLOAT32) -> NodeProto:
    """Return the node that marks a site whose tensor has a float type."""
    facts = {"key": site} if tensor_type == FLOAT32 else {"key": site, "dtype": tensor_type}
    return helper.make_node(MARK_OP, [source], [output], f"{site}/mark", domain=MARK_DOMAIN, **facts)


@dataclass(frozen=True)
class UnpackedQdq:
    """A Q/DQ model turned back: marked, with float weights, and what its nodes record.

    Attributes:
        model: marked; stored tensors are the dequantized integers, in the layout of the original model.
        encodings: by site.
        kinds: site -> weight, bias, activation, input or output, as far as the file says.
        casts: site -> float16 or bfloat16.
        dynamic: site -> spec, where the range is found while the model runs.
        input_blocks: weight site -> length of the blocks in which its layers round their input to int8.
    """

    model: ModelProto
    encodings: Mapping[str, Encoding]
    kinds: Mapping[str, str]
    casts: Mapping[str, str]
    dynamic: Mapping[str, Spec] = field(default_factory=dict)
    input_blocks: Mapping[str, int] = field(default_factory=dict)


def open_qdq(model: ModelProto) -> UnpackedQdq:
    """Turn every Q/DQ pair, integer initializer and pair of casts back into a mark: the inverse of `lower`."""
    opened = load(as_simulated(model))
    blocks = input_blocks(opened.graph.node)
    without_rounded_inputs(opened)
    remove_kernel_casts(opened)
    remove_entries(opened)
    lift_constants(opened)
    found = qdq_pairs(opened)
    taken = names_in(opened.graph)
    casts, kinds = _casts(opened, taken)
    outputs = {value.name for value in opened.graph.output}
    replaced: dict[str, list[NodeProto]] = {}
    for place in found:
        if place.quantize is None:
            output, marks = _stored_mark(opened, place, taken)
        else:
            output, marks = place.output, _activation_mark(opened, place)
        replaced[output] = marks
        kinds[place.site] = place.kind or ("weight" if place.quantize is None else "activation")
    dynamic = dynamic_pairs(opened)
    for at in dynamic:
        replaced[at.output] = [mark_node(at.site, at.source, at.output, at.tensor_type)]
        kinds[at.site] = at.kind
    for site, (_, source, output, tensor_type) in casts.items():
        replaced[output] = [mark_node(site, source, output, tensor_type)]
    nodes: list[NodeProto] = []
    copies: dict[str, str] = {}  # output of a copied pair -> its input: the pair changes no value
    for node in opened.graph.node:
        rename_inputs([node], copies)
        if COPY_KEY in metadata(node) and node.output[0] not in outputs:
            copies[node.output[0]] = node.input[0]
        elif COPY_KEY in metadata(node):
            nodes.append(helper.make_node("Identity", [node.input[0]], [node.output[0]], node.name))
        else:
            nodes.extend(_renamed(replaced.get(node.output[0], [node]), copies))
    _drop_unread(opened, nodes)
    opened.opset_import.append(helper.make_opsetid(MARK_DOMAIN, 1))
    encodings = {place.site: place.encoding for place in found}
    as_casts = {site: dtype for site, (dtype, *_) in casts.items()}
    return UnpackedQdq(opened, encodings, kinds, as_casts, {at.site: at.spec for at in dynamic}, blocks)


def _renamed(nodes: list[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    rename_inputs(nodes, names)
    return nodes


def _casts(model: ModelProto, taken: set[str]) -> tuple[dict[str, tuple[str, str, str, str]], dict[str, str]]:
    """Return site -> dtype, tensor before and after a pair of casts, and its type; and the kinds of these sites."""
    found: dict[str, tuple[str, str, str, str]] = {}
    kinds: dict[str, str] = {}
    stored = initializers(model.graph)
    before: dict[str, str] = {}
    float_names: dict[str, str] = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type != "Cast" or "qsdk.site" not in facts:
            continue
        site, source = facts["qsdk.site"], node.input[0]
        kinds[site] = facts["qsdk.kind"]
        if source in stored:
            if source not in float_names:
                # the name from before the export, so that exporting again gives the same file
                float_names[source] = unique(source.removesuffix(f"_{facts['qsdk.dtype']}") or site, taken)
                values = array(stored[source]).astype(array_type(type_of_cast(node)))
                model.graph.initializer.append(numpy_helper.from_array(values, float_names[source]))
            found[site] = (facts["qsdk.dtype"], float_names[source], node.output[0], type_of_cast(node))
        elif source in before:
            found[site] = (facts["qsdk.dtype"], before[source], node.output[0], type_of_cast(node))
        else:
            before[node.output[0]] = source
    return found, kinds


def exact_in(tensor_type: str, encoding: Encoding, codes: Array) -> Array | None:
    """Return values of a float type that quantize back to exactly these codes; None where the type has none."""
    with np.errstate(over="ignore"):
        values = exact_floats(encoding, codes).astype(array_type(tensor_type))
    if tensor_type == FLOAT32:
        return values
    again = encoding.quantize(values.astype(np.float32))
    return values if np.array_equal(again.astype(np.int64), codes.astype(np.int64)) else None


def exact_floats(encoding: Encoding, codes: Array) -> Floats:
    """Return float values of codes that quantize back to exactly these codes.

    Beyond 2^22 (an int32 bias) dividing a product by its factor may round to a neighbour; values are then moved by a
    unit in the last place.
    """
    values = encoding.dequantize(codes)
    if DTYPES[encoding.dtype.container].bits < 32:
        return values
    wanted = codes.astype(np.float32)  # beyond 2^24 not every code is a float32; those around it mean the same
    for steps in (1, -1, 2, -2):
        wrong = encoding.quantize(values).astype(np.float32) != wanted
        if not wrong.any():
            break
        moved = encoding.dequantize(codes)
        for _ in range(abs(steps)):
            moved = np.nextafter(moved, np.float32(np.inf if steps > 0 else -np.inf))
        values = np.where(wrong, moved, values)
    return values


def _stored_mark(model: ModelProto, place: QdqPair, taken: set[str]) -> tuple[str, list[NodeProto]]:
    """Return the tensor that a stored site's mark results in, and the nodes that take the place of its pair.

    Codes that no value of the tensor's type stands for (those of an int32 bias) become float32; the cast behind stays.
    """
    assert place.stored is not None
    stored = initializers(model.graph)
    name = unique(place.stored.removesuffix("_quantized") or place.site, taken)
    codes = array(stored[place.stored])
    if place.permutation is not None:
        inverse = sorted(range(codes.ndim), key=lambda axis: (place.permutation or ())[axis])
        codes = codes.transpose(inverse)
    values, output, tensor_type = exact_in(place.tensor_type, place.encoding, codes), place.output, place.tensor_type
    if values is None:
        values, output, tensor_type = exact_floats(place.encoding, codes), place.dequantize.output[0], FLOAT32
    model.graph.initializer.append(numpy_helper.from_array(values, name))
    if place.permutation is None:
        return output, [mark_node(place.site, name, output, tensor_type)]
    marked = f"{place.site}/marked"
    transpose = helper.make_node("Transpose", [marked], [output], f"{place.site}/transpose", perm=place.permutation)
    return output, [mark_node(place.site, name, marked, tensor_type), transpose]


def _activation_mark(model: ModelProto, place: QdqPair) -> list[NodeProto]:
    assert place.quantize is not None
    source = place.quantize.input[0]
    # a Clip that holds values inside a narrow grid belongs to the encoding, not to the model
    makers = {node.output[0]: node for node in model.graph.node}
    ours = "qsdk.site" in metadata(place.dequantize)
    while source in makers:
        maker = makers[source]
        if metadata(maker).get(CAST_KEY) == place.site:
            source = maker.input[0]
            break
        held_by_us = metadata(maker).get("qsdk.site") == place.site and maker.op_type in ("Clip", "Max", "Min")
        if not held_by_us and (ours or maker.op_type != "Clip" or not place.encoding.dtype.narrows_container):
            break
        source = maker.input[0]
        if not held_by_us:
            break
    return [mark_node(place.site, source, place.output, place.tensor_type)]


def _drop_unread(model: ModelProto, nodes: list[NodeProto]) -> None:
    """Keep the nodes that lead to a graph output or to a mark, then drop stored tensors that nothing reads."""
    outputs = {value.name for value in model.graph.output}
    kept = nodes
    while True:
        read = set(consumers(kept)) | outputs
        shorter = [node for node in kept if node.op_type == MARK_OP or any(name in read for name in node.output)]
        if len(shorter) == len(kept):
            break
        kept = shorter
    replace_nodes(model.graph, kept)
    drop_unused_initializers(model.graph)
