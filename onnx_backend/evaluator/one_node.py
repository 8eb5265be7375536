"""Run one node of any op by onnx's ReferenceEvaluator or by ONNX Runtime."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.proto.opsets import LARGEST_OPSET
from onnx_backend.proto.subgraphs import reads
from qsdk.core.errors import ModelError

#: From the values that a node reads, by name, to its outputs; an output without a name is left out.
Evaluate = Callable[[Mapping[str, Any]], list[Any]]


def by_reference(node: NodeProto, opsets: Mapping[str, int]) -> Evaluate:
    """Bind a node to onnx's ReferenceEvaluator, which has an implementation or a function of nearly every op.

    Args:
        node: with a name for every input it needs.
        opsets: domain -> version.
    """

    def made(graph: GraphProto) -> Evaluate:
        evaluator = ReferenceEvaluator(graph, opsets=dict(opsets))
        return lambda values: list(evaluator.run(None, dict(values)))

    return _once_per_type(node, made)


def by_runtime(node: NodeProto, since: int) -> Evaluate:
    """Bind a node of the standard domain to a session of ONNX Runtime of its own.

    The session is stamped with the newest opset that the runtime accepts and in which the op is the same.

    Args:
        node: with a name for every input it needs.
        since: the opset that the node's version of its op came with.
    """
    versions = [helper.make_opsetid("", newest_alike(node.op_type, since))]
    options = ort.SessionOptions()
    options.log_severity_level = 4

    def made(graph: GraphProto) -> Evaluate:
        model = helper.make_model(graph, opset_imports=versions, ir_version=helper.find_min_ir_version_for(versions))
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return lambda values: list(session.run(None, dict(values)))

    return _once_per_type(node, made)


def newest_alike(op_type: str, since: int) -> int:
    """Return the newest opset that the runtime accepts and that still has the version `since` of an op.

    Raises:
        ModelError: the runtime is older than that version of the op.
    """
    for opset in range(LARGEST_OPSET, since - 1, -1):
        if onnx.defs.get_schema(op_type, opset).since_version == since:
            return opset
    raise ModelError(f"{op_type} of opset {since} is newer than the runtime, which knows up to {LARGEST_OPSET}")


def _once_per_type(node: NodeProto, make: Callable[[GraphProto], Evaluate]) -> Evaluate:
    """Make an evaluator of the node when it first meets values of some types, and keep it for those."""
    kept: dict[tuple[bytes, ...], Evaluate] = {}
    names = reads(node)

    def evaluate(values: Mapping[str, Any]) -> list[Any]:
        fed = {name: values[name] for name in names}
        kinds = {name: type_of(value) for name, value in fed.items()}
        key = tuple(kind.SerializeToString(deterministic=True) for kind in kinds.values())
        if key not in kept:
            inputs = [ValueInfoProto(name=name, type=kind) for name, kind in kinds.items()]
            outputs = [ValueInfoProto(name=name) for name in node.output if name]
            kept[key] = make(helper.make_graph([node], "one_node", inputs, outputs))
        return kept[key](fed)

    return evaluate


def type_of(value: Any) -> TypeProto:
    """Return the ONNX type of a value, without its shape; sparse tensors and maps are left untyped.

    An empty sequence, or an optional that holds nothing, is typed as float32.
    """
    if value is None:
        return helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    if isinstance(value, list):
        first = value[0] if value else np.zeros(0, np.float32)
        return helper.make_sequence_type_proto(type_of(first))
    if isinstance(value, np.ndarray | np.generic):
        text = value.dtype.kind in "OUS"
        code = TensorProto.STRING if text else helper.np_dtype_to_tensor_dtype(value.dtype)
        return helper.make_tensor_type_proto(code, None)
    return TypeProto()
