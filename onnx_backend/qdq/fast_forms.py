"""Pairs in forms that ONNX Runtime computes fast, and back: a node says in its metadata which nodes it stands for.

DynamicQuantizeLinear -> DequantizeLinear -> MatMul runs as it stands, in floats; with MatMulInteger, Cast and Mul in
place of the others it is one kernel (DynamicQuantizeMatMul). A DequantizeLinear of a stored weight runs in every run;
Cast and Mul of the same codes are folded to floats once, when the session is opened. Measured on onnxruntime 1.32.
Both compute the same numbers: the first up to the rounding of sums in float32, which has none in integers.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.dialects.readers import Readers
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import names_in, unique
from onnx_backend.proto.nodes import (
    attributes,
    drop_unused_initializers,
    metadata,
    node_label,
    replace_nodes,
    set_metadata,
)
from onnx_backend.proto.subgraphs import reads
from qsdk.core.errors import FileFormatError

FORM_KEY = "qsdk.stands_for"  # metadata of the last node of a form: the nodes that it stands for, serialized
_PART_KEY = "qsdk.part_of"  # metadata of its other nodes: what the last one makes
_BYTES = (TensorProto.INT8, TensorProto.UINT8)
_FOLDED = (*_BYTES, TensorProto.INT4, TensorProto.UINT4)
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


def write_fast_forms(model: ModelProto) -> None:
    """Write what the runtime computes fast in another form in that form, in place."""
    writer = _Writer(model)
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and writer.is_folded(node):
            writer.fold(node)
        elif node.op_type in ("MatMul", "Gemm") and writer.is_dynamic(node):
            writer.multiply(node)
        else:
            writer.nodes.append(node)
    replace_nodes(model.graph, writer.without_unread())


def with_pairs(model: ModelProto) -> ModelProto:
    """Return the model, or a changed copy, with the nodes that `write_fast_forms` has replaced.

    Raises:
        FileFormatError: a form does not compute what the nodes compute that it says to stand for.
    """
    if not any({FORM_KEY, _PART_KEY} & metadata(node).keys() for node in model.graph.node):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    nodes: list[NodeProto] = []
    made = set[str]()
    for node in result.graph.node:
        facts = metadata(node)
        for one in _meant(node, facts) if _PART_KEY not in facts else ():
            results = set(filter(None, one.output))
            if not made.intersection(results):  # a pair with other readers stands in the file, too
                nodes.append(one)
                made |= results
    replace_nodes(result.graph, nodes)
    drop_unused_initializers(result.graph)
    again = ModelProto()
    again.CopyFrom(result)
    write_fast_forms(again)
    if _forms_of(again) != _forms_of(model):
        raise FileFormatError(
            f"the nodes that {FORM_KEY} notes are not those that stand in the file; it was changed, export it again"
        )
    return result


def _meant(node: NodeProto, facts: Mapping[str, str]) -> list[NodeProto]:
    """Return the nodes that a node stands for, or the node itself."""
    if FORM_KEY not in facts:
        return [node]
    try:
        return [NodeProto.FromString(b64decode(text)) for text in json.loads(facts[FORM_KEY])]
    except Exception as error:  # of json, base64 or protobuf, whose type has no stubs
        raise FileFormatError(
            f"the node {node_label(node)!r} has a damaged {FORM_KEY}; export the file again"
        ) from error


def _forms_of(model: ModelProto) -> dict[str, bytes]:
    """Return the nodes of forms by their first result, and the shapes that they read."""
    noted = [node for node in model.graph.node if {FORM_KEY, _PART_KEY} & metadata(node).keys()]
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
        self._last("Mul", [values, scale], last, pair.name, [pair])

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
        if len(layer.input) > 2:
            product = self._part(last, "Mul", [whole, scales])
            self._last("Add", [product, layer.input[2]], last, layer.name, [pair, weight, layer])
        else:
            self._last("Mul", [whole, scales], last, layer.name, [pair, weight, layer])

    def without_unread(self) -> list[NodeProto]:
        """Return the nodes, without the pairs that only replaced ones have read."""
        read = {value.name for value in self.graph.output}.union(*(reads(node) for node in self.nodes))
        gone = self._dropped - read
        return [node for node in self.nodes if not gone.intersection(node.output)]

    def _stored(self, pair: NodeProto, types: Sequence[int]) -> TensorProto | None:
        codes = self.known.stored.get(pair.input[0]) if pair.op_type == "DequantizeLinear" else None
        return codes if codes is not None and codes.data_type in types else None

    def _part(self, last: str, op: str, inputs: Sequence[str], **options: int) -> str:
        name = unique(f"{last}/{op.lower()}", self.taken)
        node = helper.make_node(op, list(inputs), [name], name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in options.items())
        set_metadata(node, **{_PART_KEY.removeprefix("qsdk."): last})
        self.nodes.append(node)
        return name

    def _last(self, op: str, inputs: Sequence[str], output: str, name: str, meant: Sequence[NodeProto]) -> None:
        node = helper.make_node(op, list(inputs), [output], name)
        text = json.dumps([b64encode(one.SerializeToString(deterministic=True)).decode() for one in meant])
        set_metadata(node, **{FORM_KEY.removeprefix("qsdk."): text})
        self.nodes.append(node)
