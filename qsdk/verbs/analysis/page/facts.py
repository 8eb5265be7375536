"""What the page of a report shows, as plain frozen data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ValueFacts:
    """The values of a site beside its encoding.

    Attributes:
        low: the smallest value.
        high: the largest value.
        sample: at most 32,768 of the values, taken evenly.
        clipped: share of the values that lie beyond the range of the encoding; None where that is not known.
        sqnr_db: of these values on their grid; None where that is not known.
    """

    low: float
    high: float
    sample: FloatArray
    clipped: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class SiteFacts:
    """A site: its precision, the reason for it, and its values where they were looked at.

    Attributes:
        site: its name.
        kind: weight, bias, activation, input or output.
        op_type: of the op that computes the tensor, or reads it if it is stored.
        state: quantized, tied, float or not exercised.
        dtype: of the site.
        granularity: of its encoding; "" without one.
        why: the sentence of `sim.explain`.
        elements: of a stored tensor; 0 for others.
        bits: of each of its values.
        encoding: None where it stays float or is quantized while the model runs.
        passes_through: its values are on the grid of another site already.
        fused: it lies inside ops that are quantized as one, so no grid is wanted for it.
        values: None where they were not looked at.
    """

    site: str
    kind: str
    op_type: str
    state: str
    dtype: str
    granularity: str
    why: str
    elements: int
    bits: int
    encoding: Encoding | None
    passes_through: bool
    fused: bool
    values: ValueFacts | None = None

    @property
    def stored(self) -> bool:
        """Return whether it is a weight or a bias."""
        return self.kind in ("weight", "bias")


@dataclass(frozen=True)
class LayerFacts:
    """A layer: the sites of one owner, and what they cost.

    Attributes:
        name: the owner.
        sites: in graph order.
        share: of the noise that all layers cause at the outputs; None without data.
        shares: the same by kind, weights and activations.
        sqnr_db: of the outputs when this layer alone is quantized; None without data, or where it is float.
        ms: milliseconds in a runtime; None where not profiled.
        drawn: whether the page has pictures of its values.
    """

    name: str
    sites: tuple[SiteFacts, ...]
    share: float | None = None
    shares: Mapping[str, float] | None = None
    sqnr_db: float | None = None
    ms: float | None = None
    drawn: bool = False

    @property
    def op_type(self) -> str:
        """Return the type of the op that reads its weight, or else that computes its value."""
        return next((s.op_type for s in self.sites if s.kind == "weight"), self.sites[0].op_type)

    @property
    def dtypes(self) -> str:
        """Return the dtypes of its weights and then its activations, such as `int4 / uint8`."""
        weights = dict.fromkeys(site.dtype for site in self.sites if site.kind == "weight")
        others = dict.fromkeys(site.dtype for site in self.sites if not site.stored and not site.fused)
        return " / ".join(", ".join(names) for names in (weights, others) if names) or self.sites[0].dtype

    @property
    def main_site(self) -> SiteFacts:
        """Return the weight, or the first site of a layer without one: its dtype colours the layer."""
        return next((site for site in self.sites if site.kind == "weight"), self.sites[0])

    @property
    def bytes(self) -> int:
        """Return the bytes of the codes and floats that it stores, without scales."""
        return sum(-(-site.elements * site.bits // 8) for site in self.sites if site.stored)

    @property
    def elements(self) -> int:
        """Return the number of its stored values."""
        return sum(site.elements for site in self.sites)

    @property
    def clipped(self) -> float | None:
        """Return the largest share of clipped values among its sites; None where that is not known."""
        found = [site.values.clipped for site in self.sites if site.values and site.values.clipped is not None]
        return max(found, default=None)


@dataclass(frozen=True)
class ModelFacts:
    """A model: its layers in the order of the network, and facts about the whole.

    Attributes:
        name: of the file, or of the class of the module.
        sentence: the most important facts in words.
        layers: in the order in which they run.
        sizes: of `onnx_backend.proto.sizes`.
        sqnr_db: of the outputs; None without data.
        states: state -> number of tensors, as `coverage` counts them.
        float_reasons: reason -> the tensors that stay float for it.
        findings: rows of `validate`; None for a sim.
        ms: milliseconds of a run; None where not profiled.
        runtime: in which that was measured; "" where not profiled.
        remarks: what a reader has to know about the numbers.
    """

    name: str
    sentence: str
    layers: tuple[LayerFacts, ...]
    sizes: Report
    sqnr_db: float | None
    states: Mapping[str, int]
    float_reasons: Mapping[str, Sequence[str]]
    findings: Sequence[Mapping[str, Any]] | None
    ms: float | None
    runtime: str
    remarks: Sequence[str]

    @property
    def worst_share(self) -> float:
        """Return the largest share of the noise that one layer causes."""
        return max((layer.share or 0.0 for layer in self.layers), default=0.0)
