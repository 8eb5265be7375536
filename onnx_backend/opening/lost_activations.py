"""Put back the activation functions that a tool has removed in front of pairs whose ranges do their clipping.

onnxruntime.quantization removes a Relu or Clip in front of a QuantizeLinear: a grid that begins at 0 clips there by
itself. Without its pairs the file would be a linear network, which is no reference for anything. Where a grid begins
or ends at 0, a Relu or Clip in front of the pair changes no code, and neither does an upper bound at the end of a grid.
"""

import math
from collections.abc import Collection, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex
from onnx_backend.proto.nodes import attributes, is_mark, metadata, rename_inputs, replace_nodes
from onnx_backend.qdq.graph_editor import array_type, type_of_mark
from onnx_backend.qdq.marks import UnpackedQdq
from qsdk.core.graph.op_facts import AVERAGES, BLOCK_MOVES, EXTREMES, MOVEMENTS
from qsdk.core.numerics.encoding import Encoding

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
