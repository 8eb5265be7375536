"""A graph whose every node is bound to an evaluator: our kernels, onnx's ReferenceEvaluator or ONNX Runtime.

The choice is made once per node, by op and version alone, in this order:

1. the quantization ops of `onnx_backend.evaluator.kernels` by those kernels, in every graph and body;
2. If, Loop, Scan, SequenceMap and Optional by `onnx_backend.evaluator.control_flow`, so that every node of a body is
   chosen for itself;
3. the ops of `ON_RUNTIME` and `ON_RUNTIME_FOR_SIZE` by ONNX Runtime;
4. every other op by onnx's ReferenceEvaluator.

There is no second try: if the chosen evaluator cannot run a node, that is an error.
"""

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper

from onnx_backend.evaluator.control_flow import CONTROL_FLOW
from onnx_backend.evaluator.kernels import KERNELS
from onnx_backend.evaluator.one_node import Evaluate, by_reference, by_runtime
from onnx_backend.integer.reference.scan import Body
from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import node_label
from onnx_backend.proto.subgraphs import all_nodes, bodies
from qsdk.core.errors import ModelError, QsdkError

Evaluator = Literal["kernels", "control flow", "onnxruntime", "reference"]

#: (op, the opset its version came with) where ReferenceEvaluator fails one of ONNX's own tests of that op that ONNX
#: Runtime passes, or runs an old version as if it were the newest. `benchmarks/backend_tests.py` derives it.
ON_RUNTIME = frozenset(
    {("BatchNormalization", 7), ("BatchNormalization", 9), ("Scan", 8), ("Scatter", 9)}
    | {(op, since) for op in ("Hardmax", "LogSoftmax", "Softmax") for since in (1, 11)}
)

#: Operators that ReferenceEvaluator refuses above a size: its GatherElements takes at most 64 elements along the axis.
ON_RUNTIME_FOR_SIZE = frozenset({"GatherElements"})


@dataclass(frozen=True)
class BoundNode:
    """A node and its evaluator.

    Attributes:
        node: the node.
        evaluator: its name.
        run: a function from all values that the node can see to its named outputs.
    """

    node: NodeProto
    evaluator: Evaluator
    run: Evaluate


class Program:
    """A graph that can be run.

    Attributes:
        steps: its nodes, in order.
        ran: (evaluator, op_type) -> number of runs; shared with the programs of the bodies inside.
    """

    def __init__(self, graph: GraphProto, opsets: Mapping[str, int], ran: Counter[tuple[Evaluator, str]]) -> None:
        self.ran = ran
        self._inputs = [value.name for value in graph.input]
        self._outputs = [value.name for value in graph.output]
        self._stored = {tensor.name: array(tensor) for tensor in graph.initializer}
        self.steps = [_step(node, opsets, ran) for node in graph.node]

    def run(self, fed: Mapping[str, Any], outer: Mapping[str, Any]) -> list[Any]:
        """Return the outputs, in order.

        Args:
            fed: inputs by name.
            outer: values of the surrounding graphs.

        Raises:
            ModelError: a node cannot be run; the message names it.
        """
        values: ChainMap[str, Any] = ChainMap({**self._stored, **fed}, dict(outer))
        for step in self.steps:
            self.ran[step.evaluator, step.node.op_type] += 1
            found = _run(step, values)
            values.update(zip([name for name in step.node.output if name], found, strict=False))
        return [values[name] for name in self._outputs]

    def body(self, declared: GraphProto, outer: Mapping[str, Any]) -> Body:
        """Return the program as the body of a node that sees `outer`."""
        return Body(declared.output, lambda given: self.run(dict(zip(self._inputs, given, strict=True)), outer))


def label(node: NodeProto) -> str:
    """Return the name of a node for messages."""
    return f"{node.op_type} {node_label(node)!r}"


def _run(step: BoundNode, values: Mapping[str, Any]) -> list[Any]:
    try:
        with np.errstate(all="ignore"):  # the ops of ONNX overflow in silence
            return step.run(values)
    except QsdkError:
        raise  # the node of a body that failed is named already
    except Exception as error:  # the evaluators raise exceptions of any type
        where = f"{label(step.node)} (by {step.evaluator})"
        raise ModelError(f"{where}: {error or type(error).__name__}; check the node's inputs and attributes") from error


def _step(node: NodeProto, opsets: Mapping[str, int], ran: Counter[tuple[Evaluator, str]]) -> BoundNode:
    since = _since(node, opsets)
    if node.domain == "":
        if node.op_type in KERNELS:
            return BoundNode(node, "kernels", _by_kernel(node))
        first, control = CONTROL_FLOW.get(node.op_type, (0, None))
        if control is not None and since >= first:
            return BoundNode(node, "control flow", _by_bodies(node, opsets, ran, control))
    for inner in all_nodes(graph_node for _, graph in bodies(node) for graph_node in graph.node):
        if inner.domain == "" and inner.op_type in KERNELS:
            raise ModelError(
                f"{label(node)} has {label(inner)} in its body, which would not be run by the kernels of this backend; "
                "move the quantization out of the body"
            )
    if node.domain == "" and ((node.op_type, since) in ON_RUNTIME or node.op_type in ON_RUNTIME_FOR_SIZE):
        return BoundNode(node, "onnxruntime", by_runtime(node, since))
    return BoundNode(node, "reference", by_reference(node, opsets))


def _since(node: NodeProto, opsets: Mapping[str, int]) -> int:
    """Return the opset that introduced a node's version of its op."""
    if node.domain not in opsets:
        raise ModelError(f"{label(node)} is of the domain {node.domain!r}, which the model does not import; add it")
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    except onnx.defs.SchemaError as error:
        raise ModelError(
            f"{label(node)} of the domain {node.domain or 'ai.onnx'!r}, opset {opsets[node.domain]}, is no op of the "
            "installed onnx; define it as a function in the model, or replace it"
        ) from error
    return int(schema.since_version)


def _decoded(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _inputs(node: NodeProto, values: Mapping[str, Any]) -> list[Any]:
    return [values[name] if name else None for name in node.input]


def _named(node: NodeProto, found: Any) -> list[Any]:
    """Return the outputs that have a name."""
    results: Sequence[Any] = found if isinstance(found, tuple | list) else (found,)
    return [value for name, value in zip(node.output, results, strict=False) if name]


def _by_kernel(node: NodeProto) -> Evaluate:
    kernel, attrs = KERNELS[node.op_type], _decoded(node)
    return lambda values: _named(node, kernel(attrs, *_inputs(node, values)))


def _by_bodies(
    node: NodeProto, opsets: Mapping[str, int], ran: Counter[tuple[Evaluator, str]], control: Callable[..., list[Any]]
) -> Evaluate:
    attrs = _decoded(node)
    programs = {name: (Program(graph, opsets, ran), graph) for name, graph in bodies(node)}

    def evaluate(values: Mapping[str, Any]) -> list[Any]:
        inside = {name: program.body(graph, values) for name, (program, graph) in programs.items()}
        return _named(node, control(attrs, inside, *_inputs(node, values)))

    return evaluate
