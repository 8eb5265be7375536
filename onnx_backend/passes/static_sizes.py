"""Compute the sizes that follow from fixed sizes of the inputs, and store shapes in which at most one size is open.

ONNX's inference does not follow them through every operator: a ratio of sizes, a choice between two, a table of them.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, numpy_helper

from onnx_backend.passes.fold_constants import evaluate
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex, declared_sizes, initializers, input_names, nodes_reaching
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import (
    attributes,
    constant_tensor,
    copied,
    drop_unused_initializers,
    is_constant,
    metadata,
    node_label,
    replace_nodes,
    retain,
)
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import Shape, declared_types, is_large
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import SHAPE_OPS

_ROUNDS = 32  # of sizes that depend on tensors whose sizes are computed themselves
_LARGEST = 4096  # elements of a computed value
_CONSTANT_SITES = "qsdk.constant_sites"
_LARGEST_CODES = 1 << 18  # elements of a constant activation
_QDQ = ("QuantizeLinear", "DequantizeLinear")  # their results are no sizes, and the conversion needs the codes
#: ops whose result has no elements where their first input has none
_MOVES = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose"})


def propagate_static_sizes(model: ModelProto) -> ModelProto:
    """Return a model with all values stored that follow from fixed sizes alone; the model itself if none do."""
    found = model
    for _ in range(_ROUNDS if any(node.op_type in SHAPE_OPS for node in model.graph.node) else 0):
        step = _one_round(found)
        if step is None:
            break
        found = step
    return found


def _one_round(model: ModelProto) -> ModelProto | None:
    sizes, opsets = static_sizes(with_inferred_shapes(model)), {"": opset_of(model)}
    known = {t.name: array(t) for t in initializers(model.graph).values() if np.prod(t.dims) <= _LARGEST}
    known |= {node.output[0]: array(constant_tensor(node)) for node in model.graph.node if is_constant(node)}
    outputs: set[str] = {info.name for info in model.graph.output}
    nodes: list[NodeProto] = []
    computed: dict[str, npt.NDArray[np.generic]] = {}
    for node in model.graph.node:
        values = None if outputs.intersection(node.output) else _values_of(node, sizes, known, computed, opsets)
        if values is None:
            nodes.append(node)
        else:
            computed.update(values)
            known.update(values)
    if not computed:
        return None
    result = copied(model)
    replace_nodes(result.graph, nodes)
    result.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in computed.items())
    return result


def _values_of(
    node: NodeProto,
    sizes: Mapping[str, Sequence[int | None]],
    known: Mapping[str, npt.NDArray[np.generic]],
    computed: Mapping[str, npt.NDArray[np.generic]],
    opsets: Mapping[str, int],
) -> Mapping[str, npt.NDArray[np.generic]] | None:
    """Return the results of a node that reads only known sizes, None where it reads something else or they are open."""
    if node.op_type in SHAPE_OPS and node.domain in ("", "ai.onnx"):
        shape = sizes.get(node.input[0])
        if shape is None:
            return None
        attrs = attributes(node)
        part = list(shape)[attrs.get("start", 0) : attrs.get("end")]
        if any(size is None for size in part):
            return None
        whole = np.asarray(part, np.int64)
        return {node.output[0]: whole if node.op_type == "Shape" else np.asarray(whole.prod(), np.int64)}
    if node.op_type in _QDQ or not any(name in computed for name in node.input):
        return None
    if any(name and name not in known for name in node.input):
        return None
    return evaluate(node, known, opsets, limit=_LARGEST)


def store_shapes(model: ModelProto) -> None:
    """Store the shapes of Reshapes, and the factors of Resizes, that a traced model computes from open sizes, in place.

    In a stored shape, 0 is the size that the input has there, and -1 is what is left. Runtimes move a Transpose through
    such an op, but not through one whose shape is computed in every run.
    """
    graph, index = model.graph, GraphIndex(model.graph)
    sizes = {name: shape for name, (_, shape) in declared_types(graph).items()}
    unread: list[str] = []
    for node in graph.node:
        at = {"Reshape": 1, "Resize": 3}.get(node.op_type, len(node.input))
        if node.domain or at >= len(node.input) or node.input[at] in index.stored:
            continue
        before, behind = sizes.get(node.input[0]), sizes.get(node.output[0])
        values = None if before is None or behind is None else _STORED[node.op_type](before, behind)
        if values is not None and not attributes(node).get("axes"):
            unread.append(node.input[at])
            name = index.fresh(f"{node.output[0]}_{'shape' if node.op_type == 'Reshape' else 'scales'}")
            graph.initializer.append(numpy_helper.from_array(values, name))
            node.input[:] = [*node.input[: 2 if node.op_type == "Resize" else 1], name]
            retain(node.attribute, lambda attribute: attribute.name != "allowzero")
    dropped = set[str]()
    readers = Counter(name for node in graph.node for name in reads(node))
    while unread:
        name = unread.pop()
        maker = index.makers.get(name)
        if maker is None or name in dropped or index.outputs.intersection(maker.output):
            continue
        if not any(readers[result] for result in maker.output):
            dropped.update(maker.output)
            readers.subtract(maker.input)
            unread += maker.input
    replace_nodes(graph, [node for node in graph.node if not dropped.intersection(node.output)])


def _shape_to_store(before: Shape, behind: Shape) -> npt.NDArray[np.int64] | None:
    """Return the shape of a Reshape whose open sizes are those of the input there, or a single other one; else None.

    Not both: what is left of a tensor without elements, beside a size of 0 that is copied, is no number.
    """
    found = [
        size if isinstance(size, int) else 0 if size is not None and before[at : at + 1] == (size,) else -1
        for at, size in enumerate(behind)
    ]
    is_open = found.count(-1) > 1 or (-1 in found and 0 in found)
    return None if is_open or 0 in behind else np.array(found, np.int64)


def _scales_to_store(before: Shape, behind: Shape) -> npt.NDArray[np.float32] | None:
    """Return the factors of a Resize, which float32 holds exactly and which leave open sizes as they are; else None."""
    found = []
    for size, wanted in zip(before, behind, strict=True):
        if isinstance(size, int) and isinstance(wanted, int) and size:
            found.append(np.float32(wanted) / np.float32(size))
            if Fraction(float(found[-1])) * size != wanted:
                return None
        elif size is None or size != wanted:
            return None
        else:
            found.append(np.float32(1))
    return np.array(found, np.float32)


_STORED: Mapping[str, Callable[[Shape, Shape], npt.NDArray[Any] | None]] = MappingProxyType(
    {"Reshape": _shape_to_store, "Resize": _scales_to_store}
)


def with_stored_codes(model: ModelProto) -> ModelProto:
    """Return a model with all codes stored that follow from stored tensors alone, such as the anchors of a detector.

    At fixed sizes, whole parts of a network are constant. They are computed here as the file says, pair by pair, up to
    their last codes; a runtime that compiles a network may refuse an op that reads only constants.
    """
    opsets = {"": opset_of(model)}
    known = {t.name: array(t) for t in initializers(model.graph).values() if not is_large(t.dims)}
    outputs: set[str] = {info.name for info in model.graph.output}
    codes: dict[str, npt.NDArray[np.generic]] = {}
    sites: list[str] = []
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in codes:
            sites.append(metadata(node).get("qsdk.site", ""))
        constant = bool(node.input) and all(name in known for name in node.input if name)
        values = evaluate(node, known, opsets, limit=_LARGEST_CODES) if constant else None
        known.update(values or {})
        if values is None or node.op_type != "QuantizeLinear" or outputs.intersection(values):
            nodes.append(node)
        else:
            codes.update(values)
    if not codes:
        return model
    result = copied(model)
    result.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in codes.items())
    replace_nodes(result.graph, nodes_reaching(nodes, outputs))
    left = {name for node in result.graph.node for name in node.output}
    # with them go the tables and weights that only constant parts read
    gone = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and left.isdisjoint(n.output)]
    sites += [metadata(node).get("qsdk.site", "") for node in gone]
    note_constant_sites(result, {site for site in sites if site})
    return result


def note_constant_sites(model: ModelProto, sites: Collection[str]) -> None:
    """Note in a file, in place, which activation sites of its sim it has no nodes for."""
    set_properties(model, {_CONSTANT_SITES: json.dumps(sorted(sites))})


def constant_sites(model: ModelProto) -> frozenset[str]:
    """Return the activation sites of a sim that `with_stored_codes` found to be constant in a file."""
    return frozenset(json.loads(metadata(model).get(_CONSTANT_SITES, "[]")))


def leave_out_empty_inputs(model: ModelProto) -> None:
    """Remove the inputs with an axis of length 0, in place, and all that only moves what is in them.

    They are the past of a prompt, where there are no keys and values yet. Where something else than joining them with
    other values reads one, the sizes are refused.
    """
    fed = input_names(model.graph)
    gone = {info.name for info in model.graph.input if info.name in fed and 0 in declared_sizes(info.type)}
    if gone:
        leave_out(model, gone)


def leave_out(model: ModelProto, gone: Collection[str], *, asked: Collection[str] = ()) -> None:
    """Remove inputs of these names as if they had no elements, in place.

    Op types in `asked` may go on to read an input, such as Shape where the model is compared, not run.
    """
    graph, empty = model.graph, set(gone)
    nodes: list[NodeProto] = []
    sites = set(constant_sites(model))
    for node in graph.node:
        if node.op_type in asked or empty.isdisjoint(reads(node)):
            nodes.append(node)
        elif node.op_type in _MOVES and empty.isdisjoint(node.input[1:]):
            empty.update(node.output)
            sites.add(metadata(node).get("qsdk.site", ""))
        elif node.op_type == "Concat":
            retain(node.input, lambda name: name not in empty)
            empty.update(() if node.input else node.output)
            nodes.extend([node] if node.input else [])
        else:
            raise ConfigError(
                f"shapes leaves {', '.join(sorted(gone))} without elements, and the node {node_label(node)!r} "
                f"({node.op_type}) reads what comes of it; only keys and values of a cache may be empty"
            )
    replace_nodes(graph, nodes_reaching(nodes, {info.name for info in graph.output}))
    retain(graph.input, lambda info: info.name not in gone)
    drop_unused_initializers(graph)
    note_constant_sites(model, sites - {""})
