"""Simplify a model: compute constants from constants, inline decided branches, remove ops that change nothing.

Small values only (bounds, axes, shapes). In a traced model a weight is never touched, so that every mark keeps its
initializer; in a user's file, views of weights are folded too, so that every weight is seen as stored.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping

import numpy as np
import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.passes.fold_constants import LARGEST, fold, fold_rearranged, is_full_slice, is_view
from onnx_backend.proto.external_data import FLOATS, array
from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching, unique
from onnx_backend.proto.inputs import with_inferred_shapes
from onnx_backend.proto.lazy_tensors import as_stub
from onnx_backend.proto.nodes import (
    attributes,
    constant_tensor,
    drop_unused_initializers,
    is_constant,
    is_mark,
    lift_constants,
    node_label,
    rename_inputs,
    replace_nodes,
)
from onnx_backend.proto.subgraphs import bodies, has_bodies, reads, rename_reads
from onnx_backend.proto.weightless import Types, declared_types, dtype_name, is_large, skeleton
from qsdk.core.arrays import Array
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.site import port_of


def inline_decided_branches(
    node: NodeProto, small: Mapping[str, Array], opsets: Mapping[str, int], taken: set[str]
) -> None:
    """Inline decided Ifs in the bodies of a node, in place: onnxruntime 1.31 crashes on one in another's branch.

    `small` are the constants that are known outside; new names are added to `taken`.
    """
    for _, graph in bodies(node):
        known = {**small, **_small(graph.initializer)}
        pending, kept = deque(graph.node), []
        while pending:
            inner = pending.popleft()
            if inner.op_type == "If" and inner.input[0] in known:
                nodes, stored = chosen_branch(inner, bool(np.any(known[inner.input[0]])), taken)
                graph.initializer.extend(stored)
                known.update(_small(stored))
                pending.extendleft(reversed(nodes))
                continue
            if is_constant(inner):
                known.update(_small([constant_tensor(inner)]))
            else:
                known.update(fold(inner, known, opsets, weights_stay=True) or {})
                inline_decided_branches(inner, known, opsets, taken)
            kept.append(inner)
        replace_nodes(graph, kept)


def chosen_branch(node: NodeProto, condition: bool, taken: set[str]) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes and stored tensors of the chosen branch, its outputs under the names of the If's.

    Inner names are changed where they are `taken`, and added there.
    """
    wanted = "then_branch" if condition else "else_branch"
    branch = GraphProto()
    branch.CopyFrom(next(graph for name, graph in bodies(node) if name == wanted))
    computed = dict.fromkeys(name for inner in branch.node for name in inner.output if name)
    renamed: dict[str, str] = {}
    copies = []
    for value, name in zip(branch.output, node.output, strict=True):
        if not name:
            continue
        if value.name in computed and value.name not in renamed:
            renamed[value.name] = name
        else:  # stored in the branch, from outside, or given twice
            copies.append((value.name, name))
    owner = node_label(node)
    for name in (*computed, *(tensor.name for tensor in branch.initializer)):
        if name not in renamed:
            renamed[name] = unique(f"{owner}/{name}", taken)
    for inner in branch.node:
        rename_reads(inner, renamed)
        inner.output[:] = [renamed.get(name, name) for name in inner.output]
        if inner.name:
            inner.name = unique(f"{owner}/{inner.name}", taken)
    for tensor in branch.initializer:
        tensor.name = renamed[tensor.name]
    nodes = list(branch.node)
    nodes += [helper.make_node("Identity", [renamed.get(old, old)], [new]) for old, new in copies]
    return nodes, list(branch.initializer)


def _small(tensors: Iterable[TensorProto]) -> dict[str, Array]:
    return {tensor.name: array(tensor) for tensor in tensors if math.prod(tensor.dims) <= LARGEST}


_LARGEST_MASK = 1 << 20  # elements of a constant that is computed: an attention mask of 1024 x 1024
_LARGEST_INDEX = 1 << 16  # elements of stored indices: of positions relative to each other, in windows of 16 x 16
_INDICES = (TensorProto.INT32, TensorProto.INT64)
_SAME_TYPE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Exp", "Log", "Softplus", "Tanh", "Sigmoid", "Relu", "Softmax"}
)
_CODES = {dtype_name(code): code for code in TensorProto.DataType.values() if code != TensorProto.UNDEFINED}


