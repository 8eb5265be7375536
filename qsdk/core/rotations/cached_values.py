"""Values of attention in a cache of keys and values: turned where they enter, they must be turned where they leave.

A rotation of each head's vector commutes with the Concat along the tokens, so a cache may hold turned values, as long
as all that it hands from step to step is turned alike.
"""

from collections.abc import Mapping

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SELECTIONS
from qsdk.core.planning.ties import find_caches, keeps_grid
from qsdk.core.scaling.channels import Ids


def cached_tensors(graph: Graph) -> Mapping[int, int]:
    """Return the tensors that hold values of a cache: tensor id -> the Concat that extends it.

    What is cut out of one tensor, as queries, keys and values are of a layer for all of them, goes separate ways.
    """
    movers = (index for index, op in enumerate(graph.ops) if keeps_grid(graph, op))
    return find_caches(graph, [index for index in movers if graph.ops[index].type not in SELECTIONS])


def edges_of_caches(graph: Graph, cached: Mapping[int, int], members: Mapping[int, Ids]) -> dict[int, list[int]]:
    """Return the inputs and outputs of the graph for each cache that a stream enters, by its Concat."""
    entered = {cached[tensor] for tensor in (*graph.inputs, *graph.outputs) if tensor in cached and tensor in members}
    result: dict[int, list[int]] = {concat: [] for concat in sorted(entered)}
    for tensor in (*graph.inputs, *graph.outputs):
        if cached.get(tensor) in result:
            result[cached[tensor]].append(tensor)
    return result


def obstacle_in_caches(graph: Graph, edges: Mapping[int, list[int]], members: Mapping[int, Ids]) -> str:
    """Return why a cache cannot hold a stream as it is turned, or ""."""
    for tensors in edges.values():
        forms = {_form(members[tensor]) for tensor in tensors if tensor in members}
        name = graph.tensors[tensors[-1]].site or graph.tensors[tensors[-1]].name
        if len(forms) > 1 or any(tensor not in members for tensor in tensors):
            return f"{name}: what comes out of a cache has other channels than what goes into it"
    return ""


def _form(ids: Ids) -> tuple[tuple[int, ...], bytes]:
    return ids.shape, ids.tobytes()
