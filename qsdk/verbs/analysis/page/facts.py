"""What the page of a report shows of one model, as plain frozen data gathered from what was measured."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from onnx_backend.proto.nodes import metadata
from qsdk.core.arrays import Array
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import tensor_dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Decision
from qsdk.core.precision.advice import SiteSample, decibels, noise_to_signal
from qsdk.core.report import Report
from qsdk.core.run_options import Run
from qsdk.core.site import owner_of
from qsdk.verbs.doors.choose import Sim, door_of

DRAWN = 60  # layers with pictures, the worst ones
_COMPUTED = 2  # computed sites of a layer that are drawn
_MOST = 0.8  # of the noise
_NEARLY_ALL = 0.9  # of the elements, or of the sites


@dataclass(frozen=True)
class SiteFacts:
    """A site: its precision, the reason for it, and its values where they were looked at.

    Attributes:
        op_type: of the op that computes the tensor, or reads it if it is stored.
        why: the sentence of `sim.explain`.
        elements: of a stored tensor; 0 for others.
        bits: of each of its values.
        encoding: None where it stays float or is quantized while the model runs.
        passes_through: its values are on the grid of another site already.
        fused: it lies inside ops that are quantized as one, so no grid is wanted for it.
        values: None where they were not looked at.
        clipped: share of the values beyond the range of the encoding; None where that cannot be known.
        sqnr_db: of the values on their grid, likewise.
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
    values: SiteSample | None = None
    clipped: float | None = None
    sqnr_db: float | None = None

    @property
    def stored(self) -> bool:
        """Return whether it is a weight or a bias."""
        return self.kind in ("weight", "bias")


@dataclass(frozen=True)
class LayerFacts:
    """A layer: the sites of one owner in graph order, and what they cost; None without data or profile.

    Attributes:
        share: of the noise that all layers cause at the outputs.
        shares: the same by kind, weights and activations.
        sqnr_db: of the outputs when this layer alone is quantized.
        ms: milliseconds in a runtime.
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
    def main_site(self) -> SiteFacts:
        """Return the weight, or the first site of a layer without one: its op and dtype are those of the layer."""
        return next((site for site in self.sites if site.kind == "weight"), self.sites[0])

    @property
    def op_type(self) -> str:
        """Return the type of the op that reads its weight, or else that computes its value."""
        return self.main_site.op_type

    @property
    def dtypes(self) -> str:
        """Return the dtypes of its weights and then its activations, such as `int4 / uint8`."""
        weights = dict.fromkeys(site.dtype for site in self.sites if site.kind == "weight")
        others = dict.fromkeys(site.dtype for site in self.sites if not site.stored and not site.fused)
        return " / ".join(", ".join(names) for names in (weights, others) if names) or self.sites[0].dtype

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
        return max((site.clipped for site in self.sites if site.clipped is not None), default=None)


@dataclass(frozen=True)
class Measured:
    """A model, as a sim and as it is stored with Q/DQ, and what was measured on it; None without data or profile.

    Attributes:
        name: of the file, or of the class of the module.
        sizes: of `onnx_backend.proto.sizes`.
        sensitivity: the rows of `qsdk.sensitivity`.
        sqnr_db: of the outputs.
        noise: what the SQNR counts, in words.
        profile: of `qsdk.analysis.profile`.
        findings: of `validate`; None for a sim.
        remarks: what a reader has to know about the numbers.
    """

    name: str
    sim: Sim
    file: ModelProto
    sizes: Report
    sensitivity: Report | None = None
    sqnr_db: float | None = None
    noise: str = "their quantization noise"
    profile: Report | None = None
    findings: Report | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFacts(Measured):
    """What the page shows of a model: what was measured, its layers in the order in which they run, and more.

    Attributes:
        sentence: the most important facts in words.
        noisy: names of the fewest layers that cause most of the noise; none without data.
        states: state -> number of tensors, as `coverage` counts them.
        float_reasons: reason -> the tensors that stay float for it.
    """

    sentence: str = ""
    layers: tuple[LayerFacts, ...] = ()
    noisy: Set[str] = frozenset()
    states: Mapping[str, int] = field(default_factory=dict)
    float_reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)


def model_facts(
    measured: Measured, data: Iterable[Any] | None, run: Run, beside: ModelFacts | None = None
) -> ModelFacts:
    """Return the facts about a model, with the values of its worst layers and of those with pictures in `beside`."""
    coverage = measured.sim.coverage()
    first = frozenset() if beside is None else frozenset(layer.name for layer in beside.layers if layer.drawn)
    layers = _with_values(measured.sim, _layers(measured, coverage), data, run, first)
    noisy = _noisy(layers)
    states = {state: int(coverage.summary[state]) for state in ("quantized", "tied", "float", "not_exercised")}
    reasons: dict[str, list[str]] = {}
    for row in coverage.rows:
        if row["state"] == "float":
            reasons.setdefault(_reason(str(row["reason"])), []).append(str(row["site"]))
    slow = () if measured.profile is None else (measured.profile.summary.get("noisy"),)
    remarks = (*measured.remarks, *(f"Milliseconds: {said}." for said in slow if said))
    return ModelFacts(
        **{**vars(measured), "remarks": remarks},
        sentence=_sentence(measured, layers, len(noisy)),
        layers=tuple(layers),
        noisy=noisy,
        states={state.replace("_", " "): count for state, count in states.items() if count or state == "quantized"},
        float_reasons=dict(sorted(reasons.items(), key=lambda item: -len(item[1]))),
    )


def _sentence(found: Measured, layers: Sequence[LayerFacts], noisy: int) -> str:
    """Return the sentence at the top: precision, size, noise, and how few layers cause it."""
    label = _precision([site for layer in layers for site in layer.sites])
    if label is None:
        return "Nothing is quantized."
    parts = [label, f"a file {1.0 / found.sizes.summary['ratio']:.1f} times smaller than in float32"]
    if found.sqnr_db is not None:
        parts.append(f"outputs {found.sqnr_db:.1f} dB above {found.noise} (SQNR)")
    text = ", ".join(parts)
    text = text[0].upper() + text[1:]
    if not noisy:
        return f"{text}."
    few = f"one layer of {len(layers)} causes" if noisy == 1 else f"{noisy} of {len(layers)} layers cause"
    return f"{text}; {few} {100 * _MOST:.0f} % of the noise."


def _precision(sites: Sequence[SiteFacts]) -> str | None:
    """Return the precision in the field's short form, such as `W4A8`; with `mostly` where it is mixed."""
    weights, activations = _bits([s for s in sites if s.kind == "weight"]), _bits([s for s in sites if not s.stored])
    if not weights and not activations:
        return None
    label = f"W{weights.most_common(1)[0][0]}" if weights else "float weights, "
    label += f"A{activations.most_common(1)[0][0]}" if activations else ", float activations"
    counts = [count for count in (weights, activations) if count]
    mixed = any(max(count.values()) < _NEARLY_ALL * count.total() for count in counts)
    return f"mostly {label}" if mixed else label