def simplify(
    model: ModelProto, types: Types | None = None, *, weights: MutableMapping[str, Array] | None = None
) -> ModelProto:
    """Return a traced model with marks simplified, as a copy; or, with `types` of its tensors, a user's own, in place.

    `weights` are the values of stored tensors that a traced model has only stubs of; what they become is added to it.
    """
    if types is None:
        result = ModelProto()
        # functions are simplified where they are called
        result.CopyFrom(onnx.inliner.inline_local_functions(model) if model.functions else model)
    else:
        result = model
    lift_constants(result)
    graph = result.graph
    simplifier = _Simplifier(result, types, {} if weights is None else weights)
    pending = deque(graph.node)
    while pending:
        node = pending.popleft()
        rename_inputs([node], simplifier.bypassed)
        branch = simplifier.decided(node)
        if branch is None:
            simplifier.visit(node)
        else:
            pending.extendleft(reversed(branch))
    kept = (
        without_last_identities(simplifier.kept, simplifier.outputs)
        if types is None
        else nodes_reaching(simplifier.kept, simplifier.outputs)
    )
    unread = simplifier.numbers.difference(simplifier.outputs, *(reads(node) for node in kept))
    replace_nodes(graph, [node for node in kept if unread.isdisjoint(node.output)])
    join_splits(graph)
    drop_unused_initializers(graph)
    if types is None and 0 < _count_shapes(kept) < simplifier.shapes:  # sizes that follow from those of other tensors
        return simplify(result, weights=weights)
    return result


def without_last_identities(nodes: list[NodeProto], outputs: Collection[str]) -> list[NodeProto]:
    """Return the nodes of a traced model without Identities (Dropouts) that only name an output."""
    computed = {name for node in nodes for name in node.output}
    renamed = {
        node.input[0]: node.output[0]
        for node in nodes
        if node.op_type == "Identity" and node.output[0] in outputs and node.input[0] in computed.difference(outputs)
    }
    last = set(renamed.values())
    kept = [node for node in nodes if not (node.op_type == "Identity" and node.output[0] in last)]
    rename_inputs(kept, renamed)
    for node in kept:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    return kept


