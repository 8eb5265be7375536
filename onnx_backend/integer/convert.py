"""From a Q/DQ model to an integer-only one: int32 accumulators, fixed-point requantization, no float tensor inside.

The graph is walked once. A float tensor of the Q/DQ model is only a *value* (`values`): codes with an encoding,
a function of codes, or an accumulator that still has to be requantized. Nodes are written when a QuantizeLinear says
what the codes are (Jacob et al. 2017, section 2, for every op).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, inliner

from onnx_backend.integer.check import integer_findings, require_integer_only
from onnx_backend.integer.context import Context, edge_dtype, label, leave, surroundings
from onnx_backend.integer.emit import Builder
from onnx_backend.integer.expand import expand
from onnx_backend.integer.ops import INTEGER_TYPES, LOWERINGS, copied, stored
from onnx_backend.integer.values import Codes, Failed, FloatInput, Integers, Lookup, Refused, Value
from qsdk.core.errors import ConfigError, IntegerError
from qsdk.core.fixed_point import ROUNDINGS, Rounding
from qsdk.core.report import Report

_QDQ = ("QuantizeLinear", "DequantizeLinear")
_FIRST_OPSET, _WRITTEN_OPSET, _WRITTEN_IR = 13, 21, 10


@dataclass(frozen=True)
class IntegerResult:
    """An integer-only model with the proof of how it was made.

    Attributes:
        model: the integer model.
        certificate: plain values: hashes, edges, one row per requantization.
        report: rows per requantization; summary `float_tensors`, `quantize_nodes`, `max_lsb` (None until measured).
    """

    model: ModelProto
    certificate: dict[str, Any]
    report: Report


@dataclass(frozen=True)
class Refusal:
    """A node that cannot be converted, why, and the remedy."""

    node: str
    op_type: str
    reason: str
    remedy: str


def convert(
    model: ModelProto,
    *,
    target: str = "standard",
    edges: str = "float",
    rounding: Rounding = "half_even",
    requantize: str = "integer",
    allow_float: Sequence[str] = (),
) -> IntegerResult:
    """Convert a Q/DQ model to standard ONNX operators on integers; `model` is left as it is.

    Args:
        model: a model of opset 13 or later whose activations pass QuantizeLinear/DequantizeLinear of at most 8 bits,
            per tensor, and whose weights are integers behind a DequantizeLinear.
        target: `standard`, the only one in this version.
        edges: `float` keeps float inputs and outputs behind one QuantizeLinear/DequantizeLinear each; `integer` takes
            and gives integers, with scale and zero point in the model's metadata.
        rounding: of exact ties in the requantization.
        requantize: `integer`, the only one in this version.
        allow_float: must be empty in this version.

    Raises:
        ConfigError: an option that does not exist in this version.
        IntegerError: listing every node that has no integer form, with its reason and remedy.
    """
    _require_options(target, edges, rounding, requantize, allow_float)
    source = inliner.inline_local_functions(model) if model.functions else model
    opset = max((entry.version for entry in source.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _FIRST_OPSET:
        raise IntegerError(f"the model has opset {opset}; convert it to {_FIRST_OPSET} or later first")
    builder = Builder(_reserved(source), rounding)
    context = surroundings(source, builder, edges)
    values, refusals = _walk(source, context)
    outputs = _leave(source, context, values, refusals)
    if refusals:
        raise IntegerError(_message(refusals))
    integer = _assembled(source, context, outputs, opset)
    require_integer_only(integer, edges=edges)
    certificate = _certificate(model, integer, context, outputs, edges, rounding)
    return IntegerResult(integer, certificate, _report(integer, certificate, edges))


def _require_options(target: str, edges: str, rounding: str, requantize: str, allow_float: Sequence[str]) -> None:
    if target != "standard":
        raise ConfigError(f'target={target!r} does not exist in this version; only target="standard" does')
    if requantize != "integer":
        raise ConfigError(f'requantize={requantize!r} does not exist in this version; only requantize="integer" does')
    if edges not in ("float", "integer"):
        raise ConfigError(f'edges={edges!r} is unknown; choose "float" or "integer"')
    if rounding not in ROUNDINGS:
        raise ConfigError(f"rounding={rounding!r} is unknown; choose one of {', '.join(ROUNDINGS)}")
    if allow_float:
        raise ConfigError("allow_float is not available yet; leave it empty: nodes without integer form are refused")


def _reserved(model: ModelProto) -> list[str]:
    return [info.name for info in (*model.graph.input, *model.graph.output)]


def _walk(model: ModelProto, ctx: Context) -> tuple[dict[str, Value], list[Refusal]]:
    """Give the value of every tensor; nodes behind a refused one are skipped until the next QuantizeLinear."""
    values: dict[str, Value] = {tensor.name: stored(tensor) for tensor in model.graph.initializer}
    refusals: list[Refusal] = []
    for info in model.graph.input:
        if info.name in values:
            continue
        kind = info.type.tensor_type.elem_type
        values[info.name] = Integers(info.name, dtype=kind) if kind in INTEGER_TYPES else FloatInput(info.name)
    makers = {name: label(node) for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        found: Value | tuple[Value, ...] = Failed()
        args = [values.get(name, Failed()) if name else None for name in node.input]
        if not any(isinstance(arg, Failed) for arg in args) or node.op_type == "QuantizeLinear":
            ctx.builder.label, ctx.builder.behind = label(node), makers.get(node.input[0] if node.input else "", "")
            points = [arg.encoding.zero_point for arg in args if isinstance(arg, Lookup) and arg.encoding]
            ctx.builder.facts[label(node)] = {"op_type": node.op_type, "input_zero_points": points}
            try:
                found = _lowered(ctx, node, args)
            except Refused as refused:
                refusals.append(Refusal(label(node), node.op_type, refused.reason, refused.remedy))
        results = found if isinstance(found, tuple) else (found,) * len(node.output)
        values.update(zip(node.output, results, strict=False))
    return values, refusals


def _lowered(ctx: Context, node: NodeProto, args: list[Value | None]) -> Value | tuple[Value, ...]:
    standard = node.domain in ("", "ai.onnx") or (node.domain == "com.microsoft" and node.op_type in _QDQ)
    if not standard:
        raise Refused(f"it is of domain {node.domain!r}", "write it with standard operators")
    lowering = LOWERINGS.get(node.op_type)
    integers = bool(args) and all(arg is None or isinstance(arg, Integers) for arg in args)
    if integers and node.op_type not in ("DequantizeLinear", "QuantizeLinear", "Shape", "Identity"):
        return copied(ctx, node, args)
    if node.op_type == "Cast" and lowering is None:
        raise Refused("it keeps its tensor in a float type", "quantize that site: drop the rule that keeps it float")
    if lowering is None:
        raise Refused("it has no integer form in this version", "replace it, or keep it outside the model")
    return lowering(ctx, node, args)


def _leave(
    model: ModelProto, ctx: Context, values: dict[str, Value], refusals: list[Refusal]
) -> dict[str, Codes | None]:
    outputs: dict[str, Codes | None] = {}
    for info in model.graph.output:
        try:
            outputs[info.name] = leave(ctx, values.get(info.name, Failed()), info.name)
        except Refused as refused:
            refusals.append(Refusal(info.name, "graph output", refused.reason, refused.remedy))
    read = {name for node in model.graph.node if node.op_type != "Shape" for name in node.input} | set(outputs)
    for info in model.graph.input:
        if info.name not in read and ctx.edges == "float":
            continue  # it stays as it is, so that the caller need not change
        value = values[info.name]
        if isinstance(value, FloatInput) and info.name not in ctx.inputs and not refusals:
            refusals.append(
                Refusal(info.name, "graph input", "no QuantizeLinear reads it", "quantize it, or remove it if unused")
            )
    return outputs


def _message(refusals: Sequence[Refusal]) -> str:
    rows = [f"  {r.op_type} {r.node!r}: {r.reason}; {r.remedy}" for r in refusals]
    count = f"{len(refusals)} node{'s' if len(refusals) > 1 else ''}"
    return f"{count} cannot be made integer-only:\n" + "\n".join(rows)


def _assembled(model: ModelProto, ctx: Context, outputs: dict[str, Codes | None], opset: int) -> ModelProto:
    graph = onnx.GraphProto()
    graph.name = f"{model.graph.name or 'model'}.integer"
    stored_names = {tensor.name for tensor in model.graph.initializer}
    metadata: dict[str, str] = {}
    encodings: dict[str, Codes | None] = {name: codes[0] for name, codes in ctx.inputs.items()}
    graph.input.extend(info for info in model.graph.input if info.name not in stored_names)
    graph.output.extend(model.graph.output)
    encodings.update(outputs)
    for kind, infos in (("input", graph.input), ("output", graph.output)):
        for info in infos:
            codes = encodings.get(info.name)
            if ctx.edges == "integer" and codes is not None:
                info.type.tensor_type.elem_type = edge_dtype(codes.encoding)
                scale, point = _edge_encoding(codes)
                metadata[f"qsdk.{kind}.{info.name}.scale"] = repr(scale)
                metadata[f"qsdk.{kind}.{info.name}.zero_point"] = str(point)
    graph.node.extend(expand(ctx.builder, {info.name for info in graph.output}))
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(tensor for tensor in ctx.builder.initializers if tensor.name in used)
    written = max(opset, _WRITTEN_OPSET)
    imports = [helper.make_opsetid("", written)]
    made = helper.make_model(
        graph, opset_imports=imports, ir_version=max(_WRITTEN_IR, helper.find_min_ir_version_for(imports))
    )
    made.producer_name = "qsdk"
    helper.set_model_props(made, metadata)
    return made


def _edge_encoding(codes: Codes) -> tuple[float, int]:
    """Give scale and zero point as the edge's own dtype has them."""
    signed = edge_dtype(codes.encoding) == TensorProto.INT8
    half = (codes.encoding.hi + 1) // 2
    return codes.encoding.scale, codes.encoding.zero_point - (half if signed else 0)


