"""The steps that `autoquant` tries, in the order of their cost, and where each applies."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qsdk.core.numerics.spec import axis_of
from qsdk.core.planning.plan import Decision
from qsdk.verbs.bias import correct_bias
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.layers import adaround, gptq, seq_mse
from qsdk.verbs.quantize import calibrate
from qsdk.verbs.rotation.rotate import obstacle_to_rotating, rotate
from qsdk.verbs.scaling import equalize, smooth_quant

_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})


@dataclass(frozen=True)
class Step:
    """A call of a verb.

    Attributes:
        verb: the function.
        why_not: of a sim: why the step is left out, or "".
        options: keyword arguments.
        rounds: whether it rounds weights for good.
    """

    verb: Callable[..., Any]
    why_not: Callable[[Sim], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: bool = False

    @property
    def name(self) -> str:
        """Return the name in the report."""
        shown = " ".join(str(value) for key, value in self.options.items() if key != "seed")
        return f"{self.verb.__name__} {shown}".strip()

    def code(self, more: str) -> str:
        """Return the line of Python that takes the step, with more arguments at its end."""
        given = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"qsdk.{self.verb.__name__}(sim, data{given}{more})"

    def run(self, sim: Sim, data: Iterable[Any], options: Mapping[str, Any]) -> None:
        """Call the verb."""
        self.verb(sim, data, **self.options, **options)


def steps_to_try(seed: int) -> list[Step]:
    """Return all steps, the cheapest first."""
    return [
        *(Step(calibrate, _no_ranges, {"method": method}) for method in ("tf_enhanced", "mse", "percentile")),
        Step(rotate, _no_stream, {"seed": seed}),
        Step(equalize, _no_scale_per_tensor),
        Step(smooth_quant, _no_norms, {"alpha": "auto"}),
        Step(correct_bias, _no_weights_or_seq_mse, {"seed": seed}),
        Step(seq_mse, _no_narrow_weights, {"seed": seed}),
        Step(gptq, _no_narrow_weights, {"seed": seed}, rounds=True),
        Step(adaround, _no_narrow_weights, {"seed": seed}, rounds=True),
    ]


def _weights(sim: Sim) -> list[Decision]:
    return [d for d in sim.plan.decisions.values() if d.kind == "weight" and d.quantized]


def _no_weights_or_seq_mse(sim: Sim) -> str:
    """`seq_mse`, the next step where weights are narrow, shifts the same biases for a fifth more passes."""
    if not _weights(sim):
        return "no weight is quantized"
    return "" if _no_narrow_weights(sim) else "seq_mse shifts the same biases"


def _no_ranges(sim: Sim) -> str:
    return "" if sim.plan.calibrated_sites() else "no activation has a range"


def _no_scale_per_tensor(sim: Sim) -> str:
    alone = any(
        d.spec is not None and axis_of(d.spec.granularity) is None for d in _weights(sim) if d.op_type != "Gather"
    )
    return "" if alone else "every weight has a scale per channel"


def _no_norms(sim: Sim) -> str:
    found = any(d.op_type in _NORMS for d in sim.plan.decisions.values())
    return "" if found and _no_ranges(sim) == "" else "there is no normalization in front of a layer"


def _no_stream(sim: Sim) -> str:
    return _no_ranges(sim) or obstacle_to_rotating(sim)


def _no_narrow_weights(sim: Sim) -> str:
    frozen = {site for site, encoding in sim.encodings.items() if encoding.frozen}
    narrow = any(d.spec is not None and d.spec.dtype.bits < 8 and d.site not in frozen for d in _weights(sim))
    return "" if narrow else "no weight below 8 bits is left to round"
