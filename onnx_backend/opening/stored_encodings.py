"""Read the encodings of an ONNX file: its Q/DQ nodes and casts, and the flags of the text that export embedded."""

from collections.abc import Mapping
from dataclasses import replace

from onnx import ModelProto, NodeProto

from onnx_backend.export import ENCODINGS_KEY
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.qdq.read import QdqPair, digest, frozen_digests, qdq_pairs, read_casts
from qsdk.core.encodings.qsdk_format import StoredEncodings, loads
from qsdk.core.encodings.tensors import TensorFacts, tensor_facts
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan

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
