"""Gather what the page of a report shows of one model."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from onnx import ModelProto, TensorProto

from onnx_backend.proto.nodes import metadata
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import tensor_dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Decision
from qsdk.core.precision.advice import decibels
from qsdk.core.report import Report
from qsdk.core.site import owner_of
from qsdk.verbs.analysis.page.facts import LayerFacts, ModelFacts, SiteFacts, ValueFacts
from qsdk.verbs.analysis.page.sentence import sentence
from qsdk.verbs.analysis.page.values import computed_values, stored_values
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.doors.door import Forward

DRAWN = 60  # layers with pictures, the worst ones
_COMPUTED = 2  # computed sites of a layer that are drawn


@dataclass(frozen=True)
class Measured:
    """A model and what was measured on it before its page is made.

    Attributes:
        name: for the heading.
        sim: of the model; a file is opened as one.
        file: the model as it is stored, with Q/DQ.
        sizes: of the file.
        sensitivity: the rows of `qsdk.sensitivity`; None without data.
        sqnr_db: of the outputs; None without data.
        noise: what the SQNR counts, in words.
        profile: of `qsdk.profile`; None where nothing was timed.
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


def model_facts(
    found: Measured,
    data: Iterable[Any] | None,
    forward: Forward | None,
    progress: bool,
    beside: ModelFacts | None = None,
) -> ModelFacts:
    """Return the facts about a model, with the values of its worst layers.

    Args:
        found: the model and what was measured.
        data: batches, for the values of activations; None for weights alone.
        forward: calls the module on a batch.
        progress: show a progress bar.
        beside: the model that it is compared with, whose layers with pictures have them here too.
    """
    coverage = found.sim.coverage()
    first = frozenset() if beside is None else frozenset(layer.name for layer in beside.layers if layer.drawn)
    layers = _with_values(found.sim, _layers(found, coverage), data, forward, progress, first)
    states = {state: int(coverage.summary[state]) for state in ("quantized", "tied", "float", "not_exercised")}
    reasons: dict[str, list[str]] = {}
    for row in coverage.rows:
        if row["state"] == "float":
            reasons.setdefault(_reason(str(row["reason"])), []).append(str(row["site"]))
    return ModelFacts(
        name=found.name,
        sentence=sentence(layers, 1.0 / found.sizes.summary["ratio"], found.sqnr_db, found.noise),
        layers=tuple(layers),
        sizes=found.sizes,
        sqnr_db=found.sqnr_db,
        states={state.replace("_", " "): count for state, count in states.items() if count or state == "quantized"},
        float_reasons=dict(sorted(reasons.items(), key=lambda item: -len(item[1]))),
        findings=None if found.findings is None else found.findings.rows,
        ms=None if found.profile is None else float(found.profile.summary["ms"]),
        runtime="" if found.profile is None else str(found.profile.summary["runtime"]),
        remarks=(*found.remarks, *_noise_of_times(found.profile)),
    )


def _noise_of_times(profile: Report | None) -> list[str]:
    return [] if profile is None or "noisy" not in profile.summary else [f"Milliseconds: {profile.summary['noisy']}."]


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
    sim: Sim,
    layers: Sequence[LayerFacts],
    data: Iterable[Any] | None,
    forward: Forward | None,
    progress: bool,
    first: Set[str],
) -> list[LayerFacts]:
    """Return the layers with the values of all their weights, and of the activations of `first` and the worst ones."""
    encodings = sim.encodings
    values: dict[str, ValueFacts] = {}
    for site in (site.site for layer in layers for site in layer.sites if site.kind == "weight"):
        values |= stored_values(sim, [site], encodings)  # one at a time, since large ones are read from their file

    def badness(layer: LayerFacts) -> tuple[bool, float, float]:
        own = [values[s.site].sqnr_db for s in layer.sites if s.site in values]
        least = min((sqnr for sqnr in own if sqnr is not None), default=math.inf)
        return layer.name not in first, -(layer.share or 0.0), least

    drawn = {layer.name for layer in sorted(layers, key=badness)[:DRAWN]}
    wanted = [
        site.site
        for layer in layers
        if layer.name in drawn
        for site in [s for s in layer.sites if not s.stored and not s.passes_through and s.encoding][:_COMPUTED]
    ]
    if data is not None and wanted:
        values |= computed_values(sim, data, wanted, encodings, forward, progress)
    return [
        replace(
            layer,
            sites=tuple(replace(site, values=values.get(site.site)) for site in layer.sites),
            drawn=layer.name in drawn,
        )
        for layer in layers
    ]


def _reason(text: str) -> str:
    """Return the reason of a float tensor; a file that is opened for its page is quantized by no rule."""
    return "float in the file" if text.startswith("kept float32 by a rule") else text
