"""Chains: supergroups that a config lists by their op types, such as `Conv+Relu`."""

from collections.abc import Collection, Iterable, Mapping

from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.linear import bias_of_add
from qsdk.core.patterns.supergroup import Supergroup


def is_chain(name: str) -> bool:
    """Return whether a supergroup's name lists op types."""
    return "+" in name


def find_chains(graph: Graph, names: Iterable[str], taken: Collection[int] = ()) -> Mapping[int, Supergroup]:
    """Return the supergroup of each op inside one of the chains. The longest chain from an op wins; none overlap.

    A chain follows tensors that have one reader and do not leave the model. `MatMul+Add` means a linear layer: the Add
    must add a bias.
    """
    by_head: dict[str, list[list[str]]] = {}
    for name in names:
        types = name.split("+")
        by_head.setdefault(types[0], []).append(types)
    for chains in by_head.values():
        chains.sort(key=len, reverse=True)
    result: dict[int, Supergroup] = {}
    for head, op in enumerate(graph.ops):
        if head in result or head in taken:
            continue
        for types in by_head.get(op.type, []):
            ops = _follow(graph, head, types)
            if ops and not any(member in result or member in taken for member in ops):
                result.update(dict.fromkeys(ops, Supergroup(tuple(ops), "+".join(types))))
                break
    return result


def _follow(graph: Graph, head: int, types: list[str]) -> list[int]:
    ops = [head]
    for wanted in types[1:]:
        before = graph.ops[ops[-1]]
        following = graph.sole_consumer(before.outputs[0]) if len(before.outputs) == 1 else None
        if following is None or graph.ops[following].type != wanted or graph.ops[following].domain != before.domain:
            return []
        if (before.type, wanted) == ("MatMul", "Add") and bias_of_add(graph, following) is None:
            return []
        ops.append(following)
    return ops
