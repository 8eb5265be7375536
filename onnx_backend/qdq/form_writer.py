"""A graph in which nodes are written in other forms, each with a note of the nodes that it stands for."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import names_in
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import declared_types, skeleton
from onnx_backend.qdq.forms import note_form, note_part
from onnx_backend.qdq.pairs import Pairs

SIZED: Final = frozenset(
    {"Concat", "GroupNormalization", "MatMul", "ReduceMean", "Transpose"}
)  # whose forms depend on sizes


class FormWriter(Pairs):
    """A graph while forms are written; `nodes` are those so far."""

    def __init__(self, model: ModelProto) -> None:
        super().__init__(model.graph)
        self.taken = names_in(model.graph)  # before forms store numbers, so that a file gives the same names again
        self.nodes: list[NodeProto] = []
        self._opset = opset_of(model)
        self._on_codes = any(node.op_type == "QuantizeLinear" for node in self.graph.node)
        is_sized = self._on_codes and not SIZED.isdisjoint(node.op_type for node in self.graph.node)
        # what the file itself shows, whatever its exporter has noted beside: opened again, it gives the same forms
        inferred = with_inferred_shapes(skeleton(model, value_info=False)) if is_sized else ModelProto()
        self._sizes, self.types = static_sizes(inferred), declared_types(inferred.graph)
        self._made = set[str]()  # stored tensors of forms
        self._dropped = set[str]()  # tensors whose node may be needed no more

    def without_unread(self) -> list[NodeProto]:
        """Return the nodes, without those that only replaced ones have read."""
        read, kept = {value.name for value in self.graph.output}, list[NodeProto]()
        for node in reversed(self.nodes):
            if not self._dropped.intersection(node.output) or read.intersection(node.output):
                kept.append(node)
                read.update(reads(node))
        return kept[::-1]

    def _stored(self, pair: NodeProto, types: Sequence[int]) -> TensorProto | None:
        codes = self.stored.get(pair.input[0]) if pair.op_type == "DequantizeLinear" else None
        return codes if codes is not None and codes.data_type in types else None

    def _read_by(self, nodes: Sequence[NodeProto]) -> list[NodeProto]:
        """Return nodes behind what they read that is stored, and may be so no more when they are replaced."""
        names = dict.fromkeys(name for node in nodes for name in node.input[1:] if name in self.stored)
        return [*(helper.make_node("Constant", [], [name], value=self.stored[name]) for name in names), *nodes]

    def _shaped(self, last: str, name: str, tensor: str, shape: Sequence[int]) -> str:
        return self._part(last, "Reshape", [tensor, self._numbers(f"{last}/{name}/shape", shape)])

    def _numbers(self, name: str, values: Sequence[int]) -> str:
        return self._store_once(name, np.array(values, np.int64))

    def _store_once(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self._made:  # which this form has already
            self._made.add(name)
            self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _part(self, last: str, op: str, inputs: Sequence[str], **options: float) -> str:
        name = self.fresh(f"{last}/{op.lower()}")
        node = helper.make_node(op, list(inputs), [name], name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in options.items())
        note_part(node, last)
        self.nodes.append(node)
        return name

    def _last(self, node: NodeProto, meant: Sequence[NodeProto]) -> None:
        note_form(node, meant)
        self.nodes.append(node)


def changed(node: NodeProto, inputs: Sequence[str], named: NodeProto | None = None) -> NodeProto:
    """Return a copy of a node with other inputs; with the name, the results and the facts of another one."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = inputs
    if named is not None:
        copy.name, copy.output[:] = named.name, named.output
        del copy.metadata_props[:]
        copy.metadata_props.extend(named.metadata_props)
    return copy
