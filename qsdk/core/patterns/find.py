"""Supergroups: ops quantized as one, matched by structure. Inside one, only input, weights and output are quantized.

`Pattern`, `op`, `any_of`, `stored`, `number` and `product` of `qsdk.core.patterns.terms` describe a custom group.
"""

from collections.abc import Mapping, Sequence

from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.activations import ACTIVATIONS
from qsdk.core.patterns.attention import ATTENTION, mask_tensors
from qsdk.core.patterns.linear import linear_groups
from qsdk.core.patterns.match import PartialMatch, PatternMatcher
from qsdk.core.patterns.norms import NORMS
from qsdk.core.patterns.supergroup import MatchResult, NearMiss, Supergroup
from qsdk.core.patterns.terms import Pattern, possible

#: the patterns that come with qsdk, the preferred one first
PATTERNS: tuple[Pattern, ...] = (*NORMS, *ACTIVATIONS, *ATTENTION)


def match_supergroups(graph: Graph, patterns: Sequence[Pattern] = PATTERNS) -> MatchResult:
    """Return the supergroups of a graph, and the near misses; of the patterns, the preferred one comes first.

    Patterns are tried from the last op to the first, so that the largest group wins; then layers are joined with the
    activation behind them. A tensor that leaves the model or that another op reads is never inside a group.
    """
    matcher, anchored = PatternMatcher(graph), _by_anchor(graph, patterns)
    groups: dict[int, Supergroup] = {}
    of_pattern: dict[int, str] = {}
    misses: list[PartialMatch] = []
    for op_id in (index for index in reversed(range(len(graph.ops))) if graph.ops[index].outputs):
        for pattern in anchored.get(graph.ops[op_id].type, ()) if op_id not in groups else ():
            result = matcher.at(pattern, op_id)
            if isinstance(result, PartialMatch):
                misses.append(result)
            elif result is not None and not any(member in groups for member in result.ops):
                groups.update(dict.fromkeys(result.ops, result))
                of_pattern.update(dict.fromkeys(result.ops, pattern.name))
                break
    groups.update(linear_groups(graph, groups))
    return MatchResult(groups, _worth_reporting(misses, of_pattern), mask_tensors(graph, groups.values()))


def _by_anchor(graph: Graph, patterns: Sequence[Pattern]) -> dict[str, list[Pattern]]:
    """Return, by op type, the patterns that can end in it, without those that nothing in the graph can match."""
    types = frozenset(held.type for held in graph.ops)
    result: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        if possible(pattern.output, types) or pattern.is_near(types):
            for type in pattern.anchors:
                result.setdefault(type, []).append(pattern)
    return result


def _worth_reporting(misses: Sequence[PartialMatch], of_pattern: Mapping[int, str]) -> tuple[NearMiss, ...]:
    """Return one near miss per place, the one that matched most; none where the same pattern did match."""
    kept: list[PartialMatch] = []
    covered: set[int] = set()
    largest: dict[int, PartialMatch] = {}
    for miss in misses:
        known = largest.get(miss.near_miss.op)
        if known is None or len(miss.ops) > len(known.ops):
            largest[miss.near_miss.op] = miss
    for op_id in sorted(largest, reverse=True):
        miss = largest[op_id]
        matched = any(of_pattern.get(member) == miss.near_miss.pattern for member in miss.ops)
        if op_id not in covered and not matched:
            kept.append(miss)
            covered |= miss.ops
    return tuple(miss.near_miss for miss in reversed(kept))