def _certificate(
    source: ModelProto,
    integer: ModelProto,
    ctx: Context,
    outputs: dict[str, Codes | None],
    edges: str,
    rounding: str,
) -> dict[str, Any]:
    edge = {
        "inputs": {name: _edge_row(codes[0]) for name, codes in ctx.inputs.items()},
        "outputs": {name: _edge_row(codes) for name, codes in outputs.items() if codes is not None},
    }
    return {
        "version": 1,
        "target": "standard",
        "requantize": "integer",
        "edges": edges,
        "rounding": rounding,
        "source_sha256": hashlib.sha256(source.SerializeToString(deterministic=True)).hexdigest(),
        "model_sha256": hashlib.sha256(integer.SerializeToString(deterministic=True)).hexdigest(),
        "findings": [finding.reason for finding in integer_findings(integer, edges=edges)],
        **edge,
        "requantizations": ctx.builder.certificate,
    }


def _edge_row(codes: Codes) -> dict[str, Any]:
    scale, zero_point = _edge_encoding(codes)
    dtype = TensorProto.DataType.Name(codes.encoding.dtype).lower()
    return {"tensor": codes.name, "scale": scale, "zero_point": zero_point, "dtype": dtype}


def _report(integer: ModelProto, certificate: dict[str, Any], edges: str) -> Report:
    findings = integer_findings(integer, edges=edges)
    rows = [
        {
            "node": row["node"],
            "op_type": row.get("op_type", ""),
            "form": row["form"],
            "rounding": row["rounding"],
            "accumulator_bound": row.get("accumulator_bound"),
            "channels": len(row["shifts"]) if "shifts" in row else None,
        }
        for row in certificate["requantizations"]
    ]
    summary = {
        "float_tensors": sum(finding.kind == "float tensor" for finding in findings),
        "quantize_nodes": sum(finding.kind == "quantize node" for finding in findings),
        "max_lsb": None,
        "nodes": len(integer.graph.node),
    }
    return Report("Integer-only model", rows, summary)