def _bits(sites: Sequence[SiteFacts]) -> Counter[int]:
    """Return the bits of quantized sites, and what they count for: elements of weights, or one each."""
    found: Counter[int] = Counter()
    for site in sites:
        dtype = tensor_dtype_named(site.dtype)
        if dtype.is_quantized:
            found[dtype.bits] += max(site.elements, 1)
    return found


def _noisy(layers: Sequence[LayerFacts]) -> Set[str]:
    """Return the names of the fewest layers that cause most of the noise; none without data."""
    found: set[str] = set()
    reached = 0.0
    for layer in sorted(layers, key=lambda layer: -(layer.share or 0.0)):
        if not layer.share or reached >= _MOST:
            break
        found.add(layer.name)
        reached += layer.share
    return found


def _layers(found: Measured, coverage: Report) -> list[LayerFacts]:
    """Return the layers without values, in the order in which they run."""
    encodings, rows = found.sim.encodings, {row["site"]: row for row in coverage.rows}
    stored = _stored_dtypes(found.file)
    sites: dict[str, list[SiteFacts]] = {}
    for site, decision in found.sim.plan.decisions.items():
        facts = _site(decision, rows[site], found.sim.explain(site), encodings.get(site), stored.get(site))
        sites.setdefault(owner_of(site), []).append(facts)
    noise = {} if found.sensitivity is None else _noise_of(found.sensitivity)
    places = _places(found.sim.graph)
    times: Counter[str] = Counter()
    for row in () if found.profile is None else found.profile.rows:
        times[str(row["layer"])] += row["ms"]
    return [
        LayerFacts(owner, tuple(sites[owner]), **noise.get(owner, {}), ms=times.get(owner))
        for owner in sorted(sites, key=lambda owner: min(places.get(site.site, (1, 0)) for site in sites[owner])[1])
    ]


def _stored_dtypes(file: ModelProto) -> dict[str, str]:
    """Return site -> the dtype of the codes that the file stores: 4 bits may take 8."""
    types = {tensor.name: TensorProto.DataType.Name(tensor.data_type).lower() for tensor in file.graph.initializer}
    pairs = [node for node in file.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in types]
    return {metadata(node).get("qsdk.site", ""): types[node.input[0]] for node in pairs}


