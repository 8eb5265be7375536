"""From a Q/DQ model to an integer-only one: int32 accumulators, fixed-point requantization, no float tensor inside.

The graph is walked once. A float tensor of the Q/DQ model is only a *value* (`values`): codes with an encoding,
a function of codes, or an accumulator that still has to be requantized. Nodes are written when a QuantizeLinear says
what the codes are (Jacob et al. 2017, section 2, for every op).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, inliner

from onnx_backend.fold_constants import fold
from onnx_backend.integer.check import integer_findings, require_integer_only
from onnx_backend.integer.context import Context, label, surroundings
from onnx_backend.integer.edges import edge_dtype, leave
from onnx_backend.integer.emit import Builder
from onnx_backend.integer.expand import expand
from onnx_backend.integer.lowerings import LOWERINGS, copied
from onnx_backend.integer.ops import INTEGER_TYPES, stored
from onnx_backend.integer.runtime import CONTRIB, Kernels
from onnx_backend.integer.values import Array, Codes, Constant, Failed, FloatInput, Integers, Lookup, Refused, Value
from qsdk.core.errors import ConfigError, IntegerError
from qsdk.core.fixed_point import ROUNDINGS, Rounding
from qsdk.core.report import Report

_QDQ = ("QuantizeLinear", "DequantizeLinear")
_LARGEST_FOLDED = 1 << 22  # elements of a constant that is computed at conversion time
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
    weights: str = "unsigned",
    allow_float: Sequence[str] = (),
) -> IntegerResult:
    """Convert a Q/DQ model to one that computes on integers; `model` is left as it is.

    Args:
        model: a model of opset 13 or later whose activations pass QuantizeLinear/DequantizeLinear of at most 8 bits,
            per tensor, and whose weights are integers behind a DequantizeLinear.
        target: `standard` writes standard ONNX operators, `onnxruntime` the quantized kernels of that runtime too.
        edges: `float` keeps float inputs and outputs behind one QuantizeLinear/DequantizeLinear each; `integer` takes
            and gives integers, with scale and zero point in the model's metadata.
        rounding: of exact ties in the requantization; `gemmlowp` rounds twice. Kernels round ties to even.
        requantize: `integer` on integers alone, `qlinear` with QLinearConv and QLinearMatMul, whose scales are float
            constants, wherever they fit. The target `onnxruntime` uses those in any case.
        weights: of kernels. `unsigned` is exact on every processor; `signed` is faster, but on x86 processors without
            VNNI the kernels for uint8 x int8 saturate sums of two products.
        allow_float: must be empty in this version.

    Raises:
        ConfigError: an option that does not exist in this version.
        IntegerError: listing every node that has no integer form, with its reason and remedy.
    """
    _require_options(target, edges, rounding, requantize, weights, allow_float)
    kernels = "onnxruntime" if target == "onnxruntime" else "qlinear" if requantize == "qlinear" else ""
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
    used = Kernels(contrib=kernels == "onnxruntime", signed=weights == "signed") if kernels else None
    integer = _assembled(source, context, outputs, opset, used)
    require_integer_only(integer, edges=edges, kernels=kernels)
    options = {"target": target, "requantize": requantize, "edges": edges, "rounding": rounding}
    certificate = _certificate(model, integer, context, outputs, options)
    return IntegerResult(integer, certificate, _report(integer, certificate, edges, kernels))


def _require_options(
    target: str, edges: str, rounding: str, requantize: str, weights: str, allow_float: Sequence[str]
) -> None:
    if target not in ("standard", "onnxruntime"):
        raise ConfigError(f'target={target!r} is unknown; choose "standard" or "onnxruntime"')
    if requantize not in ("integer", "qlinear"):
        raise ConfigError(f'requantize={requantize!r} is unknown; choose "integer" or "qlinear"')
    if weights not in ("unsigned", "signed"):
        raise ConfigError(f'weights={weights!r} is unknown; choose "unsigned" or "signed"')
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
    folded = _folded(ctx, node, args)
    if folded is not None:
        return folded
    lowering = LOWERINGS.get(node.op_type)
    integers = bool(args) and all(arg is None or isinstance(arg, Integers) for arg in args)
    if integers and node.op_type not in ("DequantizeLinear", "QuantizeLinear", "Shape", "Identity"):
        return copied(ctx, node, args)
    if node.op_type == "Cast" and lowering is None:
        raise Refused("it keeps its tensor in a float type", "quantize that site: drop the rule that keeps it float")
    if lowering is None:
        raise Refused("it has no integer form in this version", "replace it, or keep it outside the model")
    return lowering(ctx, node, args)


def _folded(ctx: Context, node: NodeProto, args: list[Value | None]) -> tuple[Value, ...] | None:
    """Compute a node on plain constants (shape arithmetic, anchor grids) at conversion time; None if it is not one."""
    known = {
        name: arg.values if isinstance(arg, Constant) else arg.array
        for name, arg in zip(node.input, args, strict=True)
        if (isinstance(arg, Constant) and arg.coded is None) or (isinstance(arg, Integers) and arg.array is not None)
    }
    small = {name: array for name, array in known.items() if array is not None}
    found = fold(node, small, {"": ctx.opset}, weights_stay=False, limit=_LARGEST_FOLDED)
    if found is None:
        return None
    return tuple(_plain(found[name]) if name else Failed() for name in node.output)


def _plain(array: Array) -> Value:
    if array.dtype.kind == "f":
        return Constant(array.astype(np.float32))
    return Integers("", array, helper.np_dtype_to_tensor_dtype(array.dtype))


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


def _assembled(
    model: ModelProto, ctx: Context, outputs: dict[str, Codes | None], opset: int, kernels: Kernels | None
) -> ModelProto:
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
    graph.node.extend(expand(ctx.builder, {info.name for info in graph.output}, kernels))
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(tensor for tensor in ctx.builder.initializers if tensor.name in used)
    written = max(opset, _WRITTEN_OPSET)
    imports = [helper.make_opsetid("", written)]
    foreign = [name for node in graph.node if node.domain for name in node.output]
    if foreign:
        imports.append(helper.make_opsetid(CONTRIB, 1))
        # the checker does not know what these make: codes, all of them
        graph.value_info.extend(helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in foreign)
    made = helper.make_model(
        graph, opset_imports=imports, ir_version=max(_WRITTEN_IR, helper.find_min_ir_version_for(imports[:1]))
    )
    made.producer_name = "qsdk"
    helper.set_model_props(made, metadata)
    return made


def _edge_encoding(codes: Codes) -> tuple[float, int]:
    """Give scale and zero point as the edge's own dtype has them."""
    signed = edge_dtype(codes.encoding) in (TensorProto.INT8, TensorProto.INT16)
    half = (codes.encoding.hi + 1) // 2
    return codes.encoding.scale, codes.encoding.zero_point - (half if signed else 0)


def _certificate(
    source: ModelProto, integer: ModelProto, ctx: Context, outputs: dict[str, Codes | None], options: dict[str, str]
) -> dict[str, Any]:
    edge = {
        "inputs": {name: _edge_row(codes[0]) for name, codes in ctx.inputs.items()},
        "outputs": {name: _edge_row(codes) for name, codes in outputs.items() if codes is not None},
    }
    return {
        "version": 1,
        **options,
        "source_sha256": hashlib.sha256(source.SerializeToString(deterministic=True)).hexdigest(),
        "model_sha256": hashlib.sha256(integer.SerializeToString(deterministic=True)).hexdigest(),
        **edge,
        "requantizations": ctx.builder.certificate,
    }


def _edge_row(codes: Codes) -> dict[str, Any]:
    scale, zero_point = _edge_encoding(codes)
    dtype = TensorProto.DataType.Name(codes.encoding.dtype).lower()
    return {"tensor": codes.name, "scale": scale, "zero_point": zero_point, "dtype": dtype}


def _report(integer: ModelProto, certificate: dict[str, Any], edges: str, kernels: str) -> Report:
    findings = integer_findings(integer, edges=edges, kernels=kernels)
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
