"""The differences between two plans of one network, in the spellings of both sides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerBlock, PerChannel, Spec
from qsdk.core.planning.plan import Decision, Plan


def compare_plans(
    left: Graph, left_plan: Plan, right: Graph, right_plan: Plan, mapping: Mapping[int, int]
) -> list[str]:
    """Return the differences between two plans about matched tensors; an empty list for the same plan.

    Compared are kind, dtype, granularity (its axis as the op sees it), symmetry, fixed range, state, and which tensors
    share an encoding. A tensor that only passes on the values of its class needs no quantizer, so it may as well have
    none (a view inside a function has no site); the same holds for tensors without a counterpart.
    """
    return _Comparison(left, left_plan, right, right_plan, mapping).run()


def _difference(left: str, right: str, what: str) -> str:
    return f"{left or '(none)'} | {right or '(none)'}: {what}"


@dataclass
class _Comparison:
    left: Graph
    left_plan: Plan
    right: Graph
    right_plan: Plan
    mapping: Mapping[int, int]

    def run(self) -> list[str]:
        """Return the differences of the matched tensors, then those of tensors that only one graph has."""
        mine, theirs = _by_tensor(self.left, self.left_plan), _by_tensor(self.right, self.right_plan)
        result = []
        for left_id, decision in mine.items():
            other = theirs.get(self.mapping[left_id]) if left_id in self.mapping else None
            if left_id not in self.mapping:
                result += _unmatched(decision, swapped=False)
            elif other is not None:
                result += self._differences(left_id, decision, other)
        matched = set(self.mapping.values())
        for right_id, decision in theirs.items():
            if right_id not in matched:
                result += _unmatched(decision, swapped=True)
        return result + self._other_classes(mine, theirs)

    def _differences(self, left_id: int, mine: Decision, theirs: Decision) -> list[str]:
        pairs: list[tuple[str, object, object]] = [("kind", mine.kind, theirs.kind)]
        handed_on = [d.passes_through or d.site.startswith("(") for d in (mine, theirs)]
        if not (all(handed_on) or (any(handed_on) and any(d.passes_through for d in (mine, theirs)))):
            specs = _as_read(self.left, left_id, mine.spec), _as_read(self.right, self.mapping[left_id], theirs.spec)
            pairs += [("state", mine.state, theirs.state), ("spec", *specs)]
            if mine.spec is None and theirs.spec is None:
                pairs.append(("reason", mine.reason, theirs.reason))
        return [_difference(mine.site, theirs.site, f"{what} {a} | {b}") for what, a, b in pairs if a != b]

    def _other_classes(self, mine: Mapping[int, Decision], theirs: Mapping[int, Decision]) -> list[str]:
        """Return the matched tensors that share an encoding on one side only."""
        result = []
        homes: dict[str, str] = {}
        back: dict[str, str] = {}
        for left_id, right_id in self.mapping.items():
            one, other = mine.get(left_id), theirs.get(right_id)
            if one is None or other is None or not (one.quantized and other.quantized):
                continue
            ours, yours = one.encoding_site, other.encoding_site
            if homes.setdefault(ours, yours) != yours or back.setdefault(yours, ours) != ours:
                result.append(_difference(one.site, other.site, f"shares the encoding of {ours} | of {yours}"))
        return result


def _unmatched(decision: Decision, *, swapped: bool) -> list[str]:
    """Return the difference for a tensor without a counterpart, if it needs a quantizer."""
    if not decision.quantized or decision.passes_through:
        return []
    sites = ("", decision.site) if swapped else (decision.site, "")
    return [_difference(*sites, f"{decision.state} ({decision.op_type}) on one side, absent on the other")]


def _by_tensor(graph: Graph, plan: Plan) -> dict[int, Decision]:
    inside = {decision.site: decision for decision in plan.inside}
    result = {}
    for index, tensor in enumerate(graph.tensors):
        decision = plan.decisions.get(tensor.site) if tensor.site is not None else inside.get(f"({tensor.name})")
        if decision is not None:
            result[index] = decision
    return result


def _as_read(graph: Graph, tensor: int, spec: Spec | None) -> Spec | None:
    """Return a spec with its axis as the op that reads the stored tensor sees it."""
    if spec is None or not isinstance(spec.granularity, PerChannel | PerBlock) or not graph.tensors[tensor].constant:
        return spec
    current, axis = tensor, spec.granularity.axis
    while True:
        moved = next((graph.ops[r] for r in graph.consumers[current] if graph.ops[r].type == "Transpose"), None)
        if moved is None:
            return replace(spec, granularity=replace(spec.granularity, axis=axis))
        rank = len(graph.tensors[current].shape or ())
        permutation = list(moved.attributes.get("perm") or reversed(range(rank)))
        current, axis = moved.outputs[0], permutation.index(axis)