def _site(
    decision: Decision, row: Mapping[str, Any], why: str, encoding: Encoding | None, container: str | None
) -> SiteFacts:
    stored = decision.kind in ("weight", "bias")
    sizes = [size for size in decision.shape or () if isinstance(size, int)]
    dtype = tensor_dtype_named(row["dtype"])
    return SiteFacts(
        site=decision.site,
        kind=decision.kind,
        op_type=decision.op_type,
        state=str(row["state"]),
        dtype=dtype.name,
        granularity=str(row["granularity"]),
        why=why,
        elements=math.prod(sizes) if stored else 0,
        bits=tensor_dtype_named(container or str(dtype.container)).bits,
        encoding=encoding,
        passes_through=decision.passes_through,
        fused=decision.spec is None and decision.reason.startswith("inside "),
    )


def _places(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return for each site the place of its op, behind a number that says how well that places the layer.

    That is the op that computes the value, before the first that reads a stored tensor: it may be a Transpose at the
    very beginning.
    """
    found = {}
    for site, tensor in graph.sites.items():
        if tensor in graph.producer:
            found[site] = (0, graph.producer[tensor])
        elif graph.tensors[tensor].constant:
            found[site] = (1, min(graph.consumers[tensor], default=0))
        else:
            found[site] = (0, -1)  # an input
    return found


def _noise_of(sensitivity: Report) -> dict[str, dict[str, Any]]:
    """Return by layer: its share of the noise, the shares of its weights and activations, and the SQNR of both."""
    found: dict[str, dict[str, Any]] = {}
    noise: Counter[str] = Counter()
    for row in sensitivity.rows:
        layer = found.setdefault(row["layer"], {"share": 0.0, "shares": {}})
        layer["share"] += row["share"]
        layer["shares"][row["kind"]] = row["share"]
        noise[row["layer"]] += 10.0 ** (-row["sqnr_db"] / 10.0)
    return {name: {**layer, "sqnr_db": decibels(noise[name])} for name, layer in found.items()}


def _with_values(
    sim: Sim, layers: Sequence[LayerFacts], data: Iterable[Any] | None, run: Run, first: Set[str]
) -> list[LayerFacts]:
    """Return the layers with the values of all their weights, and of the activations of `first` and the worst ones."""
    encodings = sim.encodings
    known: dict[str, dict[str, Any]] = {}  # by site, what was found of its values

    def note(site: str, sample: SiteSample, x: Array, encoding: Encoding | None) -> None:
        """Note a sample of values, of which `x` has the shape that the axis of the encoding counts in."""
        if sample.values.size:
            known[site] = {"values": sample}
            if encoding is not None:
                noise = noise_to_signal(x, encoding)
                known[site] |= {"clipped": _clipped(x, encoding), "sqnr_db": decibels(noise)}

    for site in (site.site for layer in layers for site in layer.sites if site.kind == "weight"):
        for name, x in sim.stored_floats([site]).items():  # one at a time, since large ones are read from their file
            sample = SiteSample()
            sample.add(weight := np.asarray(x, np.float32))
            note(name, sample, weight, encodings.get(name))

    def badness(layer: LayerFacts) -> tuple[bool, float, float]:
        least = min((known.get(site.site, {}).get("sqnr_db", math.inf) for site in layer.sites), default=math.inf)
        return layer.name not in first, -(layer.share or 0.0), least

    drawn = {layer.name for layer in sorted(layers, key=badness)[:DRAWN]}
    wanted = [
        site.site
        for layer in layers
        if layer.name in drawn
        for site in [s for s in layer.sites if not s.stored and not s.passes_through and s.encoding][:_COMPUTED]
    ]
    if data is not None and wanted:
        samples: defaultdict[str, SiteSample] = defaultdict(SiteSample)
        door_of(sim, run).visit(data, lambda site, x: samples[site].add(x), title="values", sites=wanted)
        for site, sample in samples.items():
            # a sample has lost its shape, so nothing but one scale for all of it can be compared
            one = encoding if (encoding := encodings.get(site)) is not None and encoding.axis is None else None
            note(site, sample, sample.values, one)
    return [
        replace(
            layer,
            sites=tuple(replace(site, **known.get(site.site, {})) for site in layer.sites),
            drawn=layer.name in drawn,
        )
        for layer in layers
    ]


def _reason(text: str) -> str:
    """Return the reason of a float tensor; a file that is opened for its page is quantized by no rule."""
    return "float in the file" if text.startswith("kept float32 by a rule") else text


def _clipped(x: Array, encoding: Encoding) -> float:
    """Return the share of values that are more than half a step beyond the ends of the grid."""

    def aligned(per_scale: Array) -> Array:
        return np.asarray(affine.align(per_scale, x.shape, encoding.axis, encoding.block_size))

    half = aligned(encoding.scale) / 2 if encoding.dtype.is_integer else 0.0
    beyond = (x > aligned(encoding.high) + half) | (x < aligned(encoding.low) - half)
    return float(np.mean(beyond))
