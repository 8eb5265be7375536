"""The float tensors inside the bodies of If, Loop and Scan, which stay float; coverage lists them."""

from collections.abc import Iterable, Iterator

from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper

from onnx_backend.proto.nodes import node_label
from onnx_backend.proto.subgraphs import bodies, captured_tensors, reads
from onnx_backend.proto.weightless import Shape, Types, dtype_name, types_of
from qsdk.core.errors import ModelError
from qsdk.core.planning.plan import Decision

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_CODES = {name: code for name, code in ((dtype_name(code), code) for code in range(1, 24)) if name}


def decisions_in_bodies(model: ModelProto, types: Types) -> tuple[Decision, ...]:
    """Return a decision for every float tensor in a body: it stays float, and in which op.

    Args:
        model: sorted.
        types: of the tensors outside the bodies.
    """
    return tuple(_inside(model, model.graph.node, types, ""))


def read_only_in_bodies(nodes: Iterable[NodeProto]) -> dict[str, str]:
    """Return tensor -> why it stays float, for the tensors that are read only inside bodies."""
    found: dict[str, str] = {}
    direct: set[str] = set()
    for node in nodes:
        direct.update(node.input)
        for name in captured_tensors(node):
            found.setdefault(name, float_reason(node.op_type, node_label(node)))
    return {name: where for name, where in found.items() if name not in direct}


def float_reason(op_type: str, owner: str) -> str:
    """Return the reason why tensors in the bodies of an op stay float, with the remedy where there is one."""
    remedy = "; where an input decides it, fix that: quantize(..., inputs={name: value})" if op_type == "If" else ""
    return f"{op_type} {owner!r}: bodies of control flow stay float{remedy}"


def _inside(model: ModelProto, nodes: Iterable[NodeProto], types: Types, prefix: str) -> Iterator[Decision]:
    for node in nodes:
        for branch, graph in bodies(node):
            where = f"{prefix}{node_label(node)}/{branch}"
            reason = f"inside the {branch} of the {float_reason(node.op_type, node_label(node))}"
            known = {**types, **_types_inside(model, graph, types)}
            for tensor in graph.initializer:
                if dtype_name(tensor.data_type) in _FLOATS:
                    facts = dtype_name(tensor.data_type), tuple(tensor.dims)
                    yield _decision(f"{where}/{tensor.name}", "Constant", reason, *facts)
            for inner in graph.node:
                for name in inner.output:
                    dtype, shape = known.get(name, ("", None))
                    if not dtype:  # an op without inference: better named than forgotten
                        read = (known.get(source, ("", None))[0] for source in reads(inner))
                        dtype = next((kind for kind in read if kind in _FLOATS), "")
                    if name and dtype in _FLOATS:
                        yield _decision(f"{where}/{name}", inner.op_type, reason, dtype, shape)
            yield from _inside(model, graph.node, known, f"{where}/")


def _decision(name: str, op_type: str, reason: str, dtype: str, shape: Shape | None) -> Decision:
    return Decision(f"({name})", op_type, "activation", None, reason, shape=shape, tensor_type=dtype)


def _types_inside(model: ModelProto, graph: GraphProto, types: Types) -> Types:
    """Return the inferred types of a body's tensors, its outer ones taken as inputs."""
    body = ModelProto(ir_version=model.ir_version)
    body.opset_import.extend(model.opset_import)
    body.graph.CopyFrom(graph)
    body.graph.name = body.graph.name or "body"
    own = {value.name for value in (*graph.input, *graph.initializer)}
    own.update(name for node in graph.node for name in node.output)
    for name in dict.fromkeys(name for node in graph.node for name in reads(node)):
        if name not in own and name in types:
            dtype, shape = types[name]
            if dtype in _CODES:
                body.graph.input.append(helper.make_tensor_value_info(name, _CODES[dtype], shape))
            else:
                body.graph.input.append(helper.make_value_info(name, TypeProto()))
    try:
        return types_of(body)
    except ModelError:
        return {}
