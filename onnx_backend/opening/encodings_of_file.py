"""The encodings of an ONNX file, and the plan that it came from: its Q/DQ nodes and casts, and the embedded text."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from onnx import ModelProto, NodeProto

from onnx_backend.opening.read_graph import with_sites
from onnx_backend.proto.companion import ENCODINGS_KEY, FILE_KEY, HASH_KEY
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.model_io import drop_properties
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.marks import UnpackedQdq
from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.qdq.read import LITERAL_KEY, QdqPair, digest, frozen_digests, qdq_pairs, read_casts
from onnx_backend.workarounds.onnxruntime_barriers import OPTIONS_KEY
from qsdk.core.config.config import QuantConfig
from qsdk.core.encodings.provenance import GRAPH
from qsdk.core.encodings.qsdk_format import StoredEncodings, loads
from qsdk.core.encodings.tensors import TensorFacts, tensor_facts
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Kind
from qsdk.core.planning.from_encodings import plan_as_given
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.report import Report

FLOAT_IN_FILE = "float in the file"
_ORIGIN = ("config", "patterns", "network", GRAPH)  # parts of a provenance that outlive being opened and exported
UNMARKED = "/unmarked"  # suffix that `marks.mark` adds to the name of a tensor whose readers read its mark


def stored_encodings(model: ModelProto) -> StoredEncodings:
    """Read the encodings of a Q/DQ model from its nodes, frozen where the embedded text says so."""
    model = as_simulated(model)
    casts = {site: dtype_named(name) for site, name in read_casts(model).items()}
    found = qdq_pairs(model)
    text = _embedded(model)
    embedded = StoredEncodings({}) if text is None else text
    made_by = producers(model.graph.node)
    names = {place.site: _float_name(place, made_by) for place in found}
    kinds = {place.site: place.kind or ("weight" if place.quantize is None else "activation") for place in found}
    return StoredEncodings(
        with_flags(model, {place.site: place.encoding for place in found}),
        casts,
        embedded.provenance,
        {**{site: embedded.tensors[site] for site in casts if site in embedded.tensors}, **names},
        {**{site: embedded.kinds[site] for site in casts if site in embedded.kinds}, **kinds},
    )


def _float_name(place: QdqPair, made_by: Mapping[str, NodeProto]) -> str:
    """Return the name of a site's tensor in the float model."""
    if place.quantize is None:
        return (place.stored or place.site).removesuffix("_quantized")
    name = str(place.quantize.input[0])
    while name in made_by and metadata(made_by[name]).get("qsdk.site") == place.site:
        name = str(made_by[name].input[0])  # a Clip that holds the values inside a narrow grid
    return name.removesuffix(UNMARKED)


def float_facts(graph: Graph, plan: Plan) -> list[TensorFacts]:
    """Return the facts of a sim's tensors that encodings files need, under their names in the float model."""
    return [replace(found, name=found.name.removesuffix(UNMARKED)) for found in tensor_facts(graph, plan)]


def _embedded(model: ModelProto) -> StoredEncodings | None:
    text = metadata(model).get(ENCODINGS_KEY)
    return None if text is None else loads(text, "the encodings in the model")


def with_flags(model: ModelProto, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """Return the encodings of the nodes, frozen where the embedded text has the same one frozen."""
    text = _embedded(model)  # earlier files list every encoding there
    recorded = {} if text is None else text.encodings
    frozen = frozen_digests(model) | {site: digest(found) for site, found in recorded.items() if found.frozen}
    return {
        site: replace(encoding, frozen=True) if frozen.get(site) == digest(encoding) else encoding
        for site, encoding in encodings.items()
    }


def adopted_plan(graph: Graph, opened: UnpackedQdq) -> Plan:
    """Return the plan that a Q/DQ file must have come from: its encodings, and which biases are derived."""
    casts = {site: dtype_named(name) for site, name in opened.casts.items()}
    kinds = {site: cast(Kind, kind) for site, kind in opened.kinds.items() if kind}
    plan = plan_as_given(
        graph, opened.encodings, casts, kinds=kinds, dynamic=opened.dynamic, input_blocks=opened.input_blocks
    )
    kept = [node for node in opened.model.graph.node if LITERAL_KEY in metadata(node)]
    reason = "int32 codes that no float32 stands for: they stay as the file has them"
    inside = (Decision(f"({node.output[0]})", node.op_type, "bias", None, reason) for node in kept)
    return replace(plan, inside=tuple(inside))


def float_in_file(graph: Graph, plan: Plan) -> tuple[Decision, ...]:
    """Return a decision for every tensor that a Q/DQ file leaves float, with the reason."""
    plain = with_sites(replace(graph, tensors=[replace(tensor, site=None) for tensor in graph.tensors]))
    listed = {decision.site for decision in plan.inside}
    for index, tensor in enumerate(graph.tensors):
        root = graph.constant_root(index)
        if root not in (None, index) and graph.tensors[root].site is not None:
            listed.add(f"({tensor.name})")  # a weight that the file stores transposed
    sites = [
        tensor.site or (None if other.site is None or f"({tensor.name})" in listed else f"({other.site})")
        for tensor, other in zip(graph.tensors, plain.tensors, strict=True)
    ]
    tensors = [replace(tensor, site=site) for tensor, site in zip(graph.tensors, sites, strict=True)]
    wanted = make_plan(replace(graph, tensors=tensors), QuantConfig())
    return tuple(
        Decision(
            d.site,
            d.op_type,
            d.kind,
            None,
            d.reason if d.spec is None else FLOAT_IN_FILE,
            shape=d.shape,
            tensor_type=d.tensor_type,
        )
        for d in (*wanted.decisions.values(), *wanted.inside)
        if d.site not in plan.decisions and d.site not in listed
    )


def merge_provenance(fresh: Mapping[str, Any], model: ModelProto) -> dict[str, Any]:
    """Return the provenance of an opened file that is exported again; its config and network stay."""
    text = metadata(model).get(ENCODINGS_KEY)
    recorded = {} if text is None else loads(text, "the encodings in the model").provenance
    kept = {
        name: recorded[name] if name in _ORIGIN else fresh[name]
        for name in recorded
        if name in _ORIGIN or name in fresh
    }
    return {**kept, **{name: value for name, value in fresh.items() if name not in kept}}


def note_replaced_encodings(report: Report, adopted: Mapping[str, Encoding], found: Mapping[str, Encoding]) -> Report:
    """Return a calibration report that notes, by site, which encodings of the file were replaced."""
    moved = {site for site, encoding in adopted.items() if site in found and found[site] != encoding}
    note = "the file's own encoding was replaced; call sim.freeze(match) before calibrate to keep it"
    rows = [{**row, "note": note} if row["site"] in moved else row for row in report.rows]
    return Report(report.title, rows, {**report.summary, "adopted encodings replaced": len(moved)})


def without_origin(model: ModelProto) -> None:
    """Remove what a file records of its encodings, in place: it becomes the start of another model."""
    drop_properties(model, (ENCODINGS_KEY, FILE_KEY, HASH_KEY, OPTIONS_KEY))
