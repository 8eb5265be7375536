"""Supergroups: ops quantized as one, matched on structure; inside one, only input, weights and output are quantized.

`Pattern` with `op`, `any_of`, `stored`, `number` and `product` describes a group of one's own.
"""

from collections.abc import Mapping, Sequence

from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.activations import ACTIVATIONS
from qsdk.core.patterns.attention import ATTENTION
from qsdk.core.patterns.linear import bias_of_add, linear_groups
from qsdk.core.patterns.masks import mask_tensors
from qsdk.core.patterns.match import Miss, PatternMatcher
from qsdk.core.patterns.norms import NORMS
from qsdk.core.patterns.supergroup import Found, NearMiss, Supergroup
from qsdk.core.patterns.terms import (
    Captured,
    Input,
    Pattern,
    Stored,
    Term,
    amiss,
    any_of,
    number,
    op,
    possible,
    product,
    stored,
)

__all__ = [
    "Supergroup",
    "NearMiss",
    "Found",
    "PATTERNS",
    "find_supergroups",
    "match_supergroups",
    "bias_of_add",
    "Pattern",
    "Term",
    "Input",
    "Stored",
    "Captured",
    "op",
    "any_of",
    "amiss",
    "stored",
    "number",
    "product",
]

#: the patterns that come with qsdk, the preferred one first
PATTERNS: tuple[Pattern, ...] = (*NORMS, *ACTIVATIONS, *ATTENTION)


def find_supergroups(graph: Graph, patterns: Sequence[Pattern] = PATTERNS) -> Mapping[int, Supergroup]:
    """Map each op that is inside a supergroup to it; every other op stands alone and is absent."""
    return match_supergroups(graph, patterns).groups


def match_supergroups(graph: Graph, patterns: Sequence[Pattern] = PATTERNS) -> Found:
    """Find the supergroups of a graph, and what looks like one and is none.

    Patterns are tried from the last op to the first, so that the largest group wins; then layers take in the
    activation behind them. A tensor that leaves the model or that another op reads is never inside a group.

    Args:
        graph: read by either door.
        patterns: the preferred one first; one's own come before `PATTERNS`.
    """
    matcher, anchored = PatternMatcher(graph), _by_anchor(graph, patterns)
    groups: dict[int, Supergroup] = {}
    of_pattern: dict[int, str] = {}
    misses: list[Miss] = []
    for op_id in (index for index in reversed(range(len(graph.ops))) if graph.ops[index].outputs):
        for pattern in anchored.get(graph.ops[op_id].type, ()) if op_id not in groups else ():
            result = matcher.at(pattern, op_id)
            if isinstance(result, Miss):
                misses.append(result)
            elif result is not None and not any(member in groups for member in result.ops):
                groups.update(dict.fromkeys(result.ops, result))
                of_pattern.update(dict.fromkeys(result.ops, pattern.name))
                break
    groups.update(linear_groups(graph, groups))
    return Found(groups, _worth_reporting(misses, of_pattern), mask_tensors(graph, groups.values()))


def _by_anchor(graph: Graph, patterns: Sequence[Pattern]) -> dict[str, list[Pattern]]:
    """Op type -> the patterns that can end in it; those that no part of the graph can match are left out."""
    types = frozenset(held.type for held in graph.ops)
    found: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        if possible(pattern.output, types) or pattern.is_near(types):
            for type in pattern.anchors:
                found.setdefault(type, []).append(pattern)
    return found


def _worth_reporting(misses: Sequence[Miss], of_pattern: Mapping[int, str]) -> tuple[NearMiss, ...]:
    """Return one near miss for one place: that of the largest look, and none where the same pattern did match."""
    kept: list[Miss] = []
    covered: set[int] = set()
    largest: dict[int, Miss] = {}
    for miss in misses:
        known = largest.get(miss.said.op)
        if known is None or len(miss.ops) > len(known.ops):
            largest[miss.said.op] = miss
    for op_id in sorted(largest, reverse=True):
        miss = largest[op_id]
        matched = any(of_pattern.get(member) == miss.said.pattern for member in miss.ops)
        if op_id not in covered and not matched:
            kept.append(miss)
            covered |= miss.ops
    return tuple(miss.said for miss in reversed(kept))
