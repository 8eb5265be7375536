"""Open a float ONNX model: everything between a user's file and the graph that planning reads."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.opening.read_graph import inline_functions, read_graph
from onnx_backend.passes.canonicalize import canonicalize
from onnx_backend.passes.convert_opset import raise_opset, require_known_opset
from onnx_backend.passes.fold_batch_norm import Folds, fold_batch_norms
from onnx_backend.passes.simplify import simplify
from onnx_backend.proto.external_data import array, bytes_of, require_no_external_data
from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.inputs import note_example
from onnx_backend.proto.model_io import load, source_name
from onnx_backend.proto.nodes import lift_constants, node_label, retain
from onnx_backend.proto.subgraphs import all_nodes, bodies, captured_tensors, reads
from onnx_backend.proto.weightless import Shape, Types, dtype_name, skeleton, types_of
from onnx_backend.qdq.read import require_written
from onnx_backend.runtime.compare_runs import float_session, unloadable_message
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds
from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError, FileFormatError, ModelError, QsdkError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Decision, Plan

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_CODES = {name: code for name, code in ((dtype_name(code), code) for code in range(1, 24)) if name}


def decisions_in_bodies(model: ModelProto, types: Types) -> tuple[Decision, ...]:
    """Return a decision for every float tensor in a body: it stays float, and in which op."""
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


def with_fixed_inputs(model: ModelProto, values: Mapping[str, Any]) -> ModelProto:
    """Store values in place of inputs, in the given model; return it.

    An If whose condition follows from such a value is later replaced by the branch that is taken. A value is a number,
    a list or an array that the input's declared dtype and shape take.
    """
    declared = {value.name: value for value in model.graph.input if value.name in set(input_names(model.graph))}
    for name, value in values.items():
        if name not in declared:
            raise ConfigError(f"inputs= fixes {name!r}, which is no input; the model's are {', '.join(declared)}")
        model.graph.initializer.append(numpy_helper.from_array(_stored(declared[name], value), name))
    if values and len(values) == len(declared):
        raise ConfigError("inputs= fixes every input of the model, so it would compute one constant; leave one open")
    retain(model.graph.input, lambda value: value.name not in values)
    return model


def _stored(declared: ValueInfoProto, given: Any) -> np.ndarray[Any, Any]:
    """Return a value in the dtype and shape of its input; one number may stand for an array of one element."""
    tensor, name = declared.type.tensor_type, declared.name
    try:
        value = np.asarray(given)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        found = value.astype(dtype)
        exact = value.dtype.kind in "biuf" and (dtype.kind == "f" or bool(np.all(found == value)))
    except (KeyError, TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        kind = dtype_name(tensor.elem_type) or "no tensor of numbers"
        raise ConfigError(f"inputs= fixes {name!r} to {given!r}, and that input is {kind}; give a value it can hold")
    if not tensor.HasField("shape"):
        return found
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    if found.ndim == 0 and all(size in (1, None) for size in sizes):
        found = found.reshape([1] * len(sizes))
    fits = found.ndim == len(sizes) and all(s in (n, None) for s, n in zip(sizes, found.shape, strict=True))
    if not fits:
        shown = ", ".join("?" if size is None else str(size) for size in sizes)
        raise ConfigError(f"inputs= fixes {name!r} to an array of shape {list(found.shape)}, it takes [{shown}]")
    return found


Source = str | os.PathLike[str] | bytes | ModelProto
_QUANTIZED_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger"}) | {
    "MatMulInteger",
    "DynamicQuantizeLinear",
}


class QuantizedAlreadyError(ModelError):
    """The model holds quantized ops."""


@dataclass(frozen=True)
class Notes:
    """The changes that opening made to a model, and why some of its tensors cannot be quantized.

    Attributes:
        folded: owners of the BatchNorms that were folded into a layer.
        unfolded: owner of a BatchNorm that stays -> why.
        reasons: name of a tensor without a site -> why.
        inside: the float tensors in the bodies of control flow.
        remarks: on conversions, in sentences.
        norms: owner of a layer -> mean and deviation that the BatchNorm folded into it declared.
        gone: site or tensor that folding has left out -> the site that it is in now.
    """

    folded: tuple[str, ...] = ()
    unfolded: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    inside: tuple[Decision, ...] = ()
    remarks: tuple[str, ...] = ()
    norms: Mapping[str, FoldedNorm] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return facts for the coverage report: folded BatchNorms, reasons for the others, and the remarks."""
        kept = {f"{owner} (BatchNorm) not folded": reason for owner, reason in self.unfolded.items()}
        opened = {"opened": "; ".join(self.remarks)} if self.remarks else {}
        return {"folded": len(self.folded), **kept, **opened}


@dataclass(frozen=True)
class OpenedFloat:
    """A float model that is ready to be marked: its own copy, the graph read from it, its plan, and notes."""

    model: ModelProto
    graph: Graph
    plan: Plan
    notes: Notes


def open_float(
    source: Source, config: QuantConfig, example: Any = None, *, fold_batch_norm: bool = True
) -> OpenedFloat:
    """Open, put in order, raise, simplify, fold, read and plan a float ONNX model; inputs and outputs keep their names.

    Args:
        source: a path (with external data beside it), bytes or a model, which is not changed.
        config: the dtypes and granularities wanted, by rule.
        example: inputs on which a raised model is compared with the original; None for random ones.
        fold_batch_norm: fold every BatchNormalization next to a linear layer that no rule names.
    """
    return open_loaded(load(source), source_name(source), config, example, fold_batch_norm=fold_batch_norm)


