"""Pairs in forms that ONNX Runtime computes fast, and back: a node says in its metadata which nodes it stands for.

Each computes the same numbers; measured on onnxruntime 1.32:

- DynamicQuantizeLinear -> DequantizeLinear -> MatMul runs as it stands, in floats; with MatMulInteger, Cast and Mul in
  place of the others it is one kernel (DynamicQuantizeMatMul). Sums in float32 are rounded, those of integers are not.
- A DequantizeLinear of a stored weight runs in every run; Cast and Mul of the same codes are folded to floats once,
  when the session is opened.
- So does that of a table of 30,000 words; a Gather of codes and a DequantizeLinear behind reads only some rows.
- Zeros around the input of a convolution, with a pair of the encoding in front, are the convolution's own zeros: 0 has
  a code.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.dialects.readers import Readers
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, names_in, unique
from onnx_backend.proto.nodes import (
    attributes,
    constant_tensor,
    drop_unused_initializers,
    is_constant,
    metadata,
    replace_nodes,
    set_metadata,
)
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import is_large
from qsdk.core.errors import FileFormatError

FORM_KEY = "qsdk.stands_for"  # metadata of the last node of a form: the nodes that it stands for, serialized
_PART_KEY = "qsdk.part_of"  # metadata of its other nodes: what the last one makes
_NOTES = {FORM_KEY, _PART_KEY}
_BYTES = (TensorProto.INT8, TensorProto.UINT8)
_FOLDED = (*_BYTES, TensorProto.INT4, TensorProto.UINT4)
_LOOKED_UP = (*_BYTES, TensorProto.INT16, TensorProto.UINT16)
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_PADDED = ("QuantizeLinear", "DequantizeLinear", "Pad", "QuantizeLinear", "DequantizeLinear")


def write_fast_forms(model: ModelProto) -> None:
    """Write what the runtime computes fast in another form in that form, in place."""
    writer = _Writer(model)
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and writer.is_folded(node):
            writer.fold(node)
        elif node.op_type in ("MatMul", "Gemm") and writer.is_dynamic(node):
            writer.multiply(node)
        elif node.op_type == "Gather" and writer.reads_table(node):
            writer.look_up(node)
        elif node.op_type == "Conv" and (zeros := writer.zeros_before(node)):
            writer.pad(node, zeros)
        else:
            writer.nodes.append(node)
    replace_nodes(model.graph, writer.without_unread())
    drop_unused_initializers(model.graph)


def with_pairs(model: ModelProto) -> ModelProto:
    """Return the model, or a changed copy, with the nodes that `write_fast_forms` has replaced.

    Raises:
        FileFormatError: a form does not compute what the nodes compute that it says to stand for.
    """
    if not _forms_of(model):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    made = {name for node in graph.node if not _NOTES & metadata(node).keys() for name in node.output}
    stored, nodes, behind = initializers(graph), list[NodeProto](), dict[str, list[NodeProto]]()
    for node in graph.node:
        facts = metadata(node)
        if FORM_KEY in facts:
            *others, last = (NodeProto.FromString(b64decode(text)) for text in json.loads(facts[FORM_KEY]))
            for one in others:
                source = next(iter(one.input), "")
                if made.intersection(one.output):  # it has other readers, or another form notes it
                    continue
                if is_constant(one) and one.output[0] not in stored:
                    graph.initializer.append(constant_tensor(one))
                elif source in made:  # where export finds it: an opened file, exported again, comes out the same
                    behind.setdefault(source, []).append(one)
                elif source in stored:
                    nodes.append(one)
                made.update(one.output)
            nodes.append(last)
        elif _PART_KEY not in facts:
            nodes.append(node)
    replace_nodes(graph, _in_order(nodes, behind))
    drop_unused_initializers(graph)
    again = ModelProto(graph=GraphProto(node=graph.node, output=graph.output))
    for tensor in graph.initializer:  # of large ones, no form has more than the shape
        stub = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        again.graph.initializer.append(stub if is_large(tensor.dims) else tensor)
    write_fast_forms(again)
    written = _forms_of(again)
    wrong = [name for name, form in _forms_of(model).items() if written.get(name) != form]
    if wrong:
        raise FileFormatError(
            f"the nodes that {FORM_KEY} notes are not those that stand in the file at {wrong[0]!r}; it was changed, "
            "export it again"
        )
    return result


def _in_order(nodes: Iterable[NodeProto], behind: dict[str, list[NodeProto]]) -> list[NodeProto]:
    """Return nodes, each followed by those that stand behind its results."""
    waiting, found = [*nodes][::-1], list[NodeProto]()
    while waiting:
        found.append(waiting.pop())
        for name in found[-1].output[::-1]:
            waiting += behind.pop(name, [])[::-1]
    return found


def _forms_of(model: ModelProto) -> dict[str, bytes]:
    """Return the nodes of forms by their first result, and the shapes that they read."""
    noted = [node for node in model.graph.node if _NOTES & metadata(node).keys()]
    read = {name for node in noted for name in node.input if node.op_type == "Reshape"}
    shapes = {
        t.name: array(t).tobytes() for t in model.graph.initializer if t.name in read and t.name.endswith("/shape")
    }
    return {node.output[0]: node.SerializeToString(deterministic=True) for node in noted} | shapes


class _Writer:
    """A graph while forms are written.

    Attributes:
        nodes: so far.
    """

    def __init__(self, model: ModelProto) -> None:
        self.graph, self.known, self.taken = model.graph, Readers(model.graph), names_in(model.graph)
        self.nodes: list[NodeProto] = []
        self._on_codes = any(node.op_type == "QuantizeLinear" for node in self.graph.node)
        self._dropped = set[str]()  # tensors whose node may be needed no more

    def is_folded(self, pair: NodeProto) -> bool:
        """Return True for a DequantizeLinear of the weight of convolutions that compute in floats."""
        codes, scale = self._stored(pair, _FOLDED), self.known.stored.get(pair.input[1])
        readers, facts = self.known.readers.get(pair.output[0], []), attributes(pair)
        if self._on_codes or codes is None or scale is None or scale.data_type != TensorProto.FLOAT or not readers:
            return False
        if facts.get("block_size") or facts.get("output_dtype") or pair.output[0] in self.known.outputs:
            return False
        return all(node.op_type in _CONVOLUTIONS and node.input[1] == pair.output[0] for node in readers)

    def fold(self, pair: NodeProto) -> None:
        """Write a DequantizeLinear as what is folded when a session is opened."""
        rank = len(self.known.stored[pair.input[0]].dims)
        axis = attributes(pair).get("axis", 1) % rank
        shape = unique(f"{pair.output[0]}/shape", self.taken)
        along = [-1 if place == axis else 1 for place in range(rank)]
        self.graph.initializer.append(numpy_helper.from_array(np.array(along, np.int64), shape))
        last = pair.output[0]
        values = self._part(last, "Cast", [pair.input[0]], to=TensorProto.FLOAT)
        if len(pair.input) > 2:
            zero = self._part(last, "Cast", [pair.input[2]], to=TensorProto.FLOAT)
            values = self._part(last, "Sub", [values, self._part(last, "Reshape", [zero, shape])])
        scale = self._part(last, "Reshape", [pair.input[1], shape])
        self._last(helper.make_node("Mul", [values, scale], [last], pair.name), [pair])

    def is_dynamic(self, layer: NodeProto) -> bool:
        """Return True for a product of a dynamically quantized tensor and a stored matrix."""
        pair, weight = (self.known.makers.get(name) for name in layer.input[:2])
        if pair is None or weight is None or {pair.op_type, weight.op_type} != {"DequantizeLinear"}:
            return False
        quantize, codes = self.known.makers.get(pair.input[0]), self._stored(weight, _BYTES)
        if quantize is None or quantize.op_type != "DynamicQuantizeLinear" or pair.input[:] != quantize.output[:]:
            return False
        scale, facts = self.known.stored.get(weight.input[1]), attributes(weight)
        if codes is None or scale is None or scale.data_type != TensorProto.FLOAT or len(codes.dims) != 2:
            return False
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
        if any(value != plain.get(name) for name, value in attributes(layer).items()):
            return False
        return not facts.get("block_size") and (not scale.dims or facts.get("axis", 1) % 2 == 1)

    def multiply(self, layer: NodeProto) -> None:
        """Write a layer with a dynamically quantized input as the product of integers that the runtime fuses."""
        pair, weight = (self.known.makers[name] for name in layer.input[:2])
        last, (codes, scale, zero) = layer.output[0], pair.input
        self._dropped.update(layer.input[:2])
        total = self._part(last, "MatMulInteger", [codes, weight.input[0], zero, *weight.input[2:]])
        whole = self._part(last, "Cast", [total], to=TensorProto.FLOAT)
        scales = self._part(last, "Mul", [scale, weight.input[1]])
        op, inputs = "Mul", [whole, scales]
        if len(layer.input) > 2:
            op, inputs = "Add", [self._part(last, "Mul", inputs), layer.input[2]]
        self._last(helper.make_node(op, inputs, [last], layer.name), [pair, weight, layer])

    def reads_table(self, gather: NodeProto) -> bool:
        """Return True for a look-up of rows in a stored table whose rows have the same scales."""
        table = self.known.makers.get(gather.input[0])
        codes = None if table is None else self._stored(table, _LOOKED_UP)
        if table is None or codes is None or attributes(gather).get("axis", 0) != 0:
            return False
        scale, facts = self.known.stored.get(table.input[1]), attributes(table)
        if scale is None or facts.get("block_size") or len(codes.dims) < 2:
            return False
        return not scale.dims or facts.get("axis", 1) % len(codes.dims) != 0

    def look_up(self, gather: NodeProto) -> None:
        """Write a look-up on codes; channels of the rows are counted from the last axis."""
        table = self.known.makers[gather.input[0]]
        last, rank = gather.output[0], len(self.known.stored[table.input[0]].dims)
        self._dropped.add(table.output[0])
        codes = self._part(last, "Gather", [table.input[0], gather.input[1]])
        facts = attributes(table)
        facts |= {"axis": facts["axis"] % rank - rank} if "axis" in facts else {}
        rows = helper.make_node("DequantizeLinear", [codes, *table.input[1:]], [last], gather.name, **facts)
        self._last(rows, [table, gather])

    def zeros_before(self, conv: NodeProto) -> list[NodeProto]:
        """Return the pair, the Pad and its pair before a convolution that can put the zeros itself; else nothing."""
        nodes: list[NodeProto] = []
        for op in reversed(_PADDED):
            node = self.known.makers.get(nodes[0].input[0] if nodes else conv.input[0])
            if node is None or node.op_type != op:
                return []
            nodes.insert(0, node)
        pad, *_, dequantize = taken = nodes[2:]
        readers = [self.known.readers[node.output[0]] for node in taken]
        operands = [self._operands(node) for node in nodes if node is not pad]
        if any(len(found) > 1 for found in readers[:-1]) or None in operands or len(set(operands)) > 1:
            return []
        if self.known.outputs.intersection(node.output[0] for node in taken) or not self._zeros_of(pad):
            return []
        return nodes if all(_can_pad(node, dequantize.output[0]) for node in readers[-1]) else []

    def pad(self, conv: NodeProto, zeros: Sequence[NodeProto]) -> None:
        """Write a convolution with the zeros that a Pad would put."""
        first, before, pad, quantize, dequantize = zeros
        padded, own = _changed(conv, [before.output[0], *conv.input[1:]]), attributes(conv).get("pads", ())
        sizes = [a + b for a, b in zip(self._zeros_of(pad), own or repeat(0), strict=False)]
        del padded.attribute[:]
        padded.attribute.extend(entry for entry in conv.attribute if entry.name != "pads")
        padded.attribute.append(helper.make_attribute("pads", sizes))
        self._dropped.update(node.output[0] for node in zeros[2:])
        # what the Pad reads is stored no more; its pair has the operands of the pair in front
        stored = [
            helper.make_node("Constant", [], [name], value=self.known.stored[name]) for name in pad.input[1:] if name
        ]
        pair = [
            _changed(like, [node.input[0], *like.input[1:]], node)
            for like, node in ((first, quantize), (before, dequantize))
        ]
        self._last(padded, [*stored, pad, *pair, conv])

    def without_unread(self) -> list[NodeProto]:
        """Return the nodes, without those that only replaced ones have read."""
        read, kept = {value.name for value in self.graph.output}, list[NodeProto]()
        for node in reversed(self.nodes):
            if not self._dropped.intersection(node.output) or read.intersection(node.output):
                kept.append(node)
                read.update(reads(node))
        return kept[::-1]

    def _stored(self, pair: NodeProto, types: Sequence[int]) -> TensorProto | None:
        codes = self.known.stored.get(pair.input[0]) if pair.op_type == "DequantizeLinear" else None
        return codes if codes is not None and codes.data_type in types else None

    def _operands(self, node: NodeProto) -> tuple[bytes, int] | None:
        """Return the scale and zero point of a node of a pair, comparable; None where they are not stored numbers."""
        stored = [self.known.stored.get(name) for name in node.input[1:]]
        values = [array(tensor) for tensor in stored if tensor is not None and not any(n != 1 for n in tensor.dims)]
        if len(values) < len(stored):
            return None
        return values[0].tobytes(), int(values[1].reshape(-1)[0]) if len(values) > 1 else 0

    def _zeros_of(self, pad: NodeProto) -> list[int]:
        """Return the sizes, as a convolution has them, of a Pad that puts zeros behind the channels; else nothing."""
        names, mode = [name for name in pad.input[1:] if name], attributes(pad).get("mode", "constant")
        if mode != "constant" or len(pad.input) > 3 or any(name not in self.known.stored for name in names):
            return []
        sizes, *value = (array(self.known.stored[name]).reshape(-1).tolist() for name in names)
        rank = len(sizes) // 2
        beside = [*sizes[:2], *sizes[rank : rank + 2], *(value[0] if value else ())]
        return [*sizes[2:rank], *sizes[rank + 2 :]] if not any(beside) and min(sizes) >= 0 else []

    def _part(self, last: str, op: str, inputs: Sequence[str], **options: int) -> str:
        name = unique(f"{last}/{op.lower()}", self.taken)
        node = helper.make_node(op, list(inputs), [name], name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in options.items())
        set_metadata(node, **{_PART_KEY.removeprefix("qsdk."): last})
        self.nodes.append(node)
        return name

    def _last(self, node: NodeProto, meant: Sequence[NodeProto]) -> None:
        text = json.dumps([b64encode(one.SerializeToString(deterministic=True)).decode() for one in meant])
        set_metadata(node, **{FORM_KEY.removeprefix("qsdk."): text})
        self.nodes.append(node)


def _can_pad(node: NodeProto, source: str) -> bool:
    own = attributes(node).get("auto_pad", "NOTSET") == "NOTSET"
    return node.op_type == "Conv" and own and list(node.input).count(source) == 1


def _changed(node: NodeProto, inputs: Sequence[str], named: NodeProto | None = None) -> NodeProto:
    """Return a copy of a node with other inputs; with the name, the results and the facts of another one."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = inputs
    if named is not None:
        copy.name, copy.output[:] = named.name, named.output
        del copy.metadata_props[:]
        copy.metadata_props.extend(named.metadata_props)
    return copy
