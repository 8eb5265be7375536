"""What a supergroup is, and what a near miss is: facts that matching finds and planning reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qsdk.core.numerics.spec import Role


@dataclass(frozen=True)
class Supergroup:
    """Ops that run as one.

    Attributes:
        ops: their ids in topological order; the last one makes the group's output.
        name: such as `Conv+Relu` or `LayerNorm`.
        roles: stored tensor (root id) -> its part in the group, where the ops themselves do not say it.
        tensors: what the pattern calls them -> tensors that enter the group, such as `x`, `gamma` and `beta`.
        facts: name -> what the pattern noted, such as the axes of a mean.
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
        op: id of the op that would have made the group's output.
        pattern: name of the pattern, such as `LayerNorm`.
        reason: the first difference.
    """

    op: int
    pattern: str
    reason: str

    def __str__(self) -> str:
        return f"{self.pattern}-like, not fused: {self.reason}"


@dataclass(frozen=True)
class Found:
    """The result of matching.

    Attributes:
        groups: op id -> the supergroup it is inside; an op that stands alone is absent.
        near_misses: in the order of their ops.
        masks: ids of computed tensors that only hide scores from a softmax (0 or a very negative number, minus
            infinity too): no grid serves them, so they stay float.
    """

    groups: Mapping[int, Supergroup]
    near_misses: tuple[NearMiss, ...] = ()
    masks: frozenset[int] = frozenset()
