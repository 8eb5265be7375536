"""Plans: the decision for every tensor, and the reason. Plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.spec import Kind, Spec
from qsdk.core.patterns.supergroup import Supergroup

#: the `rule` of a decision that follows from the ranges of a calibration (`qsdk.core.ranges.too_coarse`)
BY_CALIBRATION = "the calibration"
OF_CACHE = "keys and values of the cache"


class Turns(NamedTuple):
    """Pairs of values that turn with the position of a token.

    Attributes:
        layout: of n values in pairs: `halves` (i, i + n/2), or `pairs` (i, i + 1).
        size: n; the first ones along the axis.
        axis: that they lie along, counted from the last one.
    """

    layout: str
    size: int
    axis: int = -1


@dataclass(frozen=True)
class Decision:
    """The plan's entry for one site.

    Attributes:
        site: its name; in parentheses where the tensor has none (inside an op, or a scalar).
        op_type: of the op that computes the tensor, or reads it if it is stored.
        kind: weight, bias, activation, input or output.
        spec: how it is to be quantized, or None where it stays float.
        reason: why.
        rule: the rule that decided, or "default".
        tied_to: the site whose encoding it shares, or None.
        passes_through: its values are already on the grid of `tied_to`, so quantizing again changes nothing.
        bias_of: `(input site, weight site)` whose scales multiply to a bias's scale.
        shape: of the tensor, where known.
        tensor_type: float type of the tensor in the model.
        computes_in: the narrow float type in which the op computes that makes the tensor (`planning.islands`), or "".
        turns: which values turn with the position of a token (`planning.turning`): their range is for every position.
        input_block: of a weight whose layers round their float input to int8: the input channels of each scale.
    """

    site: str
    op_type: str
    kind: Kind
    spec: Spec | None
    reason: str
    rule: str = "default"
    tied_to: str | None = None
    passes_through: bool = False
    bias_of: tuple[str, str] | None = None
    shape: tuple[int | str | None, ...] | None = None
    tensor_type: str = "float32"
    computes_in: str = ""
    turns: Turns | None = None
    input_block: int | None = None

    @property
    def quantized(self) -> bool:
        """Return whether the site has an encoding (its own, shared or derived)."""
        return self.spec is not None and self.spec.dtype.is_quantized and not self.spec.dynamic

    @property
    def dynamic(self) -> bool:
        """Return whether the site is quantized with a range found while the model runs."""
        return self.spec is not None and bool(self.spec.dynamic)

    @property
    def tied_dynamically(self) -> bool:
        """Return whether the site only holds values of `tied_to`, which is quantized dynamically."""
        return self.spec is None and self.tied_to is not None

    @property
    def state(self) -> str:
        """Return `quantized`, `tied` or `float`."""
        if self.tied_to:
            return "tied"
        return "quantized" if self.quantized or self.dynamic else "float"

    @property
    def encoding_site(self) -> str:
        """Return the site that owns the encoding."""
        return self.tied_to or self.site


@dataclass(frozen=True)
class Plan:
    """The decision for each site, in graph order.

    Attributes:
        decisions: by site.
        inside: those for tensors without a site.
        groups: op of the graph -> the supergroup that it is quantized in. Not saved: it follows from graph and config.
    """

    decisions: Mapping[str, Decision]
    inside: tuple[Decision, ...] = ()
    groups: Mapping[int, Supergroup] = field(default_factory=dict, compare=False, repr=False)

    def calibrated_sites(self) -> list[str]:
        """Return the sites whose activation ranges must be observed."""
        return [d.site for d in self.decisions.values() if d.quantized and d.kind not in ("weight", "bias")]

    def only_weights(self) -> bool:
        """Return whether nothing that is computed is quantized, but for keys and values of a cache."""
        computed = (d for d in self.decisions.values() if d.kind not in ("weight", "bias"))
        owners = (self.decisions[d.encoding_site] for d in computed if d.quantized or d.dynamic)
        return all(owner.reason == OF_CACHE for owner in owners)


def casts_of(plan: Plan) -> dict[str, DType]:
    """Return float16 or bfloat16 for each site that is stored in one of them, by site."""
    specs = {site: decision.spec for site, decision in plan.decisions.items()}
    return {site: spec.dtype for site, spec in specs.items() if spec is not None and spec.dtype.kind == "float"}
