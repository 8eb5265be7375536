"""A sim of a Q/DQ model and a config: what the file quantizes keeps its encodings, the rest is planned as float."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from glob import escape
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.lower import insert
from onnx_backend.opening.encodings_of_file import with_flags, without_origin
from onnx_backend.opening.from_float import (
    Notes,
    QuantizedAlreadyError,
    open_loaded,
    open_unplanned,
    with_reasons_of_file,
)
from onnx_backend.opening.normalize_qdq import normalize_qdq
from onnx_backend.opening.read_graph import inline_functions
from onnx_backend.passes.fold_batch_norm import may_fold
from onnx_backend.proto.companion import require_companion
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex, initializers, input_names
from onnx_backend.proto.lazy_tensors import fake_quantize
from onnx_backend.proto.model_io import load, source_name
from onnx_backend.proto.nodes import attributes, is_mark, metadata, node_label, rename_inputs, replace_nodes
from onnx_backend.proto.opsets import at_opset
from onnx_backend.qdq.graph_editor import array_type, type_of_mark
from onnx_backend.qdq.marks import UnpackedQdq, mark, open_qdq
from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.qdq.read import LITERAL_KEY
from onnx_backend.runtime.session import with_float_weights
from onnx_backend.sim import OnnxSim
from onnx_backend.validation.rules import require_valid
from qsdk.core.config.config import QuantConfig
from qsdk.core.encodings.tensors import MatchedEncodings, require_matched
from qsdk.core.errors import ModelError
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import AVERAGES, BLOCK_MOVES, EXTREMES, MOVEMENTS
from qsdk.core.numerics.dtypes import DType, dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.from_encodings import misfit, owned_encodings, plan_as_given, plan_with_given
from qsdk.core.planning.islands import with_given_islands
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Plan
from qsdk.core.sims.state import SimState

NOT_MENTIONED = "the encodings file does not mention it"


def sim_with_encodings(
    source: ModelProto, place: Callable[[Graph], MatchedEncodings], where: str, *, strict: bool
) -> tuple[OnnxSim, MatchedEncodings]:
    """Open a float model, and quantize exactly the tensors that encodings are given for.

    A BatchNorm or an added constant beside a layer is folded, as it was when the encodings were found, unless they
    speak of the tensor that it reads. `place` matches the given encodings to the tensors of a graph; `strict` refuses
    those that no tensor takes.
    """
    model, graph, notes = open_unplanned(load(source), "the model", QuantConfig(), fold_batch_norm=False)
    placed = place(graph)
    stored = initializers(model.graph)
    foldable = [node for node in model.graph.node if may_fold(node, stored)]
    if foldable:
        spoken_of = {graph.tensors[graph.sites[site]].name for site in (*placed.encodings, *placed.casts)}
        read = {node_label(node): node.input[:1] if node.op_type != "Add" else node.input for node in foldable}
        kept = [label for label, names in read.items() if spoken_of.intersection(names)]
        model, graph, notes = open_unplanned(load(source), "the model", _keeping(kept))
        placed = place(graph)
    require_matched(placed, where, strict=strict)
    without_origin(model)
    _quantize_absorbed(model, graph, placed)
    plan = with_given_islands(graph, plan_as_given(graph, placed.encodings, placed.casts, missing=NOT_MENTIONED))
    state = SimState(None, plan, owned_encodings(plan, placed.encodings))
    return OnnxSim.from_state(mark(model, graph, in_place=True), state, notes), placed


def _quantize_absorbed(model: ModelProto, graph: Graph, placed: MatchedEncodings) -> None:
    """Replace stored rows, in place, by the values that a lookup in the quantized table returns."""
    stored = initializers(model.graph)
    for encoding, site in placed.absorbed.values():
        tensor = stored[graph.tensors[graph.sites[site]].name]
        tensor.CopyFrom(numpy_helper.from_array(fake_quantize(encoding, array(tensor)), tensor.name))


def _keeping(owners: Iterable[str]) -> QuantConfig:
    """Return a config that keeps these BatchNorms and Adds from being folded."""
    config = QuantConfig()
    for owner in owners:
        config = config.skip(escape(owner))
    return config


def open_with_config(
    model: ModelProto,
    source: str | os.PathLike[str] | ModelProto,
    config: QuantConfig,
    example: Any = None,
    *,
    fold_batch_norm: bool = True,
) -> OnnxSim:
    """Open a float ONNX model, or one that holds Q/DQ already, for a config.

    In a Q/DQ model the config applies to the tensors that are float in it, and no BatchNorm is folded. The model, as
    loaded from the source, is changed.
    """
    try:
        opened = open_loaded(model, source_name(source), config, example, fold_batch_norm=fold_batch_norm)
    except QuantizedAlreadyError:
        if not isinstance(source, ModelProto):
            require_companion(model, source)
        require_valid(model, source_name(source))
        return open_adopted(model, config, example)
    return OnnxSim.from_opened_float(opened, config)


def open_as_written(source: ModelProto) -> OnnxSim:
    """Open a Q/DQ model with its own encodings: it simulates as the file does, and in float with what tools remove.

    The source is valid and is not changed; the sim may keep it.
    """
    normal, opened, remarks = _opened(source)
    sim = OnnxSim.from_qdq(normal, opened)
    sim.notes = Notes(remarks=remarks)
    return sim


def open_adopted(source: ModelProto, config: QuantConfig, example: Any = None) -> OnnxSim:
    """Open a Q/DQ model as if it were float, and adopt its encodings, frozen, wherever it has them.

    The config is for the tensors that are float in the file.
    """
    normal, opened, lost = _opened(source)
    found = with_flags(normal, opened.encodings)
    plain, tensors = _unmarked(opened)
    lost += _as_floats(plain)
    model, graph, notes = open_unplanned(plain, "the model", config, example, fold_batch_norm=False)
    graph = _with_names_of_the_file(graph, tensors)
    encodings = {site: replace(encoding, frozen=True) for site, encoding in found.items()}
    casts = {site: dtype_named(name) for site, name in opened.casts.items()}
    plan = with_reasons_of_file(make_plan(graph, config), notes)
    _require_all_placed(graph, plan, tensors, encodings, casts)
    encodings = {site: encoding for site, encoding in encodings.items() if site in plan.decisions}
    casts = {site: dtype for site, dtype in casts.items() if site in plan.decisions}
    plan = plan_with_given(graph, plan, encodings, casts)
    remark = f"{len(encodings) + len(casts)} sites are as the file has them, frozen; no BatchNorm was folded"
    state = SimState(None, plan, owned_encodings(plan, encodings))
    notes = replace(notes, remarks=(*notes.remarks, remark, *lost))
    return OnnxSim.from_state(mark(model, graph, in_place=True), state, notes)


def _opened(source: ModelProto) -> tuple[ModelProto, UnpackedQdq, tuple[str, ...]]:
    """Return a Q/DQ model in normal form, the same without its pairs, and remarks on what was put back there."""
    normal = normalize_qdq(source)
    opened = open_qdq(at_opset(inline_functions(normal)))
    return normal, opened, put_back_activations(opened, sites_of_ours(as_simulated(source)))


def _as_floats(model: ModelProto) -> tuple[str, ...]:
    """Replace int32 codes that no float32 stands for by the floats that a session makes of them; return a remark."""
    kept = [node.output[0] for node in model.graph.node if LITERAL_KEY in metadata(node)]
    if not kept:
        return ()
    with_float_weights(model)
    return (f"int32 codes that no float32 stands for, taken as the floats that the runtime reads: {', '.join(kept)}",)


@dataclass(frozen=True)
class _FloatTensor:
    """The tensor of the float model that a site of the file belongs to."""

    tensor: str
    scalar: bool
    zero: bool  # a stored tensor of zeros, such as the bias of a layer that has none


def _unmarked(opened: UnpackedQdq) -> tuple[ModelProto, Mapping[str, _FloatTensor]]:
    """Return the float model behind an opened one, and site -> its tensor."""
    plain, _ = insert(opened.model, Plan({}), {}, dialect="onnx")
    without_origin(plain)
    stored = initializers(plain.graph)
    known = {*stored, *input_names(plain.graph), *(name for node in plain.graph.node for name in node.output)}
    found: dict[str, _FloatTensor] = {}
    sites: dict[str, str] = {}
    source: dict[str, str] = {}
    for node in (node for node in opened.model.graph.node if is_mark(node)):
        site = str(attributes(node)["key"])
        tensor = source.get(node.input[0], node.input[0])
        source[node.output[0]] = tensor
        name = tensor if tensor in known else node.output[0]
        if sites.setdefault(name, site) != site:
            raise ModelError(
                f"the tensor {name!r} is quantized twice, as {sites[name]} and as {site}, which one plan cannot say; "
                "open the file as it is with config=None, or quantize the float model it came from"
            )
        one = name in stored and not any(n != 1 for n in stored[name].dims)
        found[site] = _FloatTensor(name, one, name in stored and not array(stored[name]).any())
    return plain, found


def _with_names_of_the_file(graph: Graph, tensors_of: Mapping[str, _FloatTensor]) -> Graph:
    """Return the graph with the sites of the file; a tensor that the file does not quantize gives its name away.

    Stored tensors for which a plan has no site, such as the bias of a norm, get one where the file quantizes them.
    """
    names = {float_tensor.tensor: site for site, float_tensor in tensors_of.items()}
    sites = [tensor.site for tensor in graph.tensors]
    at = {site: index for index, site in enumerate(sites) if site is not None}
    for index, tensor in enumerate(graph.tensors):
        wanted, old = names.get(tensor.name), sites[index]
        if wanted is None or wanted == old or (old is None and (not tensor.constant or tensors_of[wanted].scalar)):
            continue
        other = at.get(wanted)
        if other is not None and old is not None:
            sites[other], at[old] = old, other
        sites[index], at[wanted] = wanted, index
    return replace(
        graph, tensors=[replace(tensor, site=site) for tensor, site in zip(graph.tensors, sites, strict=True)]
    )


def _require_all_placed(
    graph: Graph,
    plan: Plan,
    tensors_of: Mapping[str, _FloatTensor],
    encodings: Mapping[str, Encoding],
    casts: Mapping[str, DType],
) -> None:
    """Refuse to lose an encoding; a scalar constant holds its quantized value already, and zeros need none."""
    lost = []
    for site in (*encodings, *casts):
        if site not in plan.decisions:
            if not tensors_of[site].scalar and not tensors_of[site].zero:
                lost.append(f"{site} (the tensor {tensors_of[site].tensor!r} has no site in the float model)")
        elif site in encodings:
            why = misfit(encodings[site], graph.tensors[graph.sites[site]].shape)
            lost += [f"{site} ({why})"] if why else []
    if lost:
        raise ModelError(
            f"these encodings of the file cannot be adopted beside a config: {', '.join(lost)}; open the file as it is "
            "with config=None, or quantize the float model it came from"
        )


# --- Put back the activation functions that a tool has removed in front of pairs whose ranges do their clipping -------

# onnxruntime.quantization removes a Relu or Clip in front of a QuantizeLinear: a grid that begins at 0 clips there by
# itself. Without its pairs the file would be a linear network, which is no reference for anything. Where a grid begins
# or ends at 0, a Relu or Clip in front of the pair changes no code, and neither does an upper bound at the end of a
# grid.

Interval = tuple[float, float]
_ANY: Interval = (-math.inf, math.inf)
_POSITIVE: Interval = (0.0, math.inf)
_OF_OP: Mapping[str, Interval] = {
    **dict.fromkeys(("Relu", "Abs", "Exp", "Sqrt", "Softplus", "ReduceL1", "ReduceL2", "ReduceSumSquare"), _POSITIVE),
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax"), (0.0, 1.0)),
    "Tanh": (-1.0, 1.0),
}
#: ops whose results lie between the least and the largest value of their first operand
_KEEPING = (MOVEMENTS - BLOCK_MOVES) | EXTREMES | AVERAGES | {"Dropout"}
_MERGING = frozenset(("Concat", "Max", "Min"))  # the same of all their operands
_GROWING = frozenset(("Add", "Mul", "Sum"))  # never negative, where no operand is
_TYPES = ("float32", "float16")  # those in which the runtime has Relu and Clip
_ROUND, _LARGEST, _CLOSE = 0.1, 10.0, 1e-6  # up to this size the range of data ends there in 2 of 10,000 cases at most


def sites_of_ours(model: ModelProto) -> frozenset[str]:
    """Return the sites whose pairs `export` wrote: nothing was removed in front of those."""
    nodes = [node for graph in (model.graph, *model.functions) for node in graph.node]
    return frozenset(metadata(node).get("qsdk.site", "") for node in nodes)


def put_back_activations(opened: UnpackedQdq, ours: Collection[str]) -> tuple[str, ...]:
    """Put a Relu or Clip in front of the marks of another tool whose grids clip where it would, in place.

    An activation whose zero point is the lowest code gets a Relu, or a Clip where its grid ends at a multiple of 0.1 as
    well (6 for ReLU6). One whose zero point is the highest code gets a Clip that ends at 0. Inputs, and tensors that
    cannot be beyond these bounds, are left alone. No code changes, so the quantized model computes what it did.
    `ours` are the sites whose pairs `export` wrote. What was put back, and what the file does not say, is returned as
    remarks.
    """
    bounds, unclear = _bounds(opened, ours)
    remarks = []
    if bounds:
        _insert(opened.model, bounds)
        remarks.append(
            f"the file leaves the clipping at 0 to the grids of {len(bounds)} sites, as tools do that remove a Relu or "
            "Clip: a Relu or Clip was put back there for the float reference; an upper bound is known only where it is "
            "a multiple of 0.1"
        )
    if unclear:
        remarks.append(
            f"a Clip may have been removed in front of {', '.join(unclear)}, whose bounds the file does not say: the "
            "float reference does not clip there; have the tool keep it (QDQKeepRemovableActivations of onnxruntime)"
        )
    return tuple(remarks)


def _bounds(opened: UnpackedQdq, ours: Collection[str]) -> tuple[dict[str, Interval], list[str]]:
    """Return site -> what has to be put back there, and the sites where something unknown may be missing."""
    index = GraphIndex(opened.model.graph)
    fixed = {*index.stored, *(value.name for value in opened.model.graph.input)}
    known: dict[str, Interval] = {}
    bounds: dict[str, Interval] = {}
    unclear = []
    for node in opened.model.graph.node:
        found = _interval(node, known, index.stored)
        site = str(attributes(node)["key"]) if is_mark(node) else ""
        encoding = opened.encodings.get(site)
        readers = index.readers.get(node.output[0], [])
        # the activation function may still be there, behind a pair of its own (onnxruntime keeps some so)
        clipped_behind = bool(readers) and all(reader.op_type in ("Relu", "Clip") for reader in readers)
        needless = site in ours or fixed.intersection(node.input[:1]) or clipped_behind
        if encoding is not None and encoding.dtype.is_integer and not needless:
            low, high = _clipped_by(encoding)
            inside = max(low, found[0]), min(high, found[1])
            if inside == found:
                unclear += [site] if found == _ANY and _ends_round(encoding) else []
            elif type_of_mark(node) in _TYPES:
                bounds[site] = found = inside
            else:
                unclear.append(site)
        known |= dict.fromkeys(filter(None, node.output), found)
    return bounds, unclear


def _interval(node: NodeProto, known: Mapping[str, Interval], stored: Mapping[str, TensorProto]) -> Interval:
    """Return bounds of what a node computes without quantization, as far as they follow from those of its operands."""
    of = [known.get(name, _ANY) for name in node.input if name]
    if is_mark(node) or node.op_type in _KEEPING:
        return of[0]
    if node.op_type in _MERGING:
        return min(low for low, _ in of), max(high for _, high in of)
    if node.op_type in _GROWING:
        return _POSITIVE if all(low >= 0 for low, _ in of) else _ANY
    if node.op_type == "Clip":
        ends = [stored.get(name) for name in (*node.input[1:3], "", "")[:2]]
        given = [None if end is None else float(array(end).reshape(())) for end in ends]
        return _ANY[0] if given[0] is None else given[0], _ANY[1] if given[1] is None else given[1]
    return _OF_OP.get(node.op_type, _ANY)


def _clipped_by(encoding: Encoding) -> Interval:
    """Return the bounds at which a grid clips as an activation function would, infinite where it is not known."""
    at_low = bool((encoding.zero_point == encoding.dtype.lo).all())
    if at_low and encoding.scale.size == 1:
        bound = round(_end(encoding) / _ROUND) * _ROUND
        changes_nothing = int(encoding.quantize(np.array([bound], np.float32))[0]) == encoding.dtype.hi
        return 0.0, bound if _ends_round(encoding) and changes_nothing else math.inf
    at_high = bool((encoding.zero_point == encoding.dtype.hi).all())
    return (0.0 if at_low else -math.inf), (0.0 if at_high else math.inf)


def _end(encoding: Encoding) -> float:
    """Return the width of a grid; where it begins at 0, that is its end."""
    return float(encoding.scale[0].astype(np.float64)) * (encoding.dtype.hi - encoding.dtype.lo)


def _ends_round(encoding: Encoding) -> bool:
    """Return True if the width of a grid is a small multiple of 0.1, as no range found in data is by chance."""
    if encoding.scale.size != 1:
        return False
    end = _end(encoding)
    return end <= _LARGEST and abs(end - round(end / _ROUND) * _ROUND) <= _CLOSE * end


def _insert(model: ModelProto, bounds: Mapping[str, Interval]) -> None:
    """Insert the ops in front of the marks; where nothing else reads a tensor, its name goes to the op's result."""
    index = GraphIndex(model.graph)
    sites = {id(node): str(attributes(node)["key"]) for node in model.graph.node if is_mark(node)}
    made: dict[tuple[str, Interval], str] = {}
    renamed: dict[str, str] = {}
    nodes = []
    for node in model.graph.node:
        wanted = bounds.get(sites.get(id(node), ""))
        if wanted is None:
            nodes.append(node)
            continue
        source = node.input[0]
        if (source, wanted) not in made:
            readers = index.readers[source]
            alone = source not in index.outputs and all(bounds.get(sites.get(id(n), "")) == wanted for n in readers)
            result = source if alone else index.fresh(f"{source}/clipped")
            if alone:
                renamed[source] = index.fresh(f"{source}/before_activation")
            made[source, wanted] = result
            nodes.append(_op(index, renamed.get(source, source), result, wanted, type_of_mark(node)))
        rename_inputs([node], {source: made[source, wanted]})
        nodes.append(node)
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            node.output[position] = renamed.get(name, name)
    replace_nodes(model.graph, nodes)


def _op(index: GraphIndex, source: str, result: str, bounds: Interval, tensor_type: str) -> NodeProto:
    name = index.fresh(f"{result}/activation")
    if bounds == _POSITIVE:
        return helper.make_node("Relu", [source], [result], name)
    inputs = [source]
    for end, value in zip(("low", "high"), bounds, strict=True):
        inputs.append(index.fresh(f"{name}/{end}"))
        index.graph.initializer.append(numpy_helper.from_array(np.array(value, array_type(tensor_type)), inputs[-1]))
    return helper.make_node("Clip", inputs, [result], name)
