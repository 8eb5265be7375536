"""Tokens as the rows of a matrix from layer to layer, where each Gemm would make them rows and tokens again.

A layer of tokens [N, T, C] runs in ONNX Runtime as a QGemm between two Reshapes (see `fast_forms`), and a Reshape costs
what any node costs: they are a third of all nodes of a transformer. Pairs, activations, norms, sums and products with
what lies along the last axis give the same numbers from rows [N * T, C]. So a region of such nodes needs a Reshape at
its edges alone, and none where the edge is a Reshape itself.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex
from onnx_backend.proto.nodes import attributes, metadata, replace_nodes, retain, set_attributes
from onnx_backend.proto.weightless import Shape, Types
from onnx_backend.qdq.forms import FORM_KEY, PART_OF_FORM, drop_notes, meant_by, note_form, note_part
from onnx_backend.readers import COPY_KEY

_OF_ONE = frozenset(
    {"Abs", "Clip", "DequantizeLinear", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish"}
    | {"Neg", "QuantizeLinear", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"}
)
_OF_TWO = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
_MEETING = frozenset({"Reshape", "MatMul", "Where", "Sum", "Max", "Min"})  # where names of sizes meet
_LEAST_AXES = 3


def write_rows(graph: GraphProto, types: Types) -> None:
    """Write regions of tokens as rows, in place; `types` are those of the tensors before any form was written."""
    finder = _Regions(graph, types)
    rows = {tensor for region in finder.regions() if finder.saves(region) for tensor in region}
    if rows:
        _Writer(finder, rows).write()


def _with_one_name(graph: GraphProto, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return shapes whose open sizes have one name each: of windows, 16 times the batch, what inference calls unknown.

    Inference gives a new name to the size that a Reshape leaves open, and where two names meet.
    """
    known, stored = dict[str, tuple[int, str]](), {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in _OF_TWO | _MEETING or any(
            name not in stored and None in shapes.get(name, (None,)) for name in node.input
        ):
            continue
        for size in _open_sizes(shapes, node.output):
            read = {known.get(name, (1, name)) for name in _open_sizes(shapes, node.input)}
            if size in known or len(read) != 1 or (1, size) in read:
                continue
            times, base = next(iter(read))
            if node.op_type == "Reshape":
                before, behind = (_product(shapes.get(name, ())) for name in (node.input[0], node.output[0]))
                if not behind or times * before % behind:
                    continue
                times = times * before // behind
            known[size] = times, base
    names = {size: f"{times} {base}" if times > 1 else base for size, (times, base) in known.items()}
    return {
        tensor: tuple(names.get(size, size) if isinstance(size, str) else size for size in shape)
        for tensor, shape in shapes.items()
    }


def _is_open_once(shape: Shape) -> bool:
    """Return True if at most one size is open, and none unknown or 0, which a Reshape reads otherwise."""
    return None not in shape and 0 not in shape and sum(isinstance(size, str) for size in shape) <= 1


def _open_sizes(shapes: Mapping[str, Shape], tensors: Iterable[str]) -> list[str]:
    return [size for name in tensors for size in shapes.get(name, ()) if isinstance(size, str)]


def _product(shape: Shape) -> int:
    """Return the product of the other sizes of a shape with one open size; 0 for any other shape."""
    sizes = [size for size in shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(shape) - 1 and _is_open_once(shape) else 0


class _Regions(GraphIndex):
    """The nodes of a graph that compute tokens row by row, and the tensors between them."""

    def __init__(self, graph: GraphProto, types: Types) -> None:
        super().__init__(graph)
        self._shapes = _with_one_name(graph, {name: shape for name, (_, shape) in types.items() if shape is not None})
        self.inner = {node.output[0] for node in graph.node if self._is_by_row(node)}
        self.ends = {node.output[0]: node for node in graph.node if self._is_end(node)}

    def shape(self, tensor: str) -> Shape | None:
        """Return the sizes of a tensor, names for open ones."""
        stored = self.stored.get(tensor)
        return self._shapes.get(tensor) if stored is None else tuple(stored.dims)

    def tokens(self, tensor: str) -> Shape | None:
        """Return the axes before the last one of a tensor of tokens, of which at most one is open; else None."""
        shape = () if tensor in self.stored else self._shapes.get(tensor, ())
        return shape[:-1] if len(shape) >= _LEAST_AXES and _is_open_once(shape) and isinstance(shape[-1], int) else None

    def tensors(self, node: NodeProto) -> list[str]:
        """Return what a node reads and makes that has a row for each token."""
        own = self.tokens(node.output[0])
        return [name for name in (*node.input, *node.output) if self.tokens(name) == own]

    def is_begin(self, node: NodeProto) -> bool:
        """Return True for the Reshape that makes rows of tokens for a Gemm."""
        if node.op_type != "Reshape" or PART_OF_FORM not in metadata(node) or self.tokens(node.input[0]) is None:
            return False
        return all(reader.op_type == "Gemm" for reader in self.readers.get(node.output[0], []))

    def is_view(self, node: NodeProto, tensor: str) -> bool:
        """Return True for a Reshape of a tensor to sizes that are stored, of which at most one is open."""
        if node.op_type != "Reshape" or metadata(node).keys() & {FORM_KEY, PART_OF_FORM}:
            return False
        wanted = self.stored.get(node.input[1])
        if wanted is None or (attributes(node).get("allowzero") and not array(wanted).all()):
            return False
        return node.input[0] == tensor and _is_open_once(self.shape(node.output[0]) or (None,))

    def leaves(self, tensor: str) -> bool:
        """Return True if something reads a tensor that needs its tokens."""
        readers = self.readers.get(tensor, [])
        by_row = [self.is_begin(node) or node.output[0] in self.inner or self.is_view(node, tensor) for node in readers]
        return tensor in self.outputs or not all(by_row)

    def enters(self, tensor: str) -> bool:
        """Return True if a tensor is made outside, by what cannot make rows as well."""
        return tensor not in self.inner and tensor not in self.ends and not self.is_made_by_view(tensor)

    def is_made_by_view(self, tensor: str) -> bool:
        """Return True if a Reshape that could make rows makes a tensor, and nothing needs its tokens."""
        maker = self.makers.get(tensor)
        return (
            maker is not None
            and maker.op_type == "Reshape"
            and self.is_view(maker, maker.input[0])
            and not self.leaves(tensor)
        )

    def regions(self) -> Iterable[set[str]]:
        """Return the tensors of each region: those that nodes join which compute row by row."""
        begins = [node.input[0] for node in self.graph.node if self.is_begin(node)]
        joined = [set(self.tensors(self.makers[name])) for name in self.inner]
        of = dict[str, set[str]]()
        for group in (*joined, *({name} for name in (*begins, *self.ends))):
            for name in [*group]:
                group |= of.get(name, set())
            of.update(dict.fromkeys(group, group))
        return {id(region): region for region in of.values()}.values()

    def saves(self, region: set[str]) -> bool:
        """Return True if a region has fewer Reshapes with rows."""
        readers = [node for tensor in region for node in self.readers.get(tensor, [])]
        before = sum(self.is_begin(node) for node in readers) + len(region & self.ends.keys())
        return sum(self.leaves(name) + self.enters(name) for name in region) < before

    def _is_end(self, node: NodeProto) -> bool:
        """Return True for the Reshape that makes tokens of the rows of a Gemm."""
        if node.op_type != "Reshape" or FORM_KEY not in metadata(node) or self.tokens(node.output[0]) is None:
            return False
        gemm = self.makers.get(node.input[0])
        return gemm is not None and gemm.op_type == "Gemm" and PART_OF_FORM in metadata(gemm)

    def _is_by_row(self, node: NodeProto) -> bool:
        """Return True for a node that computes each row of its result from a row of what it reads."""
        if node.domain not in ("", "ai.onnx") or PART_OF_FORM in metadata(node) or len(node.output) != 1:
            return False
        tokens, last = self.tokens(node.output[0]), len(self._shapes.get(node.output[0], ())) - 1
        if tokens is None or not node.input or (node.op_type not in _OF_TWO and self.tokens(node.input[0]) != tokens):
            return False
        if node.op_type in _PAIR:
            return self.shape(node.input[1]) == () and not attributes(node).get("block_size")
        if node.op_type in _OF_ONE or (node.op_type == "Sum" and len(node.input) == 1):
            return True
        if node.op_type in _NORMS:
            return attributes(node).get("axis", -1) in (-1, last)
        if node.op_type == "ReduceMean":
            axes = self.stored.get(node.input[1]) if len(node.input) > 1 else None
            return axes is not None and array(axes).tolist() == [-1] and attributes(node).get("keepdims", 1) == 1
        if node.op_type == "MatMul":
            return len(self.shape(node.input[1]) or ()) == 2
        operands = [(name, self.shape(name)) for name in node.input]
        aligned = [shape is not None and (len(shape) < 2 or self.tokens(name) == tokens) for name, shape in operands]
        return node.op_type in _OF_TWO and all(aligned)


class _Writer:
    """The nodes of a graph while some of its tensors become rows."""

    def __init__(self, known: _Regions, rows: set[str]) -> None:
        self._known, self._rows = known, rows
        self._begins = {n.output[0]: n.input[0] for n in known.graph.node if known.is_begin(n) and n.input[0] in rows}
        self._gone = {end.input[0]: end for name, end in known.ends.items() if name in rows and not known.leaves(name)}
        self._named = {name: self._row_name(name) for name in rows}
        self._apart = {node.output[0]: node for node in known.graph.node if self._is_apart(node)}
        for name, copy in self._apart.items():
            self._named[name] = self._named[copy.input[0]]

    def write(self) -> None:
        """Write the rows into the graph."""
        graph, gone = self._known.graph, {end.output[0] for end in self._gone.values()}
        gone |= self._begins.keys() | self._apart.keys()
        nodes = [part for value in graph.input for part in self._entering(value.name)]
        for node in graph.node:
            if gone.isdisjoint(node.output):
                nodes += self._written(node)
                nodes += [part for name in node.output for part in self._entering(name)]
        changed = {tensor for tensor, name in self._named.items() if tensor == name}
        replace_nodes(graph, nodes)
        retain(graph.value_info, lambda info: info.name not in changed)

    def _is_apart(self, node: NodeProto) -> bool:
        """Return True for a copy in front of norms, which the runtime does not join with a sum of rows."""
        if node.op_type != "Sum" or COPY_KEY not in metadata(node) or not self._rows.issuperset(node.output):
            return False
        readers = self._known.readers.get(node.output[0], [])
        return not self._known.leaves(node.output[0]) and all(reader.op_type in _NORMS for reader in readers)

    def _row_name(self, tensor: str) -> str:
        """Return the name of a tensor's rows: its own where nothing needs its tokens."""
        known = self._known
        if known.leaves(tensor) and tensor in known.ends:
            return str(known.ends[tensor].input[0])
        return known.fresh(f"{tensor}/rows") if known.leaves(tensor) or known.enters(tensor) else tensor

    def _entering(self, tensor: str) -> Iterator[NodeProto]:
        """Yield the Reshape that makes rows of a tensor from outside, if it needs one."""
        if tensor in self._rows and self._known.enters(tensor):
            begin = self._reshape(tensor, self._named[tensor], [-1, self._width(tensor)])
            note_part(begin, tensor)
            yield begin

    def _written(self, node: NodeProto) -> list[NodeProto]:
        """Return what stands for a node."""
        known, copy = self._known, NodeProto()
        copy.CopyFrom(node)
        made = node.output[0] if node.output else ""
        if made in self._rows & known.inner:
            return self._by_row(node, copy)
        if made in self._gone:
            return [self._ending(copy, self._gone[made])]
        if made in self._rows and known.is_made_by_view(made):
            return [self._viewed(node, copy, [-1, self._width(made)])]
        if node.input and node.input[0] in self._rows and known.is_view(node, node.input[0]):
            return [self._viewed(node, copy, [n if isinstance(n, int) else -1 for n in known.shape(made) or ()])]
        copy.input[:] = [self._named[self._begins[name]] if name in self._begins else name for name in node.input]
        return [copy]

    def _by_row(self, node: NodeProto, copy: NodeProto) -> list[NodeProto]:
        """Return a node that computes row by row, and the Reshape behind it where something needs its tokens."""
        tensor, before = node.output[0], [self._apart[name] for name in node.input if name in self._apart]
        copy.input[:] = [self._named.get(name, name) for name in node.input]
        copy.output[:] = [self._named[tensor]]
        if attributes(node).get("axis", -1) != -1 and node.op_type in _NORMS:
            set_attributes(copy, {"axis": -1})
        if not self._known.leaves(tensor):
            if copy != node and FORM_KEY not in metadata(node):
                note_form(copy, [*before, node])
            return [copy]
        sizes = [n if isinstance(n, int) else -1 for n in self._known.shape(tensor) or ()]
        end = self._reshape(copy.output[0], tensor, sizes)
        note_form(end, meant_by(node) or [*before, node])
        drop_notes(copy)
        note_part(copy, tensor)
        return [copy, end]

    def _ending(self, gemm: NodeProto, end: NodeProto) -> NodeProto:
        """Return the Gemm of a form in the place of the Reshape behind it."""
        gemm.input[:] = [self._named[self._begins[name]] if name in self._begins else name for name in gemm.input]
        gemm.output[:], gemm.name = end.output, end.name
        drop_notes(gemm)
        note_form(gemm, meant_by(end))
        return gemm

    def _viewed(self, node: NodeProto, copy: NodeProto, sizes: Sequence[int]) -> NodeProto:
        """Return a Reshape of rows, or to rows."""
        known, source, shape = self._known, self._named.get(node.input[0], node.input[0]), node.input[1]
        if array(known.stored[shape]).tolist() != [*sizes]:
            shape = self._stored(f"{node.output[0]}/rows", sizes)
        copy.input[:] = [source, shape]
        if copy != node:
            meant = known.stored[node.input[1]]
            note_form(copy, [helper.make_node("Constant", [], [meant.name], value=meant), node])
        return copy

    def _reshape(self, source: str, result: str, sizes: Sequence[int]) -> NodeProto:
        return helper.make_node("Reshape", [source, self._stored(result, sizes)], [result], f"{result}/reshape")

    def _stored(self, name: str, sizes: Sequence[int]) -> str:
        name = f"{name}/shape"
        if name not in self._known.stored:
            self._known.stored[name] = numpy_helper.from_array(np.array(sizes, np.int64), name)
            self._known.graph.initializer.append(self._known.stored[name])
        return name

    def _width(self, tensor: str) -> int:
        return int((self._known.shape(tensor) or (0,))[-1] or 0)