class _Simplifier(GraphIndex):
    """The state of a simplification while nodes are visited in order."""

    def __init__(self, model: ModelProto, types: Types | None, weights: MutableMapping[str, Array]) -> None:
        super().__init__(model.graph)
        self.own, self.weights = types is not None, weights
        self.types = dict(_traced_types(model) if types is None else types)
        self.small = {
            name: weights[name] if name in weights else array(tensor)
            for name, tensor in self.stored.items()
            if _is_small(tensor)
        }
        self.computed_sites = {node.input[0] for node in model.graph.node if is_mark(node) and _marks_output(node)}
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        self.bypassed: dict[str, str] = {}
        self.shapes = _count_shapes(model.graph.node)
        self.numbers = set[str]()  # sizes that may be read no more
        self.kept: list[NodeProto] = []

    def decided(self, node: NodeProto) -> list[NodeProto] | None:
        """Return the nodes of the branch that an If with a constant condition chooses, else None."""
        if node.op_type != "If" or not node.input or node.input[0] not in self.small:
            return None
        nodes, stored = chosen_branch(node, bool(self.small[node.input[0]].reshape(-1)[:1].any()), self.taken)
        # the Constants of a branch may decide the Ifs inside it
        for tensor in (*stored, *(constant_tensor(inner) for inner in nodes if is_constant(inner))):
            self._store(tensor)
        return [inner for inner in nodes if not is_constant(inner)]

    def visit(self, node: NodeProto) -> None:
        """Fold a node, drop it, or keep it."""
        if is_mark(node) or has_bodies(node):
            if not is_mark(node):
                inline_decided_branches(node, self.small, self.opsets, self.taken)
            self.kept.append(node)
            return
        if node.op_type == "CastLike":
            self._to_cast(node)
        computed = fold(node, self.small, self.opsets, weights_stay=self.own, limit=_LARGEST_MASK)
        self.small.update(computed or {})  # a mask is computed in several steps
        folded = self._static_shape(node) or (None if self.computed_sites.intersection(node.output) else computed)
        if folded is None:
            folded = (
                self._view_of_weight(node)
                if self.own
                else fold_rearranged(node, self.stored, self.opsets, self.weights)
            )
        if folded is not None:
            for name, value in folded.items():
                self._store_value(name, value, apart=any(part in self.weights for part in node.input))
            return
        _drop_bias_of_zeros(node, self.small)
        if self._changes_nothing(node) or (is_full_slice(node, self.small) and node.output[0] not in self.outputs):
            self.bypassed[node.output[0]] = node.input[0]
        elif (size := self._size_again(node)) and node.output[0] not in self.outputs:
            self.bypassed[node.output[0]] = size
            self.numbers.add(node.input[0])
        else:
            self.kept.append(node)
            self._note_type(node)

    def _note_type(self, node: NodeProto) -> None:
        """Record the type of a result that an inlined function left undeclared; these ops keep that of their input."""
        if node.op_type in _SAME_TYPE and node.output[0] not in self.types:
            self.types[node.output[0]] = (self._dtype(node.input[0]), None)

    def _store_value(self, name: str, value: Array, *, apart: bool) -> None:
        if apart and is_large(value.shape):
            self.weights[name] = value
            self._store(as_stub(name, int(helper.np_dtype_to_tensor_dtype(value.dtype)), value.shape))
        else:
            self._store(numpy_helper.from_array(value, name))

    def _store(self, tensor: TensorProto) -> None:
        self.graph.initializer.append(tensor)
        self.stored[tensor.name] = self.graph.initializer[-1]
        if _is_small(tensor):
            self.small[tensor.name] = self.weights[tensor.name] if tensor.name in self.weights else array(tensor)

    def _dtype(self, name: str) -> str:
        if name in self.stored:
            return dtype_name(self.stored[name].data_type)
        return self.types.get(name, ("", None))[0]

    def _static_shape(self, node: NodeProto) -> dict[str, Array] | None:
        """Return the value of a Shape node whose input has no dynamic dimension in the range it reads."""
        if node.op_type != "Shape" or node.domain not in ("", "ai.onnx"):
            return None
        name = node.input[0]
        shape = tuple(self.stored[name].dims) if name in self.stored else self.types.get(name, ("", None))[1]
        if shape is None:
            return None
        facts = attributes(node)
        dims = shape[facts.get("start", 0) : facts.get("end")]
        if not all(isinstance(dim, int) for dim in dims):
            return None
        return {node.output[0]: np.array(dims, np.int64)}

    def _view_of_weight(self, node: NodeProto) -> dict[str, Array] | None:
        """Return a weight of any size in the shape or type that a view node turns it into, else None."""
        if not is_view(node) or not node.input or node.input[0] not in self.stored:
            return None
        source = self.stored[node.input[0]]
        if dtype_name(source.data_type) not in ("float32", "float16", "bfloat16", "float64"):
            return None
        value = array(source)
        if node.op_type == "Cast":
            to = int(attributes(node).get("to", 0))
            if to not in FLOATS:
                return None
            with np.errstate(over="ignore"):
                return {node.output[0]: value.astype(helper.tensor_dtype_to_np_dtype(to))}
        shape = self._shape_of_view(node, value)
        return None if shape is None else {node.output[0]: value.reshape(shape)}

    def _size_again(self, node: NodeProto) -> str:
        """Return the size that a Shape gives where it is made a number and a shape of one axis again; else ""."""
        number = self.makers.get(node.input[0]) if node.op_type == "Reshape" and not node.domain else None
        size = self.makers.get(number.input[0]) if number is not None and number.op_type == "Squeeze" else None
        if size is None or size.op_type != "Shape":
            return ""
        wanted = self.small.get(node.input[1])
        if wanted is None or wanted.tolist() not in ([-1], [1]):
            return ""
        facts = attributes(size)
        return size.output[0] if facts.get("end", 0) - facts.get("start", 0) == 1 else ""

    def _shape_of_view(self, node: NodeProto, value: Array) -> tuple[int, ...] | None:
        """Return the shape that a view node produces, found by folding a small stand-in of the same shape."""
        if value.size == 0 or any(name and name not in self.small for name in node.input[1:]):
            return None
        stand_in = np.broadcast_to(np.zeros(1, np.float32), value.shape)
        found = fold(node, {**self.small, node.input[0]: stand_in}, self.opsets, weights_stay=False, limit=value.size)
        return None if found is None else next(iter(found.values())).shape

    def _to_cast(self, node: NodeProto) -> None:
        """Turn CastLike into Cast where the type of its pattern is known."""
        code = _CODES.get(self._dtype(node.input[1]))
        if code is None:
            return
        node.op_type = "Cast"
        del node.input[1:]
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("to", code))

    def _changes_nothing(self, node: NodeProto) -> bool:
        """Return True for Identity, times 1, or a Cast to the type its input has (`copy_` is traced as one)."""
        if node.domain not in ("", "ai.onnx") or not node.output or node.output[0] in self.outputs:
            return False
        if node.op_type in ("Mul", "Div"):  # the scales of an ELU, the beta of a Softplus
            factor = self.small.get(node.input[1])
            return factor is not None and factor.ndim == 0 and factor == 1 and node.input[0] not in self.stored
        if node.op_type == "Identity":
            # in a traced model a stored tensor keeps its own name for each reader
            return self.own or node.input[0] not in self.stored
        if node.op_type != "Cast":
            return False
        before = self._dtype(node.input[0])
        return before != "" and _CODES.get(before) == attributes(node).get("to")


