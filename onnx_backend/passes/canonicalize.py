"""Bring a user's file into order: sorted, each node named once, nothing undefined; inputs and outputs stay."""

import heapq
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import names_in, unique
from onnx_backend.proto.nodes import node_label, replace_nodes, retain
from onnx_backend.proto.subgraphs import bodies, reads
from qsdk.core.errors import ModelError

#: operators of ONNX with a variadic output
_ANY_NUMBER = frozenset({"If", "Loop", "Scan", "SequenceMap", "Split"})


def canonicalize(model: ModelProto) -> None:
    """Sort nodes, make node names unique, name results, and remove stored tensors from the inputs, in place.

    A tensor that is made twice or never, and a circle, are refused by node.
    """
    graph = model.graph
    densify(graph)
    _require_single_definitions(graph)
    stored = {tensor.name for tensor in graph.initializer}
    retain(graph.input, lambda value: value.name not in stored)  # before IR 4 every stored tensor was listed there
    known = stored | {value.name for value in graph.input}
    _sort(graph, known)
    known |= {name for node in graph.node for name in node.output}
    for value in graph.output:
        if value.name not in known:
            raise ModelError(f"the model's output {value.name!r} is made by no node; export the model again")
    _name_once(graph)
    _name_results(graph, names_in(graph))


def densify(graph: GraphProto) -> None:
    """Store sparse tensors as dense ones."""
    for sparse in graph.sparse_initializer:
        values, places = array(sparse.values), array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if places.ndim == 1:
            dense.reshape(-1)[places] = values
        else:
            dense[tuple(places.T)] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    del graph.sparse_initializer[:]


def _require_single_definitions(graph: GraphProto) -> None:
    seen: set[str] = set()
    for tensor in graph.initializer:
        if tensor.name in seen:
            raise ModelError(f"the model stores two tensors named {tensor.name!r}; export it again")
        seen.add(tensor.name)
    given: set[str] = set()
    for value in graph.input:
        if value.name in given or not value.name:
            raise ModelError(f"the model has two inputs named {value.name!r}, or one without a name; export it again")
        given.add(value.name)
    seen |= given
    for node in graph.node:
        for name in node.output:
            if name in seen:
                raise ModelError(
                    f"the node {node_label(node)!r} makes {name!r}, which exists already; export the model again"
                )
            if name:
                seen.add(name)


def _sort(graph: GraphProto, known: set[str]) -> None:
    """Order nodes so that every tensor is computed before it is read; keep the given order where possible."""
    nodes = list(graph.node)
    made_by = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs: list[set[int]] = []
    for node in nodes:
        wanted = [name for name in reads(node) if name not in known]
        missing = next((name for name in wanted if name not in made_by), None)
        if missing is not None:
            raise ModelError(
                f"the node {node_label(node)!r} reads {missing!r}, which nothing makes; export the model again"
            )
        needs.append({made_by[name] for name in wanted})
    if all(max(need, default=-1) < index for index, need in enumerate(needs)):
        return
    replace_nodes(graph, [nodes[index] for index in _order(needs, nodes)])


def _order(needs: list[set[int]], nodes: list[NodeProto]) -> Iterator[int]:
    """Yield the places of nodes, each behind those that it needs, and else as they were."""
    sorter = TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = node_label(nodes[min(error.args[1])])
        raise ModelError(f"the node {stuck!r} is in a circle: it reads what follows from its own output") from error
    ready = [*sorter.get_ready()]
    heapq.heapify(ready)
    while ready:
        place = heapq.heappop(ready)
        yield place
        sorter.done(place)
        for freed in sorter.get_ready():
            heapq.heappush(ready, freed)


def _name_once(graph: GraphProto) -> None:
    """Number repeated node names, since the runtime refuses them."""
    given = {node.name for node in graph.node}
    seen: set[str] = set()
    for node in graph.node:
        if node.name and node.name in seen:
            node.name = unique(node.name, given)
        if node.name:
            seen.add(node.name)
        for _, body in bodies(node):
            _name_once(body)


def _name_results(graph: GraphProto, taken: set[str]) -> None:
    """Name the results that a node leaves out among as many as it likes: ONNX Runtime ends the process on them."""
    for node in graph.node:
        if node.op_type in _ANY_NUMBER:
            node.output[:] = [name or unique(f"{node.op_type}_left_out", taken) for name in node.output]
        for _, body in bodies(node):
            _name_results(body, taken)
