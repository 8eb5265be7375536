"""Run a graph section by section: the nodes that lead to the tensors wanted next, and the model of these nodes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, input_names
from onnx_backend.proto.lazy_tensors import LargeTensor, is_stub
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import is_large, types_of
from onnx_backend.workarounds.kernel_casts import has_other_floats
from qsdk.core.graph.op_facts import RECURRENT, SHAPE_OPS

#: metadata that matches the nodes of two versions of a graph
TAG = "qsdk.walk"
#: ops that return sequences or optionals, which no caller can hold
_NO_TENSORS = frozenset(
    {
        "SplitToSequence",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceInsert",
        "SequenceErase",
        "SequenceMap",
        "Optional",
    }
)


@dataclass(frozen=True)
class Section:
    """Part of a graph that is run at once.

    Attributes:
        nodes: indices, in order.
        inputs: tensors that exist already, or that the caller feeds.
        wanted: its outputs.
    """

    nodes: Sequence[int]
    inputs: Sequence[str]
    wanted: Sequence[str]


class Stream:
    """A model without its large stored tensors, and which of its nodes have been run.

    Attributes:
        nodes: of the graph, sorted.
        given: name -> an input that the caller feeds.
        at: tag -> index of a node.
        outputs: of the graph.
        bfloat16: the tensors of that type: between two sections they are float32 arrays.
        done: indices of the nodes that have been run.
    """

    def __init__(
        self,
        model: ModelProto,
        large: Mapping[str, LargeTensor],
        computed: Mapping[str, Callable[[], LargeTensor]],
        bfloat16: Collection[str] = (),
    ) -> None:
        """Read a model.

        `large` are the tensors that stubs stand for; those `computed` are computed anew for every section and replace
        the model's own.
        """
        self._model, self._large, self._computed = model, large, computed
        self._stored, self.bfloat16 = initializers(model.graph), frozenset(bfloat16)
        self.nodes: list[NodeProto] = list(model.graph.node)
        self._reads = [reads(node) for node in self.nodes]
        for index, node in enumerate(self.nodes):
            if node.op_type in RECURRENT and not node.output[0]:
                node.output[0] = f"{TAG}/{index}"  # the states after each step tell those before the next
        self._maker = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        fed = set(input_names(model.graph))
        self.given = {value.name: value for value in model.graph.input if value.name in fed}
        self.at = {tag: index for index, node in enumerate(self.nodes) if (tag := metadata(node).get(TAG))}
        self.outputs = [value.name for value in model.graph.output]
        self.done: set[int] = set()
        no_tensors = {index for index, node in enumerate(self.nodes) if node.op_type in _NO_TENSORS}
        self._again = self._made_of_stored() | no_tensors

    def info(self, name: str, facts: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> ValueInfoProto:
        """Declare a tensor from the types and shapes of its arrays; sizes are fixed where all batches agree."""
        if name in self.given:
            given: ValueInfoProto = self.given[name]
            return given
        code = TensorProto.BFLOAT16 if name in self.bfloat16 else helper.np_dtype_to_tensor_dtype(facts[0][0])
        sizes = [set(column) for column in zip(*(shape for _, shape in facts), strict=True)]
        shape = [min(s) if len(s) == 1 else None for s in sizes]
        info: ValueInfoProto = helper.make_tensor_value_info(name, code, shape)
        return info

    def maker(self, name: str) -> int:
        """Return the index of the node that computes a tensor."""
        return self._maker[name]

    def depths(self, steps: Mapping[int, int]) -> Mapping[str, int]:
        """Return tensor -> the last step that it depends on, if any; `steps` maps a node to its step."""
        found: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            own = max([steps.get(index, -1), *(found.get(name, -1) for name in self._reads[index])])
            if own >= 0:
                found.update(dict.fromkeys(node.output, own))
        return found

    def section(self, wanted: Iterable[str]) -> Section:
        """Return the section to run for these tensors; those that exist already are among its inputs."""
        wanted = list(dict.fromkeys(wanted))
        nodes: set[int] = set()
        inputs: dict[str, None] = {}
        seen: set[str] = set()
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            index = self._maker.get(name)
            if index is None:
                if name in self.given:
                    inputs[name] = None
            elif index in self.done:
                inputs[name] = None
            elif index not in nodes:
                nodes.add(index)
                waiting.extend(self._reads[index])
        computed = [name for name in wanted if name not in inputs]
        return Section(sorted(nodes), sorted(inputs), computed)

    def sizes_in(self, section: Section, later: Section) -> list[str]:
        """Return shapes of the section's tensors that are wanted later, so that the tensors need not be kept."""
        known = {*section.inputs, *self.made_in(section)}
        shapes = (self.nodes[index] for index in later.nodes if self.nodes[index].op_type in SHAPE_OPS)
        return [node.output[0] for node in shapes if node.input[0] in known]

    def made_in(self, section: Section) -> set[str]:
        """Return every tensor that the nodes of a section compute."""
        return {name for index in section.nodes for name in self.nodes[index].output if name}

    def is_stored(self, name: str) -> bool:
        """Return True if a tensor is stored in the model."""
        return name in self._stored or name in self._computed

    def stored(self, name: str) -> npt.NDArray[Any]:
        """Return the value of a stored tensor."""
        if name in self._computed:
            return self._computed[name]().value()
        return self._large[name].value() if name in self._large else array(self._stored[name])

    def finish(self, section: Section) -> None:
        """Record that a section was run; nodes over stored tensors alone run again in every section that reads them."""
        self.done.update(set(section.nodes) - self._again)

    def model(self, section: Section, inputs: Sequence[ValueInfoProto]) -> tuple[ModelProto, Mapping[str, LargeTensor]]:
        """Return the model of a section with stubs for its large stored tensors, and these by name."""
        found = ModelProto(ir_version=self._model.ir_version)
        found.opset_import.extend(self._model.opset_import)
        graph = found.graph
        graph.name = "section"
        graph.node.extend(self.nodes[index] for index in section.nodes)
        graph.input.extend(inputs)
        graph.output.extend(ValueInfoProto(name=name) for name in section.wanted)
        names = {name: None for index in section.nodes for name in self._reads[index]}
        large: dict[str, LargeTensor] = {}
        for name in names:
            if name in self._computed:
                _add(found, name, self._computed[name](), large)
            elif name in self._stored:
                _keep(found, self._stored[name], self._large, large)
        return found, large

    def _made_of_stored(self) -> frozenset[int]:
        """Return the nodes that read nothing but stored tensors, directly or through one another."""
        known = {*self._stored, *self._computed}
        found = set()
        for index, node in enumerate(self.nodes):
            if self._reads[index] and all(name in known for name in self._reads[index]):
                found.add(index)
                known.update(node.output)
        return frozenset(found)


def bfloat16_in(model: ModelProto) -> frozenset[str]:
    """Return the names of a model's bfloat16 tensors."""
    if not has_other_floats(model):
        return frozenset()
    return frozenset(name for name, (dtype, _) in types_of(model).items() if dtype == "bfloat16")


def _add(model: ModelProto, name: str, values: LargeTensor, large: dict[str, LargeTensor]) -> None:
    if is_large(values.dims):
        large[name] = values
        model.graph.initializer.append(values.stub(name))
    else:
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.value()), name))


def _keep(
    model: ModelProto, tensor: TensorProto, source: Mapping[str, LargeTensor], large: dict[str, LargeTensor]
) -> None:
    """Add a stored tensor as it is; one in a file stays there."""
    if is_stub(tensor):
        large[tensor.name] = source[tensor.name]
    model.graph.initializer.append(tensor)