def join_splits(graph: GraphProto) -> None:
    """Turn SplitToSequence that only SequenceAt at constant places reads into Split, or Slices, in place."""
    if not any(node.op_type == "SplitToSequence" for node in graph.node):
        return
    index, kept, parts = GraphIndex(graph), list[NodeProto](), set[str]()
    for node in graph.node:
        if node.op_type == "SequenceAt" and node.output[0] in parts:
            continue
        made = _in_place_of_sequence(node, index) if node.op_type == "SplitToSequence" else []
        parts.update(name for part in made if part.op_type in ("Split", "Slice") for name in part.output)
        kept += made or [node]
    replace_nodes(graph, kept)


def _in_place_of_sequence(node: NodeProto, index: GraphIndex) -> list[NodeProto]:
    """Return the nodes that make the parts of a SplitToSequence as tensors; none where that cannot be."""
    readers, facts = index.readers.get(node.output[0], []), attributes(node)
    places = [index.stored.get(r.input[1]) for r in readers if r.op_type == "SequenceAt"]
    known = [int(array(place)) for place in places if place is not None]
    if len(known) < len(readers) or len(node.input) < 2 or facts.get("keepdims", 1) != 1:
        return []
    results, axis = [reader.output[0] for reader in readers], int(facts.get("axis", 0))
    make = _split if node.input[1] in index.stored else _slices
    return make(node, index, known, results, axis)


def _slices(node: NodeProto, index: GraphIndex, numbers: list[int], results: list[str], axis: int) -> list[NodeProto]:
    """Return the Slices of parts of a computed size, as `chunk` of an open axis has them."""
    source, size = node.input
    if min(numbers, default=-1) < 0 or not _is_number(size, index.graph):
        return []
    begin, stored = node.output[0], index.graph.initializer
    stored.append(numpy_helper.from_array(np.array([axis]), f"{begin}_axis"))
    made = []
    for number in sorted({*numbers, *(number + 1 for number in numbers)}):
        stored.append(numpy_helper.from_array(np.array([number]), f"{begin}_{number}"))
        made.append(helper.make_node("Mul", [size, f"{begin}_{number}"], [f"{begin}_at_{number}"]))
    for number, result in zip(numbers, results, strict=True):
        inputs = [source, f"{begin}_at_{number}", f"{begin}_at_{number + 1}", f"{begin}_axis"]
        made.append(helper.make_node("Slice", inputs, [result], name=f"{node.name}_{number}"))
    return made


def _split(node: NodeProto, index: GraphIndex, numbers: list[int], results: list[str], axis: int) -> list[NodeProto]:
    """Return the Split into parts of stored sizes."""
    shape = declared_types(index.graph).get(node.input[0], ("", None))[1]
    if not shape:
        return []
    length, sizes = shape[axis], array(index.stored[node.input[1]])
    if sizes.ndim == 0:
        if not isinstance(length, int) or not length:
            return []
        step = int(sizes)
        sizes = np.array([min(step, length - start) for start in range(0, length, step)])
    wanted = [number % len(sizes) for number in numbers]
    if len(set(wanted)) != len(wanted):
        return []
    names = dict(zip(wanted, results, strict=True))
    tensor = numpy_helper.from_array(sizes.astype(np.int64), f"{node.output[0]}_sizes")
    index.graph.initializer.append(tensor)
    # every part needs a name, also one that nothing reads
    outputs = [names.get(place, f"{node.output[0]}_{place}") for place in range(len(sizes))]
    return [helper.make_node("Split", [node.input[0], tensor.name], outputs, name=node.name, axis=axis)]


def _is_number(name: str, graph: GraphProto) -> bool:
    """Return whether a computed tensor is known to be a single number."""
    typed = next((info.type.tensor_type for info in graph.value_info if info.name == name), None)
    return typed is not None and typed.HasField("shape") and not typed.shape.dim


def _marks_output(mark: NodeProto) -> bool:
    """Return True if a mark names a computed tensor; folded, it would pass for a stored one of the module."""
    return port_of(str(attributes(mark)["key"])).startswith("output")


def _drop_bias_of_zeros(node: NodeProto, small: dict[str, Array]) -> None:
    """Remove the bias of zeros with which a convolution without a bias is traced."""
    is_conv = node.op_type in ("Conv", "ConvTranspose") and len(node.input) == 3
    if is_conv and node.input[2] in small and not small[node.input[2]].any():
        del node.input[2]


def _count_shapes(nodes: Iterable[NodeProto]) -> int:
    return sum(node.op_type in SHAPE_OPS for node in nodes)


def _traced_types(model: ModelProto) -> Types:
    """Return dtypes and shapes; where sizes are read, also of the tensors inside what torch calls one operator."""
    reads_sizes = _count_shapes(model.graph.node) > 0
    return declared_types((with_inferred_shapes(skeleton(model)) if reads_sizes else model).graph)


def _is_small(tensor: TensorProto) -> bool:
    size = math.prod(tensor.dims)
    return size <= LARGEST or (size <= _LARGEST_INDEX and tensor.data_type in _INDICES)
