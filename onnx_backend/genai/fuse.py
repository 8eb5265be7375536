"""A lowered decoder in the fused forms of onnxruntime-genai's own models: attention, products, norms, one kernel each.

Every form is found by structure and computes what the nodes did that it stands for; what has none stays as it is.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.genai.adapters import Joined
from onnx_backend.genai.attention import AttentionWriter, Norm, Turn
from onnx_backend.genai.caches import FloatCaches, take_codes, without_pairs
from onnx_backend.genai.computed import Computed
from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.experts import ExpertsWriter
from onnx_backend.genai.lookups import write_products
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.passes.fold_constants import evaluate
from onnx_backend.proto.external_data import array
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.lazy_tensors import LargeTensor, is_stub
from onnx_backend.proto.nodes import drop_unused_initializers, replace_nodes, retain
from onnx_backend.proto.weightless import skeleton
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
