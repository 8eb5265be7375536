"""Convert a Q/DQ model to integers only: int32 accumulators, fixed-point requantization, no float tensor inside.

The graph is walked once. A float tensor of the Q/DQ model is only a *value* (`values`): codes with an encoding,
a function of codes, or an accumulator that still has to be requantized. Nodes are written when a QuantizeLinear
states the encoding of the codes (Jacob et al. 2017, section 2, for every op).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, inliner, numpy_helper

from onnx_backend.integer.codegen.expand import expand, live
from onnx_backend.integer.codegen.runtime import CONTRIB, KernelChoice
from onnx_backend.integer.exact_products import products_saturate
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext, label, lowering_context
from onnx_backend.integer.ir.operations import Operation
from onnx_backend.integer.ir.values import Codes, Failed, FloatInput, Refused, Value
from onnx_backend.integer.lowering.quantizers import edge_dtype, leave
from onnx_backend.integer.lowering.walk import QDQ, Islands, Refusal, origin, origins, sites_in_front, walk
from onnx_backend.integer.portable.handlers import HANDLERS
from onnx_backend.integer.portable.rewrite import evaluable, proven_bounds, rewritten
from onnx_backend.integer.verify.integer_only import integer_findings, require_integer_only
from onnx_backend.proto.companion import ENCODINGS_KEY
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.inputs import static_sizes
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import inferred_skeleton, skeleton
from qsdk.core.errors import ConfigError, IntegerError
from qsdk.core.numerics.fixed_point import ROUNDINGS, Rounding
from qsdk.core.report import Report

_STILL_FLOAT = (
    "is a float tensor",
    "leaves the model unquantized",
    "no QuantizeLinear reads it",
    "its weight is float",
    "is not quantized",
)
_QUANTIZE_THE_REST = (
    "what the file leaves float, qsdk quantizes: sim = qsdk.quantize(model, None, qsdk.w8a8()), then "
    "qsdk.calibrate(sim, data) and qsdk.export(sim, path); in the shell, qsdk quantize MODEL OUT --data PATH"
)
_LEFT_FLOAT = (
    "qsdk has left tensors of this file float, for the reasons that print(sim.coverage()) gives: change what they "
    "name, compute these nodes outside of the model, or keep them float{target}: allow_float={nodes}"
)
_COLUMNS = ("node", "site", "op_type", "form", "rounding", "accumulator_bound", "channels")
_FIRST_OPSET, _WRITTEN_OPSET, _WRITTEN_IR = 13, 21, 10


@dataclass(frozen=True)
class IntegerResult:
    """An integer-only model with the proof of its conversion."""

    model: ModelProto  # the integer model
    certificate: dict[str, Any]  # plain values: hashes, edges, one row per requantization
    # rows per requantization; summary `float_tensors`, `quantize_nodes`, `max_lsb` (None until measured)
    report: Report
    # name of every QuantizeLinear's output in the Q/DQ model -> its codes; not all of them are in `model`
    sites: Mapping[str, Codes]
    # the recorded operations that are read, in order, before the target wrote them as nodes
    operations: tuple[Operation, ...] = ()
    constants: tuple[TensorProto, ...] = ()  # the constants that the operations read
    # name of a node or tensor of the Q/DQ model -> op type and name of the node that the user knows it by
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # the smallest and the largest value of tensors of `model`, as far as the lowering has proven them
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def integers(self) -> bool:
        """Return True if the model computes on integers alone: no kernels with float scales, no float islands."""
        return self.certificate["target"] != "onnxruntime" and not self.certificate["float_nodes"]


def convert(
    model: ModelProto,
    *,
    target: str = "standard",
    edges: str = "float",
    rounding: Rounding = "half_even",
    allow_float: Sequence[str] = (),
) -> IntegerResult:
    """Convert a Q/DQ model to one that computes on integers; `model` is left as it is.

    Args:
        model: a model of opset 13 or later whose activations pass QuantizeLinear/DequantizeLinear of at most 8 bits,
            per tensor, and whose weights are integers behind a DequantizeLinear.
        target: `standard` writes standard ONNX operators; `onnxruntime` the quantized kernels of that runtime too,
            with weights of int8 if those are exact on this processor, else of uint8 (the certificate records it);
            `portable` the integers of `standard` in operators and ranges that every runtime computes exactly.
        edges: `float` keeps float inputs and outputs behind one QuantizeLinear/DequantizeLinear each; `integer` takes
            and gives integers, with scale and zero point in the model's metadata.
        rounding: of exact ties in the requantization; `gemmlowp` rounds twice. Kernels round ties to even.
        allow_float: shell globs over names and op types of nodes that may stay float, between Q/DQ nodes of their own.
    """
    _require_options(target, edges, rounding, allow_float)
    used = KernelChoice(signed=not products_saturate()) if target == "onnxruntime" else None
    source = inliner.inline_local_functions(model) if model.functions else model
    opset = _opset(source)
    reserved = [info.name for info in (*source.graph.input, *source.graph.output)]
    context = lowering_context(source, reserved, rounding, edges, composes=used is None)
    islands = Islands(allow_float)
    values, refusals = walk(source, context, islands)
    outputs = _leave(source, context, values, refusals)
    if refusals:
        raise IntegerError(_message(refusals, source, target))
    islands.require_used([label(node) for node in source.graph.node if node.op_type not in ("Constant", *QDQ)])
    operations = tuple(live(context.nodes, {info.name for info in source.graph.output}))
    bounds = proven_bounds(context)
    integer = _assembled(source, context, outputs, opset, used, target, bounds)
    require_integer_only(integer, edges=edges, kernels=used is not None, islands=context.floats)
    options = {"target": target, "edges": edges, "rounding": rounding}
    if used is not None:
        options["weights"] = "signed" if used.signed else "unsigned"
    certificate = {**_certificate(model, integer, context, outputs, options), "float_nodes": islands.kept}
    report, constants = _report(integer, certificate, edges), tuple(context.initializers)
    known = origins(source.graph.node)
    return IntegerResult(integer, certificate, report, context.sites, operations, constants, known, bounds)


def _opset(model: ModelProto) -> int:
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _FIRST_OPSET:
        raise IntegerError(f"the model has opset {opset}; convert it to {_FIRST_OPSET} or later first")
    return opset


def _require_options(target: str, edges: str, rounding: str, allow_float: Sequence[str]) -> None:
    if target not in ("standard", "onnxruntime", "portable"):
        raise ConfigError(f'target={target!r} is unknown; choose "standard", "onnxruntime" or "portable"')
    if target == "portable" and allow_float:
        raise ConfigError(
            'runtimes differ in what they compute in float: target="portable" takes no allow_float; quantize '
            + ", ".join(allow_float)
        )
    if edges not in ("float", "integer"):
        raise ConfigError(f'edges={edges!r} is unknown; choose "float" or "integer"')
    if rounding not in ROUNDINGS:
        raise ConfigError(f"rounding={rounding!r} is unknown; choose one of {', '.join(ROUNDINGS)}")


def _leave(
    model: ModelProto, ctx: LoweringContext, values: dict[str, Value], refusals: list[Refusal]
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
            continue  # it stays as it is, so that callers need not change
        value = values[info.name]
        raw = info.name in ctx.floats
        if isinstance(value, FloatInput) and info.name not in ctx.inputs and not raw and not refusals:
            refusals.append(
                Refusal(info.name, "graph input", "no QuantizeLinear reads it", "quantize it, or remove it if unused")
            )
    return outputs


def _message(refusals: Sequence[Refusal], source: ModelProto, target: str) -> str:
    of_qsdk = ENCODINGS_KEY in metadata(source)
    sites = sites_in_front(source.graph.node) if of_qsdk else {}
    rows = []
    for r in refusals:
        site = sites.get(r.node, r.node)
        where = "" if site.startswith(r.node) else f" (in front of the site {site})"
        rows.append(f"  {r.op_type} {r.node!r}: {r.reason}{where}; {r.remedy}")
    count = f"{len(refusals)} node{'s' if len(refusals) > 1 else ''}"
    hint = ""
    if any(r.reason.endswith(_STILL_FLOAT) for r in refusals):
        hint = "\n" + _QUANTIZE_THE_REST
        if of_qsdk:
            elsewhere = ' with target="standard"' if target == "portable" else ""
            hint = "\n" + _LEFT_FLOAT.format(target=elsewhere, nodes=_float_run(refusals, source))
    return f"{count} cannot be made integer-only:\n" + "\n".join(rows) + hint


def _float_run(refusals: Sequence[Refusal], source: ModelProto) -> list[str]:
    """Return the refused nodes, and the nodes that read their floats or make the floats that leave the model."""
    refused, found = {r.node for r in refusals}, list[str]()
    floats = {r.node for r in refusals if r.op_type.startswith("graph ")}
    for node in source.graph.node:
        if label(node) in refused or (floats.intersection(reads(node)) and node.op_type != "QuantizeLinear"):
            floats.update(node.output)
            found.append(label(node))
    makers = producers(source.graph.node)
    ends = [makers[r.node] for r in refusals if r.op_type == "graph output" and r.node in makers]
    while ends:
        node = ends.pop()
        if node.op_type not in ("DequantizeLinear", "Constant") and label(node) not in found:
            found.append(label(node))
            ends += [makers[name] for name in node.input if name in makers]
    return found


def _assembled(
    model: ModelProto,
    ctx: LoweringContext,
    outputs: dict[str, Codes | None],
    opset: int,
    kernels: KernelChoice | None,
    target: str,
    bounds: Mapping[str, tuple[int, int]],
) -> ModelProto:
    portable = target == "portable"
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
                kept = TensorProto.DataType.Name(codes.encoding.dtype).lower()
                metadata[f"qsdk.{kind}.{info.name}.dtype"] = kept
                metadata[f"qsdk.{kind}.{info.name}.scale"] = repr(scale)
                metadata[f"qsdk.{kind}.{info.name}.zero_point"] = str(point)
    ctx.code_shapes = {codes.name: ctx.shapes[site] for site, codes in ctx.sites.items() if site in ctx.shapes}
    exact: set[str] = set()
    results = {info.name for info in graph.output}
    graph.node.extend(expand(ctx, results, kernels, portable=exact if portable else None))
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(tensor for tensor in ctx.initializers if tensor.name in used)
    written = max(opset, _WRITTEN_OPSET)
    imports = [helper.make_opsetid("", written)]
    foreign = [name for node in graph.node if node.domain for name in node.output]
    if foreign:
        imports.append(helper.make_opsetid(CONTRIB, 1))
        # the checker does not know the results of these operators: all of them are codes
        graph.value_info.extend(helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in foreign)
    assembled = helper.make_model(
        graph, opset_imports=imports, ir_version=max(_WRITTEN_IR, helper.find_min_ir_version_for(imports[:1]))
    )
    assembled.producer_name = "qsdk"
    helper.set_model_props(assembled, metadata)
    if kernels is not None:
        with_equal_ranks(assembled, ctx.code_shapes)
    if portable:
        _rewrite(assembled, ctx, exact, bounds, model)
    return assembled


def _rewrite(
    model: ModelProto, b: Builder, exact: set[str], bounds: Mapping[str, tuple[int, int]], source: ModelProto
) -> None:
    """Rewrite a model in operators and ranges that every runtime computes exactly."""
    refused = rewritten(model, b, exact, bounds, HANDLERS)
    if refused:
        known = origins(source.graph.node)
        rows = [(origin(node, known) or (op, node), r) for node, op, r in refused]
        found = dict.fromkeys(Refusal(node, op, r.reason, r.remedy) for (op, node), r in rows)
        raise IntegerError(_message(list(found), source, "portable"))
    nodes = live(evaluable(b), {info.name for info in model.graph.output})
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(node for node in nodes if isinstance(node, onnx.NodeProto))
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(tensor for tensor in b.initializers if tensor.name in used)


def _edge_encoding(codes: Codes) -> tuple[float, int]:
    """Return scale and zero point in the edge's own dtype."""
    signed = edge_dtype(codes.encoding) in (TensorProto.INT8, TensorProto.INT16)
    half = (codes.encoding.hi + 1) // 2
    return codes.encoding.scale, codes.encoding.zero_point - (half if signed else 0)


