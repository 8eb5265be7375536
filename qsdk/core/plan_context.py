"""What every step of planning asks: the graph, its supergroups and operands, and what the config says of a place."""

from collections.abc import Iterable

from qsdk.core.config import Place, QuantConfig
from qsdk.core.graph import Graph
from qsdk.core.operands import operands_of
from qsdk.core.patterns import find_supergroups
from qsdk.core.site import owner_of


class Context:
    """The facts that the steps of `make_plan` share."""

    def __init__(self, graph: Graph, config: QuantConfig) -> None:
        self.graph, self.config = graph, config
        self.groups = find_supergroups(graph)
        self.operands = {index: operands_of(graph, index) for index in range(len(graph.ops))}
        self.inputs, self.outputs = frozenset(graph.inputs), frozenset(graph.outputs)

    def result_place(self, tensor: int, op: int | None) -> Place:
        """Where an op's result (or a graph input, with no op) stands, for rules: a group answers as one."""
        facts = self.graph.tensors[tensor]
        if op is None:
            return Place((owner_of(facts.site or ""),), ("Input",), facts.dtype, facts.shape)
        members = self.groups[op].ops if op in self.groups else (op,)
        types = tuple(self.graph.ops[member].type for member in members)
        return Place(self._owners(members), types, facts.dtype, facts.shape)

    def stored_place(self, op: int, tensor: int) -> Place:
        """Where a stored tensor stands: with its own op alone, so that skipping a Relu leaves its Conv as it is."""
        facts = self.graph.tensors[tensor]
        return Place(self._owners((op,)), (self.graph.ops[op].type,), facts.dtype, facts.shape)

    def _owners(self, members: Iterable[int]) -> tuple[str, ...]:
        members = tuple(members)
        tensors = [t for member in members for t in self.graph.ops[member].outputs]
        tensors += [operand.root for member in members for operand in self.operands[member]]
        sites = [self.graph.tensors[t].site for t in tensors]
        return tuple(dict.fromkeys(owner_of(site) for site in sites if site is not None))
