"""Lower a marked model: replace marks by QuantizeLinear and DequantizeLinear. The inverse is in `qdq.marks`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx.inliner
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.lazy_tensors import LoweredModel, as_given, as_stored_in, narrow, with_large, without_large
from onnx_backend.proto.model_io import drop_properties
from onnx_backend.proto.nodes import attributes, is_mark, lift_constants, metadata, set_metadata
from onnx_backend.proto.opsets import OPSET, at_opset, opset_of
from onnx_backend.qdq.graph_editor import (
    GraphEditor,
    dequantize_to,
    pair_type,
    scales_as,
    type_of_mark,
    widen,
    write_site,
)
from onnx_backend.qdq.layer_inputs import quantize_in_front, quantize_inputs
from onnx_backend.qdq.narrow_regions import note_regions, round_entries
from onnx_backend.qdq.older_opsets import at_older_opset, require_sayable
from onnx_backend.qdq.read import FLOAT32, FLOAT_CODES, require_written
from onnx_backend.qdq.stored_weights import in_whole_bytes, parameters, store, where, zero_point_bytes
from onnx_backend.qdq.zero_products import drop_zero_products
from onnx_backend.readers import BLOCK_KEY
from onnx_backend.runtimes.registry import note_form, runtime_named
from onnx_backend.runtimes.runtime import Prefer, Runtime
from onnx_backend.workarounds.kernel_casts import insert_kernel_casts
from onnx_backend.workarounds.onnxruntime_barriers import OPTIONS_KEY, needed_options
from qsdk.core.arrays import Array
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.errors import ExportError
from qsdk.core.numerics.dtypes import DType, int8
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.numerics.spec import Kind
from qsdk.core.planning.plan import WHOLE, Decision, Plan

_BY_ATTRIBUTE, _BY_BOTH = "QDQ output_dtype", "QDQ output_dtype and zero point"  # forms in the report
_OPSET_OF_CONTAINER = {"int2": 25, "uint2": 25, "float4e2m1": 23}
_BFLOAT16 = 22  # the opset from which Conv, pooling and their kin take bfloat16
_PRECISION = 23  # the opset from which a QuantizeLinear says in which type it divides


def insert(
    model: ModelProto,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    *,
    opset: int = OPSET,
    dialect: AnyDialect | Runtime = "onnxruntime",
) -> tuple[ModelProto, list[dict[str, Any]]]:
    """Replace every mark by its decision: Q/DQ, an integer initializer, a pair of casts, or nothing.

    Returns the model, with graph inputs and outputs under their old names, and the rows of `lower` in whole.
    """
    lowered = lower(model, plan, encodings, opset=opset, dialect=dialect)
    return with_large(lowered.model, lowered.large), lowered.rows


def lower(
    marked: ModelProto,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    *,
    opset: int = OPSET,
    dialect: AnyDialect | Runtime = "onnxruntime",
    weights: Mapping[str, Array] | None = None,
    prefer: Prefer = "size",
    unfinished: bool = False,
) -> LoweredModel:
    """Replace every mark by its decision, and compute large stored tensors only when they are written.

    Args:
        marked: it is not changed.
        plan: the decision for each site; a site without one stays float.
        encodings: of every quantized site, tied sites and biases included.
        opset: the model comes out at this one, or above if a dtype needs it.
        dialect: of the runtime that the model is written for.
        weights: the values of those stored tensors that the model has only stubs of, by name.
        prefer: `speed` stores weights of 4 bits in 8 where the runtime has integer kernels for these alone; it
            dequantizes packed ones in every run.
        unfinished: without the nodes that round inputs of layers and what the runtime does last, for a caller that
            changes types first (`quantize_inputs`, `Runtime.finish`); scales of blocks are large tensors too.

    Raises:
        ExportError: a site has no encoding, or one that cannot be written.
        ModelError: one site marks two tensors.
    """
    runtime = runtime_named(dialect)
    if prefer == "speed" and runtime.whole_bytes:
        encodings = in_whole_bytes(plan, encodings)
    require_written(plan.decisions.values())
    model = without_large(marked)
    large = {**as_stored_in(marked), **as_given(model, weights or {})}
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    lift_constants(model)
    in_bfloat16 = any(decision.tensor_type == "bfloat16" for decision in plan.decisions.values())
    if in_bfloat16 and runtime.in_bfloat16:
        opset = max(opset, _BFLOAT16)
    containers = {encoding.dtype.container for encoding in encodings.values()}
    model = at_opset(model, max(opset, *(_OPSET_OF_CONTAINER.get(container, OPSET) for container in (*containers, ""))))
    note_regions(model, plan)
    require_sayable(encodings, opset)
    forms: dict[str, Any] = {
        "pair_types": runtime.pair_types,
        "narrow_scales": runtime.narrow_scales,
        "lazy_scales": unfinished,
    }
    lowering = GraphEditor(model, large, explicit=runtime.explicit or opset < OPSET, **forms)
    lowering.merge_marks()
    for node in list(model.graph.node):
        if is_mark(node):
            site = str(attributes(node)["key"])
            _lower(lowering, runtime, node, site, plan.decisions.get(site), encodings)
        elif node.output[0] not in lowering.folded:
            lowering.nodes.append(node)
    lowering.finish()
    round_entries(lowering)
    drop_zero_products(model)
    quantize_in_front(model, whole=True)  # pairs as those of sites, so that they need the same barriers
    rounds = any(decision.input_block for decision in plan.decisions.values())
    alone = not rounds and (plan.only_weights() or bool(needed_options(model)))
    drop_properties(model, (OPTIONS_KEY,))
    if runtime.adapt is not None:
        _note_zero_points(lowering.rows, runtime.adapt(model, large, alone))
    if runtime.kernel_casts or (in_bfloat16 and not runtime.in_bfloat16):
        insert_kernel_casts(model)
    if not runtime.simulates:
        _require_no_kernel(plan)
    if not unfinished:
        quantize_inputs(model)
        runtime.finish(model)
    if opset < OPSET:
        model = at_older_opset(model, opset)
    note_form(model, runtime, prefer)
    return LoweredModel(model, large, lowering.rows)


def _lower(
    at: GraphEditor,
    runtime: Runtime,
    mark: NodeProto,
    site: str,
    decision: Decision | None,
    encodings: Mapping[str, Encoding],
) -> None:
    """Replace a mark by its decision."""
    source, output, tensor_type = mark.input[0], mark.output[0], type_of_mark(mark)
    root = at.roots.get(source, source)
    if root in at.stored:
        at.roots[output] = source = root
    if decision is None or decision.spec is None or decision.spec.dtype.name == tensor_type:
        at.bypass(source, output)
        at.row(site, tensor_type, "float")
    elif decision.spec.dtype.kind == "float":
        _cast(at, site, decision.kind, decision.spec.dtype, source, output, tensor_type)
    elif decision.dynamic:
        _quantize_dynamically(at, decision, source, output, tensor_type)
    elif site not in encodings:
        raise ExportError(f"the site {site} has no encoding; calibrate it, or export with uncalibrated='float'")
    elif source in at.stored:
        dequantize = store(at, site, decision.kind, encodings[site], source, output, tensor_type)
        if decision.input_block is not None:
            set_metadata(dequantize, **{BLOCK_KEY.removeprefix("qsdk."): str(decision.input_block)})
    else:
        _quantize(at, runtime, decision, encodings[site], source, output, tensor_type)


def _require_no_kernel(plan: Plan) -> None:
    """Refuse LSTM layers that round their state, which no standard op says."""
    states = ((s, d) for s, d in plan.decisions.items() if d.op_type == "LSTM")
    found = [site for site, decision in states if decision.input_block == WHOLE]
    if found:
        raise ExportError(
            f"the LSTM of {found[0]} rounds its state in each step, as a kernel of ONNX Runtime does and no other; "
            'choose compute="float32", or export with dialect="onnxruntime"'
        )


def _cast(at: GraphEditor, site: str, kind: Kind, dtype: DType, source: str, output: str, tensor_type: str) -> None:
    code = FLOAT_CODES[dtype.name]
    if source in at.stored:
        narrowed = narrow(at.values(source), code)
        middle = at.once(source, dtype.name.encode(), narrowed, f"_{dtype.name}")
    else:
        middle = at.fresh(f"{site}/{dtype.name}")
        first = at.add("Cast", [source], middle, f"{site}/cast", to=code)
        set_metadata(first, site=site, dtype=dtype.name, kind=kind)
    back = at.target(site, output, tensor_type)
    last = at.add("Cast", [middle], back, f"{site}/cast_back", to=FLOAT_CODES[tensor_type])
    set_metadata(last, site=site, dtype=dtype.name, kind=kind)
    at.row(site, dtype.name, "cast")


def _quantize(
    at: GraphEditor,
    runtime: Runtime,
    decision: Decision,
    encoding: Encoding,
    source: str,
    output: str,
    tensor_type: str,
) -> None:
    site, kind = decision.site, decision.kind
    own_type = pair_type(at, tensor_type, encoding)
    cast_type = FLOAT32 if own_type == tensor_type else tensor_type
    source = widen(at, site, source, cast_type)
    form = "zero_point" if at.explicit else runtime.form(encoding.dtype, encoding.symmetric)
    # values of a pass-through op are in the grid already, and the runtime wants no node between MaxPool and an int8 Q
    clipped = encoding.dtype.name in runtime.clipped
    if clipped or (encoding.dtype.narrows_container and not decision.passes_through):
        source = _clipped(at, site, encoding, source)
    options = where(encoding, encoding.axis)
    scale = scales_as(encoding.scale, own_type)
    inputs = parameters(at, site, encoding, scale, encoding.zero_point, form != "output_dtype")
    if form != "zero_point":
        code = helper.np_dtype_to_tensor_dtype(storage_type(encoding.dtype))
        attribute = {"output_dtype": int(code)}
    else:
        attribute = {}
    if own_type != FLOAT32 and opset_of(at.model) >= _PRECISION:
        attribute["precision"] = FLOAT_CODES[FLOAT32]  # without it, the division is in the scale's type
    codes = at.fresh(f"{site}/quantized")
    at.add("QuantizeLinear", [source, *inputs], codes, f"{site}/quantize", **options, **attribute)
    name = at.target(site, output, "dequantized")
    dequantize = dequantize_to(at, site, [codes, *inputs], name, cast_type, **options)
    write_site(dequantize, site, encoding, "" if kind == "activation" else kind)
    text = {"output_dtype": _BY_ATTRIBUTE, "zero_point": "QDQ zero point"}.get(form, _BY_BOTH)
    at.row(site, encoding.dtype.name, text, zero_point_bytes(encoding) if form == "output_dtype" else 0)


def _note_zero_points(rows: Sequence[dict[str, Any]], pairs: Sequence[NodeProto]) -> None:
    """Correct the rows of the sites whose pairs got a zero point after all."""
    sites = {metadata(node).get("qsdk.site") for node in pairs}
    for row in rows:
        if row["site"] in sites:
            row["zero_point_bytes_saved"] = 0
            if row["form"] == _BY_ATTRIBUTE:
                row["form"] = _BY_BOTH


def _clipped(at: GraphEditor, site: str, encoding: Encoding, source: str) -> str:
    """Clip the values to the grid before they are rounded; return the new tensor."""
    if encoding.axis is not None:
        raise ExportError(
            f"{site} is an activation of {encoding.dtype} per channel, which QuantizeLinear cannot hold inside its "
            "grid; make it per tensor, or choose a dtype of full width"
        )
    low = at.initializer(encoding.low.reshape(()), f"{site}/low")
    high = at.initializer(encoding.high.reshape(()), f"{site}/high")
    clipped = at.fresh(f"{site}/clipped")
    set_metadata(at.add("Clip", [source, low, high], clipped, f"{site}/clip"), site=site)
    return clipped


def _quantize_dynamically(at: GraphEditor, decision: Decision, source: str, output: str, tensor_type: str) -> None:
    site = decision.site
    source = widen(at, site, source, tensor_type)
    if decision.spec is not None and decision.spec.dynamic == "token":
        _quantize_by_token(at, decision, source, output, tensor_type)
        return
    names = [at.fresh(f"{site}/{name}") for name in ("quantized", "scale", "zero_point")]
    quantize = helper.make_node("DynamicQuantizeLinear", [source], names, f"{site}/quantize")
    at.nodes.append(quantize)
    name = at.target(site, output, "dequantized")
    dequantize = dequantize_to(at, site, names, name, tensor_type)
    for node in (quantize, dequantize):
        set_metadata(node, site=site, dtype="uint8", kind=decision.kind)
    at.row(site, "uint8", "DynamicQuantizeLinear")


def _quantize_by_token(at: GraphEditor, decision: Decision, source: str, output: str, tensor_type: str) -> None:
    """Write what quantizes each row along the last axis with a scale of its own, in plain operators."""
    site, dtype = decision.site, decision.spec.dtype if decision.spec is not None else int8

    def part(op: str, name: str, *inputs: str | float | Array, **options: Any) -> str:
        numbers = [x if isinstance(x, str | np.ndarray) else np.array(x, np.float32) for x in inputs]
        stored = [x if isinstance(x, str) else at.initializer(x, f"{site}/{name}_by") for x in numbers]
        made = at.fresh(f"{site}/{name}")
        at.add(op, stored, made, made, **options)
        return made

    peak = part("ReduceMax", "peak", part("Abs", "size", source), np.array([-1], np.int64), keepdims=1)
    share = part("Div", "share", peak, dtype.hi + 0.5)
    empty = part("Cast", "one", part("Equal", "empty", share, 0.0), to=FLOAT_CODES[FLOAT32])
    scale = part("Add", "scale", share, empty)
    whole = part("Round", "round", part("Div", "divide", source, scale))
    clipped = part("Clip", "clip", whole, dtype.lo, dtype.hi)
    codes = part("Cast", "quantized", clipped, to=TensorProto.INT8)
    values = part("Cast", "unscaled", codes, to=FLOAT_CODES[FLOAT32])
    name = at.target(site, output, "dequantized")
    wide = name if tensor_type == FLOAT32 else at.fresh(f"{site}/dequantized32")
    set_metadata(
        at.add("Mul", [values, scale], wide, f"{site}/dequantize"), site=site, dtype=dtype.name, kind=decision.kind
    )
    if tensor_type != FLOAT32:
        set_metadata(at.add("Cast", [wide], name, f"{site}/narrow", to=FLOAT_CODES[tensor_type]), cast_of=site)
    at.row(site, dtype.name, "a scale for each token")
