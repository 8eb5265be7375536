"""Replace an If whose condition is a constant by its branch."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, NodeProto, TensorProto, helper

from onnx_backend.passes.fold_constants import LARGEST, fold
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import unique
from onnx_backend.proto.nodes import constant_tensor, is_constant, node_label, replace_nodes
from onnx_backend.proto.subgraphs import bodies, rename_reads


def inline_decided_branches(
    node: NodeProto, small: Mapping[str, npt.NDArray[Any]], opsets: Mapping[str, int], taken: set[str]
) -> None:
    """Inline decided Ifs in the bodies of a node, in place: onnxruntime 1.31 crashes on one in another's branch.

    Args:
        node: an If, Loop or Scan.
        small: name -> value of the constants that are known outside.
        opsets: domain -> version.
        taken: every name of the model; new ones are added.
    """
    for _, graph in bodies(node):
        known = {**small, **_small(graph.initializer)}
        pending, kept = deque(graph.node), []
        while pending:
            inner = pending.popleft()
            if inner.op_type == "If" and inner.input[0] in known:
                nodes, stored = chosen_branch(inner, bool(np.any(known[inner.input[0]])), taken)
                graph.initializer.extend(stored)
                known.update(_small(stored))
                pending.extendleft(reversed(nodes))
                continue
            if is_constant(inner):
                known.update(_small([constant_tensor(inner)]))
            else:
                known.update(fold(inner, known, opsets, weights_stay=True) or {})
                inline_decided_branches(inner, known, opsets, taken)
            kept.append(inner)
        replace_nodes(graph, kept)


def chosen_branch(node: NodeProto, condition: bool, taken: set[str]) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes and stored tensors of the chosen branch, its outputs under the names of the If's.

    Args:
        node: an If.
        condition: which branch.
        taken: every name of the model; inner names are changed where they are taken, and added.
    """
    wanted = "then_branch" if condition else "else_branch"
    branch = GraphProto()
    branch.CopyFrom(next(graph for name, graph in bodies(node) if name == wanted))
    computed = dict.fromkeys(name for inner in branch.node for name in inner.output if name)
    renamed: dict[str, str] = {}
    copies = []
    for value, name in zip(branch.output, node.output, strict=True):
        if not name:
            continue
        if value.name in computed and value.name not in renamed:
            renamed[value.name] = name
        else:  # stored in the branch, from outside, or given twice
            copies.append((value.name, name))
    owner = node_label(node)
    for name in (*computed, *(tensor.name for tensor in branch.initializer)):
        if name not in renamed:
            renamed[name] = unique(f"{owner}/{name}", taken)
    for inner in branch.node:
        rename_reads(inner, renamed)
        inner.output[:] = [renamed.get(name, name) for name in inner.output]
        if inner.name:
            inner.name = unique(f"{owner}/{inner.name}", taken)
    for tensor in branch.initializer:
        tensor.name = renamed[tensor.name]
    nodes = list(branch.node)
    nodes += [helper.make_node("Identity", [renamed.get(old, old)], [new]) for old, new in copies]
    return nodes, list(branch.initializer)


def _small(tensors: Iterable[TensorProto]) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name: array(tensor) for tensor in tensors if math.prod(tensor.dims) <= LARGEST}
