"""A lowered decoder in the fused forms of onnxruntime-genai's own models: attention, products, norms, one kernel each.

Every form is found by structure and computes what the nodes did that it stands for; what has none stays as it is.
"""

import json
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.genai.adapters import Joined
from onnx_backend.genai.attention import AttentionWriter, Norm, Turn
from onnx_backend.genai.computed import Computed
from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.experts import ExpertsWriter
from onnx_backend.genai.products import CODES, Product, find_products, merged
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.passes.fold_constants import evaluate
from onnx_backend.proto.external_data import array
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.lazy_tensors import LargeTensor, is_stub
from onnx_backend.proto.nodes import (
    copied,
    drop_unused_initializers,
    metadata,
    rename_inputs,
    replace_nodes,
    retain,
    set_attributes,
)
from onnx_backend.proto.weightless import skeleton
from onnx_backend.qdq.forms import FORM_KEY
from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.supergroup import Supergroup

_SMALL = 1 << 16  # elements of a constant that is folded


@dataclass(frozen=True)
class Fused:
    """A decoder in fused forms.

    Attributes:
        model: with stubs for its large tensors.
        large: those, by name.
        forms: site of a weight -> the form that it got.
        attentions: how many have one.
        left: result of an attention without a form -> why.
        switches: lengths of texts up to which rotary embeddings have rows of their own.
        experts: how many mixtures of experts have a form.
        left_experts: site of a stack of experts without one -> why.
        joined: see `Editor`.
    """

    model: ModelProto
    large: Mapping[str, LargeTensor]
    forms: Mapping[str, str]
    attentions: int
    left: Mapping[str, str]
    switches: Collection[int] = ()
    experts: int = 0
    left_experts: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, Joined] = field(default_factory=dict)


def fuse(model: ModelProto, large: Mapping[str, LargeTensor], *, positions: int) -> Fused:
    """Write a lowered decoder with a cache in fused forms; the given model may be changed.

    Args:
        model: for ONNX Runtime, in the forms that its session fuses.
        large: the stored tensors that it has only stubs of.
        positions: of tokens, up to which it reads.
    """
    _fold_constants(model)
    caches = without_pairs(model)
    if isinstance(caches, FloatCaches):
        fused = _fused(caches.model, large, positions)
        if not fused.left:
            take_codes(fused.model, caches.scales)
            return fused
    fused = _fused(model, large, positions)
    return replace(fused, left=dict.fromkeys(fused.left, caches)) if isinstance(caches, str) else fused


def _fused(model: ModelProto, large: Mapping[str, LargeTensor], positions: int) -> Fused:
    """Write a decoder whose cache has no pairs that a form is to take, in place."""
    editor = Editor(model, large)
    graph = read_graph(model)
    groups = {id(group): group for group in match_supergroups(graph).groups.values()}.values()
    named = _Named(graph, editor)
    turns = {named.output(group): turn for group in groups if (turn := named.turn(group)) is not None}
    norms = {named.output(group): norm for group in groups if (norm := named.norm(editor, group)) is not None}
    sizes = static_sizes(with_inferred_shapes(skeleton(model)))
    computed = Computed(editor, positions)
    writer, experts = AttentionWriter(editor, turns, norms, computed, sizes), ExpertsWriter(editor, computed)
    count, mixtures = writer.write(), experts.write()
    _write_norms(editor, norms)
    write_products(editor)
    _drop_unread_inputs(model)
    del model.graph.value_info[:], model.metadata_props[:]  # of tensors that are gone
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    facts = (count, writer.reasons, writer.switches, mixtures, experts.reasons, editor.joined)
    return Fused(model, editor.large, editor.forms, *facts)


class _Named:
    """Supergroups of a graph by the names of their tensors in the model."""

    def __init__(self, graph: Graph, editor: Editor) -> None:
        self.graph, self.editor = graph, editor

    def output(self, group: Supergroup) -> str:
        """Return the tensor that a group makes."""
        return self.graph.tensors[self.graph.ops[group.ops[-1]].outputs[0]].name

    def turn(self, group: Supergroup) -> Turn | None:
        """Return the rotary embedding that a group is, or None."""
        if group.name != "RoPE":
            return None
        source, cos, sin = (self.graph.tensors[group.tensors[name]].name for name in ("x", "cos", "sin"))
        return Turn(source, cos, sin, pairs=group.facts["cut"][0] == "pairs")

    def norm(self, editor: Editor, group: Supergroup) -> Norm | None:
        """Return the RMS norm over the last axis that a group is, or None."""
        if group.name != "RMSNorm" or group.facts.get("axes") != (-1,) or "beta" in group.tensors:
            return None
        source = self.graph.tensors[group.tensors["x"]].name
        gain = np.ones(int(group.facts.get("count") or 0), np.float32)
        if "gamma" in group.tensors:
            tensor = self.graph.tensors[group.tensors["gamma"]]
            value = editor.value(tensor.name)
            if value is None and tensor.name in editor.index.stored:
                value = editor.stored(tensor.name)()
            if value is None or value.dtype != np.float32:
                return None
            gain = np.broadcast_to(value.reshape(-1), (max(value.size, len(gain)),))
        if not gain.size:
            return None
        return Norm(source, gain, self._epsilon(group))

    def _epsilon(self, group: Supergroup) -> float:
        for op in (self.graph.ops[index] for index in group.ops if self.graph.ops[index].type == "Add"):
            numbers = [number for tensor in op.inputs if (number := self.graph.scalar(tensor)) is not None]
            if numbers and 0 <= numbers[0] < 0.1:
                return float(numbers[0])
        return 0.0


