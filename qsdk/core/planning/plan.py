"""Plans: what was decided for every tensor, and why. Plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass

from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.spec import Kind, Spec

#: the rule behind a decision that the ranges of a calibration made (`qsdk.core.ranges.too_coarse`)
BY_CALIBRATION = "the calibration"


@dataclass(frozen=True)
class Decision:
    """What the plan says about one site.

    Attributes:
        site: its name; in parentheses where the tensor has none (inside an op, or a scalar).
        op_type: the op that makes it, or reads it if it is stored.
        kind: weight, bias, activation, input or output.
        spec: what is wanted, or None where it stays float32.
        reason: why.
        rule: the rule that decided, or "default".
        tied_to: the site whose encoding it shares, or None.
        passes_through: its values are already on the grid of `tied_to`, so quantizing again changes nothing.
        bias_of: `(input site, weight site)` whose scales multiply to a bias's scale.
        shape: of the tensor, where known.
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

    @property
    def quantized(self) -> bool:
        """Whether the site has an encoding (its own, shared or derived)."""
        return self.spec is not None and self.spec.dtype.is_quantized and not self.spec.dynamic

    @property
    def dynamic(self) -> bool:
        """Whether the site is quantized with a range found while the model runs."""
        return self.spec is not None and self.spec.dynamic

    @property
    def tied_dynamically(self) -> bool:
        """Whether its values are those of `tied_to`, which is quantized dynamically: there is nothing to do here."""
        return self.spec is None and self.tied_to is not None

    @property
    def state(self) -> str:
        """`quantized`, `tied` or `float`."""
        if self.tied_to:
            return "tied"
        return "quantized" if self.quantized or self.dynamic else "float"

    @property
    def encoding_site(self) -> str:
        """The site that owns the encoding."""
        return self.tied_to or self.site


@dataclass(frozen=True)
class Plan:
    """Site -> decision, in graph order; `inside` holds the tensors that have no site."""

    decisions: Mapping[str, Decision]
    inside: tuple[Decision, ...] = ()

    def calibrated_sites(self) -> list[str]:
        """The sites whose activation ranges must be observed."""
        return [d.site for d in self.decisions.values() if d.quantized and d.kind not in ("weight", "bias")]


def casts_of(plan: Plan) -> dict[str, DType]:
    """Site -> float16 or bfloat16, for every site that is stored in one of them."""
    specs = {site: decision.spec for site, decision in plan.decisions.items()}
    return {site: spec.dtype for site, spec in specs.items() if spec is not None and spec.dtype.kind == "float"}
