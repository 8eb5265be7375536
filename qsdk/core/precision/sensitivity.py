"""Sensitivity: what the quantization of each layer alone costs at a model's outputs, as rows of a report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.precision.advice import decibels
from qsdk.core.report import Report
from qsdk.core.site import owner_of

#: of the noise of a row, where few random signs make up most of it: it may be more than 3 dB off
_UNCERTAIN = 0.3
#: dB; noise as strong as the signal saturates what gradients add up linearly
_BEYOND_FIRST_ORDER = 6.0

LayerKind = Literal["weights", "activations"]


@dataclass(frozen=True)
class LayerSites:
    """The sites of a layer that are quantized together: its weights and biases, or its activations."""

    layer: str
    kind: LayerKind
    sites: tuple[str, ...]
    dtype: str


@dataclass
class OutputNoise:
    """Noise and signal at the outputs of a model, as powers in one unit.

    Attributes:
        signal: power of the float outputs.
        all_quantized: power of their change when every site is quantized, from the model as it was given.
        stored: the part of that which is in the stored values by now, so that no site's quantization causes it.
        alone: site -> power of their change when it alone is quantized.
        variance: site -> variance of that power, where it is an estimate.
        without: layer -> power of their change when all but its sites are quantized, where that was measured.
        silent: the outputs that are 0 in all batches, which nothing can be compared with.
        samples: rows of the data that were used.
        samples_given: rows of the data.
    """

    signal: float = 0.0
    all_quantized: float = 0.0
    stored: float = 0.0
    alone: dict[str, float] = field(default_factory=dict)
    variance: dict[str, float] = field(default_factory=dict)
    without: dict[LayerSites, float] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    samples: int = 0
    samples_given: int = 0

    def of(self, layer: LayerSites) -> float:
        """Return the noise of a layer: the sum over its sites, whose rounding errors are independent."""
        return sum(self.alone.get(site, 0.0) for site in layer.sites)

    def relative_error(self, layer: LayerSites) -> float:
        """Return the standard deviation of the noise of a layer over that noise; 0 where it was measured."""
        variance = sum(self.variance.get(site, 0.0) for site in layer.sites)
        return variance**0.5 / self.of(layer) if variance > 0.0 else 0.0


def layers_of(plan: Plan, among: Collection[str] | None = None) -> list[LayerSites]:
    """Return the layers of a plan with quantized sites, in graph order.

    Args:
        plan: of the sim.
        among: the sites to consider; None for all.
    """
    found: dict[tuple[str, LayerKind], list[Decision]] = {}
    for site, decision in plan.decisions.items():
        if decision.spec is None or decision.passes_through or (among is not None and site not in among):
            continue
        kind: LayerKind = "weights" if decision.kind in ("weight", "bias") else "activations"
        found.setdefault((owner_of(site), kind), []).append(decision)
    return [
        LayerSites(layer, kind, tuple(d.site for d in decisions), _dtype_of(decisions))
        for (layer, kind), decisions in found.items()
    ]


def _dtype_of(decisions: Sequence[Decision]) -> str:
    names = [str(d.spec.dtype) for d in decisions if d.spec is not None and d.kind != "bias"]
    return ", ".join(dict.fromkeys(names)) or "int32"


def sensitivity_report(
    layers: Sequence[LayerSites], noise: OutputNoise, drops: Mapping[LayerSites, float], facts: Mapping[str, Any]
) -> Report:
    """Return the rows of all layers, worst first, and the summary.

    Args:
        layers: to be listed.
        noise: at the outputs.
        drops: layer -> what the metric loses with it alone quantized; empty without a metric.
        facts: more entries of the summary.
    """
    total = sum(noise.of(layer) for layer in layers) or 1.0
    rows, notes = [], dict[tuple[str, str], str]()
    for layer in layers:
        share = noise.of(layer) / total
        rest = noise.without.get(layer, noise.stored + (noise.all_quantized - noise.stored) * (1.0 - share))
        row: dict[str, Any] = {"layer": layer.layer, "kind": layer.kind, "dtype": layer.dtype}
        row |= {"sqnr_db": _sqnr(noise.of(layer), noise), "sqnr_db_without": _sqnr(rest, noise), "share": share}
        rows.append(row | ({"drop": drops[layer]} if layer in drops else {}) | {"sites": len(layer.sites)})
        notes[layer.layer, layer.kind] = _note(layer, noise)
    if any(notes.values()):
        rows = [{**row, "note": notes[row["layer"], row["kind"]]} for row in rows]
    rows.sort(key=lambda row: (-row.get("drop", 0.0), row["sqnr_db"]))
    worst = _fewest(sorted((row["share"] for row in rows), reverse=True), 0.8)
    summary = {"sqnr_db": _sqnr(noise.all_quantized, noise), "layers": len({row["layer"] for row in rows})}
    summary |= {"samples": noise.samples, "samples_given": noise.samples_given}
    if noise.silent:
        facts = {**facts, "not_counted": [f"output {index}: it is 0 in all batches used" for index in noise.silent]}
    return Report("Sensitivity", rows, {**summary, "rows_with_80_percent": worst, **facts})


def _note(layer: LayerSites, noise: OutputNoise) -> str:
    """Return what a reader must know of the estimate of a layer; nothing of one that is sure, or was measured."""
    error = noise.relative_error(layer)
    beyond = error > 0.0 and _sqnr(noise.of(layer), noise) < _BEYOND_FIRST_ORDER
    return "estimate is uncertain" if beyond or error > _UNCERTAIN else ""


def _sqnr(power: float, noise: OutputNoise) -> float:
    return decibels(max(power, 0.0) / noise.signal) if noise.signal > 0.0 else 0.0


def _fewest(shares: Sequence[float], enough: float) -> int:
    """Return how many of the largest shares make up that much."""
    reached = 0.0
    for count, share in enumerate(shares, start=1):
        reached += share
        if reached >= enough:
            return count
    return len(shares)