def _write_norms(editor: Editor, norms: Mapping[str, Norm]) -> None:
    """Write each RMS norm as one kernel, with the sum in front of it where that is one of two tensors."""
    for output, norm in norms.items():
        if output not in editor.index.makers:
            continue
        total = editor.maker(norm.source, "Add")
        sizes_match = total is not None and not any(name in editor.index.stored for name in total.input)
        if (
            total is not None
            and sizes_match
            and not editor.is_replaced(norm.source)
            and norm.source not in editor.index.outputs
        ):
            outputs = [output, "", "", norm.source]
            inputs = [*total.input, editor.keep_once(f"{output}/gain", norm.gain)]
            node = editor.node(
                "SkipSimplifiedLayerNormalization", inputs, outputs, domain=MICROSOFT, epsilon=norm.epsilon
            )
            editor.replace(output, [node], also=[norm.source])
        else:
            editor.replace(output, [norm.node(editor, norm.source, output)])
    editor.apply()


def _fold_constants(model: ModelProto) -> None:
    """Replace what is computed of small stored tensors alone by its value, in place."""
    graph = model.graph
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    small = {
        tensor.name: array(tensor)
        for tensor in graph.initializer
        if not is_stub(tensor) and np.prod(tensor.dims, dtype=np.int64) <= _SMALL and len(tensor.dims) < 2
    }
    outputs, nodes = {value.name for value in graph.output}, list[NodeProto]()
    for node in graph.node:
        found = None if outputs.intersection(node.output) else evaluate(node, small, opsets, limit=_SMALL)
        if found is None:
            nodes.append(node)
            continue
        small |= found
        graph.initializer.extend(
            numpy_helper.from_array(np.ascontiguousarray(v).reshape(v.shape), n) for n, v in found.items()
        )
    replace_nodes(graph, nodes)
    drop_unused_initializers(graph)


def _drop_unread_inputs(model: ModelProto) -> None:
    """Remove the inputs that nothing reads any more, in place."""
    read = {name for node in model.graph.node for name in node.input}
    retain(model.graph.input, lambda value: value.name in read)


# --- A cache of int8: the pairs around keys and values go, and GroupQueryAttention keeps the codes with their scales

_ONE_SCALE = "PER_TENSOR"


@dataclass(frozen=True)
class FloatCaches:
    """A decoder whose pairs around keys and values are taken away.

    Attributes:
        model: a changed copy.
        scales: input with a past -> the scale of its codes.
    """

    model: ModelProto
    scales: dict[str, float]