def _certificate(
    source: ModelProto,
    integer: ModelProto,
    ctx: LoweringContext,
    outputs: dict[str, Codes | None],
    options: dict[str, str],
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
        "assumed": sorted(set(ctx.assumed)),
        "undefined": dict(ctx.undefined),
        "requantizations": ctx.certificate,
    }


def _edge_row(codes: Codes) -> dict[str, Any]:
    scale, zero_point = _edge_encoding(codes)
    dtype = TensorProto.DataType.Name(codes.encoding.dtype).lower()
    return {"tensor": codes.name, "scale": scale, "zero_point": zero_point, "dtype": dtype}


def _report(integer: ModelProto, certificate: dict[str, Any], edges: str) -> Report:
    findings = integer_findings(integer, edges=edges, kernels=certificate["target"] == "onnxruntime")
    rows = [
        {
            "node": row["node"],
            "site": row["quantize_node"],
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
        "float_nodes": len(certificate["float_nodes"]),
        "nodes": len(integer.graph.node),
        **{f"{node} leaves the standard": what for node, what in certificate["undefined"].items()},
    }
    rows += [{**dict.fromkeys(_COLUMNS), "node": name, "form": "float"} for name in certificate["float_nodes"]]
    return Report("Integer-only model", rows, summary)


# --- stored numbers of the rank of what they meet ---------------------------------------------------------------------


_ELEMENTWISE = frozenset({"Add", "BitShift", "BitwiseAnd", "Div", "Equal", "Mul", "Sub"})


def with_equal_ranks(model: ModelProto, known: Mapping[str, Sequence[int | None]]) -> None:
    """Replace single stored numbers beside tensors whose last axis has one element, in place.

    ONNX Runtime broadcasts them ten times as fast: between such a tensor and a number without axes, its kernels go
    element by element.

    Args:
        model: an integer model.
        known: sizes of tensors that shape inference does not find, behind kernels of the runtime.
    """
    single = {t.name: t for t in model.graph.initializer if not t.dims}
    places = [
        (node, i)
        for node in model.graph.node
        if node.op_type in _ELEMENTWISE and not node.domain and len(node.input) == 2
        for i in (0, 1)
        if node.input[i] in single and node.input[1 - i] not in single
    ]
    if not places:
        return
    sizes = _sizes(model, known)
    made: dict[tuple[str, int], str] = {}
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    for node, i in places:
        other = sizes.get(node.input[1 - i], ())
        if len(other) < 2 or other[-1] != 1:
            continue
        key = node.input[i], len(other)
        if key not in made:
            name = f"{node.input[i]}.rank{len(other)}"
            while name in taken:
                name += "_"
            made[key] = name
            array = numpy_helper.to_array(single[node.input[i]])
            model.graph.initializer.append(numpy_helper.from_array(np.reshape(array, [1] * len(other)), name))
        node.input[i] = made[key]
    read = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _sizes(model: ModelProto, known: Mapping[str, Sequence[int | None]]) -> dict[str, tuple[int | None, ...]]:
    stated = skeleton(model, value_info=False)
    results = {name for node in model.graph.node for name in node.output} - {o.name for o in model.graph.output}
    for name in sorted(results.intersection(known)):
        stated.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.UINT8, list(known[name])))
    return static_sizes(inferred_skeleton(stated))