def open_loaded(
    model: ModelProto, where: str, config: QuantConfig, example: Any = None, *, fold_batch_norm: bool = True
) -> OpenedFloat:
    """Open a model, as `open_float` does, that was loaded for this: it is changed, unless it is quantized already."""
    model, graph, notes = open_unplanned(model, where, config, example, fold_batch_norm=fold_batch_norm)
    plan = make_plan(graph, config, extra_owners=(*notes.folded, *notes.unfolded))
    require_written(plan.decisions.values())
    return OpenedFloat(model, graph, with_reasons_of_file(plan, notes), notes)


def open_unplanned(
    model: ModelProto, where: str, config: QuantConfig, example: Any = None, *, fold_batch_norm: bool = True
) -> tuple[ModelProto, Graph, Notes]:
    """Open a model as `open_loaded` does, without a plan; the config only names the BatchNorms that stay."""
    try:
        return _opened(model, where, config, example, fold_batch_norm)
    except QsdkError:
        raise
    except Exception:  # a broken file fails anywhere, with any type: the runtime's message names the cause
        _require_loadable(model, where)
        raise


def _opened(
    model: ModelProto, where: str, config: QuantConfig, example: Any, fold_batch_norm: bool
) -> tuple[ModelProto, Graph, Notes]:
    require_no_external_data(model)
    require_known_opset(model)
    model = inline_functions(model)
    _require_float(model)
    _require_whole(model)
    lift_constants(model)
    canonicalize(model)
    _require_loadable(model, where)  # first of all: onnx's own tools crash on damaged nodes
    feeds = _feeds(model, example)
    model, remarks = raise_opset(model, feeds)
    note_example(model, feeds)
    model = simplify(model, types_of(model, trust_declared=False))
    types = types_of(model, trust_declared=False)
    folds = fold_batch_norms(model, types, config) if fold_batch_norm else Folds()
    if folds.folded or folds.added:
        types = types_of(model, trust_declared=False)
    _forget_shapes(model)
    _declare_outputs(model, types)
    graph = read_graph(model, types, modules=True)
    inside = decisions_in_bodies(model, types)
    if folds.added:
        shown = ", ".join(folds.added[:6]) + (", ..." if len(folds.added) > 6 else "")
        remarks = (*remarks, f"constants that {len(folds.added)} Adds add to layers are their biases: {shown}")
    notes = Notes(folds.folded, folds.unfolded, _reasons(model, graph), inside, remarks, folds.norms, folds.gone)
    return model, graph, notes


def with_reasons_of_file(plan: Plan, notes: Notes) -> Plan:
    """Return the plan with the reasons that only the file knows, and with the tensors inside bodies."""
    reasons = {f"({name})": reason for name, reason in notes.reasons.items()}

    def with_reason(decision: Decision) -> Decision:
        return replace(decision, reason=reasons[decision.site]) if decision.site in reasons else decision

    return replace(plan, inside=(*(with_reason(decision) for decision in plan.inside), *notes.inside))


def _reasons(model: ModelProto, graph: Graph) -> dict[str, str]:
    """Return why tensors have no site although they are float."""
    bodies_read = read_only_in_bodies(model.graph.node)
    unsited = (tensor for tensor in graph.tensors if tensor.site is None and tensor.is_float and tensor.constant)
    return {t.name: f"read only inside the {bodies_read[t.name]}" for t in unsited if t.name in bodies_read}


def _feeds(model: ModelProto, example: Any) -> Mapping[str, npt.NDArray[Any]] | None:
    if example is None:
        return None
    return as_feeds(example, [DeclaredInput(value) for value in model.graph.input], "the example")


def _require_float(model: ModelProto) -> None:
    for node in all_nodes(model.graph.node):
        if node.op_type in _QUANTIZED_OPS:
            raise QuantizedAlreadyError(
                f"the model is quantized already (node {node_label(node)!r} is {node.op_type}); pass config=None to "
                "adopt its encodings, or quantize the float model it came from"
            )


def _require_whole(model: ModelProto) -> None:
    """Refuse a stored tensor with fewer values than its shape needs."""
    for tensor in model.graph.initializer:
        if any(dim < 0 for dim in tensor.dims):
            raise FileFormatError(f"the stored tensor {tensor.name!r} has a negative size; the file is damaged")
        try:
            if tensor.HasField("raw_data"):
                wanted = bytes_of(tensor.data_type, tensor.dims)
                if len(tensor.raw_data) != wanted:
                    raise ValueError(f"{len(tensor.raw_data)} bytes where its shape {list(tensor.dims)} needs {wanted}")
            else:
                array(tensor)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise FileFormatError(
                f"the stored tensor {tensor.name!r} cannot be read ({error}); the file is damaged, export it again"
            ) from error


def _require_loadable(model: ModelProto, where: str) -> None:
    """Refuse a model that the runtime refuses, without loading its large weights."""
    try:
        float_session(skeleton(model))
    except Exception as error:  # the runtime's own exception types are private
        raise FileFormatError(unloadable_message(where, error)) from error


def _declare_outputs(model: ModelProto, types: Types) -> None:
    """Declare the inferred shape of outputs that have none: a checked file needs it."""
    for value in model.graph.output:
        shape = types.get(value.name, ("", None))[1]
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and not tensor.HasField("shape") and shape is not None:
            declared = helper.make_tensor_type_proto(tensor.elem_type, shape)
            tensor.shape.CopyFrom(declared.tensor_type.shape)


def _forget_shapes(model: ModelProto) -> None:
    """Remove declared shapes of inner tensors, which may be wrong, except where nothing else states their type."""
    foreign = {name for node in model.graph.node if node.domain not in ("", "ai.onnx") for name in node.output}
    retain(model.graph.value_info, lambda value: value.name in foreign)