def without_pairs(model: ModelProto) -> FloatCaches | str | None:
    """Return a decoder without the pairs of its cache, why the kernel has no form of them, or None without any.

    They are the only pairs of activations, of int8 without zero points, and those of one cache have one scale.
    """
    editor = Editor(model, {})
    pairs = {node.output[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    if not pairs:
        return None
    inputs, scales = {value.name for value in model.graph.input}, dict[str, float]()
    for node in pairs.values():
        scale, zero = editor.scalar(node.input[1]), editor.index.stored.get(node.input[2] if node.input[2:] else "")
        if scale is None or zero is None or zero.data_type != TensorProto.INT8 or editor.scalar(zero.name):
            return "its cache is not int8 with one scale and no zero point; for_dialect('genai') chooses one without"
        if node.input[0] in inputs:
            scales[node.input[0]] = scale
    known = np.array([*scales.values()])
    foreign = next((node for node in pairs.values() if editor.scalar(node.input[1]) not in known), None)
    if foreign is not None:
        return f"{foreign.input[0]!r} is quantized, and is not in the cache"
    return FloatCaches(_bypassed(model, pairs), scales)


def _bypassed(model: ModelProto, pairs: dict[str, NodeProto]) -> ModelProto:
    """Return a copy of a model without these pairs, its outputs under their names."""
    result = copied(model)
    outputs, renamed, nodes = {value.name for value in result.graph.output}, dict[str, str](), list[NodeProto]()
    for node in result.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        if node.op_type == "DequantizeLinear" and node.input[0] in pairs:
            source = renamed.get(pairs[node.input[0]].input[0], pairs[node.input[0]].input[0])
            renamed[node.output[0]] = source
        elif node.op_type != "QuantizeLinear":
            nodes.append(node)
    leaving = {renamed[name]: name for name in outputs if name in renamed}
    for node in nodes:
        for place, name in enumerate(node.output):
            node.output[place] = leaving.get(name, name)
    rename_inputs(nodes, leaving)
    replace_nodes(result.graph, nodes)
    drop_unused_initializers(result.graph)
    return result


def take_codes(model: ModelProto, scales: dict[str, float]) -> None:
    """Have the attentions of a fused decoder keep int8 codes, in place."""
    editor = Editor(model, {})
    edges = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        names = [editor.keep(f"{name}.scale", np.array([scales[name]], np.float32)) for name in node.input[3:5]]
        node.input.extend([""] * (12 - len(node.input)) + names)  # behind the sinks
        for name in (*node.input[3:5], *node.output[1:3]):
            edges[name].type.tensor_type.elem_type = TensorProto.INT8
        set_attributes(node, {"k_quant_type": _ONE_SCALE, "v_quant_type": _ONE_SCALE, "kv_cache_bit_width": 8})


# --- Products as MatMulNBits, and look-ups in a table that is an output layer too on the codes of that layer ----------

_BITS = (4, 8)  # of codes that the kernel reads


@dataclass(frozen=True)
class LookUp:
    """Rows that a model takes from a table of stored codes.

    Attributes:
        table: the DequantizeLinear of the table, or of its rows.
        codes: name of the stored table.
        places: the tensor of row numbers.
        output: the rows.
    """

    table: NodeProto
    codes: str
    places: str
    output: str

    def site(self) -> str:
        """Return the site of the table."""
        facts = metadata(self.table)
        if FORM_KEY in facts:  # of rows: the form notes the table first
            facts = metadata(NodeProto.FromString(b64decode(json.loads(facts[FORM_KEY])[0])))
        return facts.get("qsdk.site", self.codes)


def write_products(editor: Editor) -> None:
    """Write every product with stored codes as a MatMulNBits, and look-ups in the same codes as what reads those."""
    written = [(product, merged(editor, [product], product.output)) for product in find_products(editor)]
    for product, node in written:
        editor.replace(product.output, [node])
    for rows in _look_ups(editor):
        match = next(((product, node) for product, node in written if _is_table_of(editor, rows, product)), None)
        if match is not None:
            editor.replace(rows.output, _nodes(editor, rows, *match))
    editor.apply()


def _look_ups(editor: Editor) -> Iterator[LookUp]:
    """Yield the look-ups along the first axis, whether rows or the table are dequantized."""
    for node in editor.model.graph.node:
        if node.op_type != "Gather" or editor.options(node).get("axis", 0) != 0:
            continue
        table, rows = editor.maker(node.input[0], "DequantizeLinear"), editor.reader(node.output[0], "DequantizeLinear")
        if table is not None and table.input[0] in editor.index.stored:
            yield LookUp(table, table.input[0], node.input[1], node.output[0])
            continue
        scale = None if rows is None else editor.index.stored.get(rows.input[1])
        if rows is not None and scale is not None and not scale.dims and node.input[0] in editor.index.stored:
            yield LookUp(rows, node.input[0], node.input[1], rows.output[0])


def _is_table_of(editor: Editor, found: LookUp, product: Product) -> bool:
    """Return True if the table of a look-up has the codes and the grids of a product, transposed, in whole blocks."""
    stored, (width, made) = editor.index.stored[found.codes], product.sizes
    bits, lift = CODES.get(stored.data_type, (0, 0))
    if [*stored.dims] != [made, width] or width % product.block or bits != product.bits or bits not in _BITS:
        return False
    options = editor.options(found.table)
    axis, block = options.get("axis", 1) % 2, options.get("block_size", 0)
    if lift != product.lift or (block and (axis != 1 or block != product.block)):
        return False
    names = [name for name in found.table.input[1:] if name]
    grids = [editor.stored(name)() for name in names]
    if any(grid.ndim == 1 and axis != 0 for grid in grids):
        return False
    wide = [grid if block else np.broadcast_to(grid.reshape(-1, 1), product.grid) for grid in grids]
    half = 1 << (bits - 1)
    zeros = wide[1].astype(np.int16) + lift if len(wide) > 1 else np.full(product.grid, lift, np.int16)
    theirs = np.full(product.grid, half) if product.zeros is None else product.zeros
    same = np.array_equal(wide[0], product.scales()) and np.array_equal(zeros, theirs)
    return same and np.array_equal(editor.stored(found.codes)(), product.codes().T)


def _nodes(editor: Editor, found: LookUp, product: Product, layer: NodeProto) -> list[NodeProto]:
    """Return the look-up in what the layer's kernel reads: the same codes, their blocks side by side."""
    flat = editor.shaped(layer.input[1], [0, -1], f"{found.output}/table")
    inputs = [flat.output[0], found.places, *layer.input[2:4]]
    options = {"bits": product.bits, "block_size": product.block, "gather_axis": 0, "quantize_axis": 1}
    form = f"{product.bits} bits, blocks of {product.block}"
    editor.forms[found.site()] = f"GatherBlockQuantized, {form}, the codes of {product.site}"
    return [flat, editor.node("GatherBlockQuantized", inputs, [found.output], domain=MICROSOFT, **options)]
