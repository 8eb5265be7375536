"""Graphs without ops that change a tensor: such ops give their results as new tensors."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload


def make_functional(graph: fx.Graph) -> bool:
    """Let each op that changes its first input in place give a new tensor, which later nodes read instead.

    Returns:
        False, with the graph as it was, where that is not certain to be the same: the changed tensor is an input or
        has a view, the op changes anything else or has another dtype out of place, or a node holds a graph of its own.
    """
    nodes = list(graph.nodes)
    if any(node.op == "get_attr" or isinstance(node.target, HigherOrderOperator) for node in nodes):
        return False
    changing = [node for node in nodes if isinstance(node.target, OpOverload) and node.target._schema.is_mutable]
    if not changing:
        return True
    sharing: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if isinstance(node.meta.get("val"), Tensor):
            sharing[_storage(node)].append(node)
    forms = [_out_of_place(node) for node in changing]
    if None in forms or not all(_only_changed(sharing[_storage(node)], set(changing)) for node in changing):
        return False
    order = {node: place for place, node in enumerate(nodes)}
    for node, form in zip(changing, forms, strict=True):
        node.target = form
        _let_later_nodes_read(node, order)
    return True


def _let_later_nodes_read(node: fx.Node, order: Mapping[fx.Node, int]) -> None:
    before: Any = node.args[0]
    before.replace_all_uses_with(node, lambda user: order[user] > order[node])


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _only_changed(sharing: list[fx.Node], changing: set[fx.Node]) -> bool:
    """Return whether of the nodes that share a storage the first made it and each other changed the one before it."""
    first, *rest = sharing
    return first.op == "call_function" and first not in changing and all(node in changing for node in rest)


def _out_of_place(node: fx.Node) -> Any:
    """Return the op that gives as a new tensor what the node makes of its first input, None where there is none."""
    op: Any = node.target
    name, overload = op._opname, op._overloadname
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    form = getattr(packet, overload, None)
    if form is None or written != [True] + [False] * (len(written) - 1) or form._schema.is_mutable:
        return None
    if [a.name for a in form._schema.arguments] != [a.name for a in op._schema.arguments]:
        return None
    given: Any = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    args, kwargs = given
    with torch.no_grad():
        result = form(*args, **kwargs)
    before = args[0]
    return form if result.dtype == before.dtype and result.shape == before.shape else None
