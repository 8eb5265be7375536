"""Supergroups and near misses: the facts that matching finds and planning reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qsdk.core.numerics.spec import Role


@dataclass(frozen=True)
class Supergroup:
    """Ops that are quantized as one.

    Attributes:
        ops: their ids in topological order; the last one computes the group's output.
        name: such as `Conv+Relu` or `LayerNorm`.
        roles: stored tensor (root id) -> its role in the group, where the ops alone do not determine it.
        tensors: name in the pattern -> tensor that enters the group, such as `x`, `gamma` and `beta`.
        facts: name -> a fact noted by the pattern, such as the axes of a mean.
    """

    ops: tuple[int, ...]
    name: str
    roles: Mapping[int, Role] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NearMiss:
    """Ops that look like a supergroup and are none.

    Attributes:
        op: id of the op that would compute the group's output.
        pattern: name of the pattern, such as `LayerNorm`.
        reason: the first difference.
    """

    op: int
    pattern: str
    reason: str

    def __str__(self) -> str:
        return f"{self.pattern}-like, not fused: {self.reason}"


@dataclass(frozen=True)
class MatchResult:
    """The result of matching.

    Attributes:
        groups: op id -> the supergroup that contains it; other ops are absent.
        near_misses: in the order of their ops.
        masks: ids of computed tensors that only hide scores from a softmax (0 or a very negative number, minus
            infinity too): no grid serves them, so they stay float.
    """

    groups: Mapping[int, Supergroup]
    near_misses: tuple[NearMiss, ...] = ()
    masks: frozenset[int] = frozenset()
