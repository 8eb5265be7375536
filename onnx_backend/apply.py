"""Apply given encodings to a float ONNX model: the sim of both, without data or config."""

from collections.abc import Callable, Iterable
from glob import escape

from onnx import ModelProto, numpy_helper

from onnx_backend.opening.from_float import open_unplanned
from onnx_backend.opening.plan_of_qdq import without_origin
from onnx_backend.passes.fold_batch_norm import may_fold
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import fake_quantize
from onnx_backend.proto.nodes import node_label
from onnx_backend.qdq.marks import mark
from onnx_backend.sim import OnnxSim
from qsdk.core.config.config import QuantConfig
from qsdk.core.encodings.match_to_model import MatchedEncodings, require_matched
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.from_encodings import owned_encodings, plan_as_given
from qsdk.core.planning.islands import with_given_islands
from qsdk.core.sims.state import SimState

NOT_MENTIONED = "the encodings file does not mention it"


def sim_with_encodings(
    source: ModelProto, place: Callable[[Graph], MatchedEncodings], where: str, *, strict: bool
) -> tuple[OnnxSim, MatchedEncodings]:
    """Open a float model, and quantize exactly the tensors that encodings are given for.

    A BatchNorm or an added constant beside a layer is folded, as it was when the encodings were found, unless they
    speak of the tensor that it reads.

    Args:
        source: the float model; it is not changed.
        place: matches the given encodings to the tensors of a graph.
        where: where these come from, for messages.
        strict: refuse encodings that no tensor takes.

    Raises:
        FileFormatError: entries that do not fit; the model cannot be read.
        ModelError: the model is quantized already, or cannot be raised.
    """
    model, graph, notes = open_unplanned(source, QuantConfig(), fold_batch_norm=False)
    placed = place(graph)
    stored = initializers(model.graph)
    foldable = [node for node in model.graph.node if may_fold(node, stored)]
    if foldable:
        spoken_of = {graph.tensors[graph.sites[site]].name for site in (*placed.encodings, *placed.casts)}
        read = {node_label(node): node.input[:1] if node.op_type != "Add" else node.input for node in foldable}
        kept = [label for label, names in read.items() if spoken_of.intersection(names)]
        model, graph, notes = open_unplanned(source, _keeping(kept))
        placed = place(graph)
    require_matched(placed, where, strict=strict)
    without_origin(model)
    _quantize_absorbed(model, graph, placed)
    plan = with_given_islands(graph, plan_as_given(graph, placed.encodings, placed.casts, missing=NOT_MENTIONED))
    state = SimState(None, plan, owned_encodings(plan, placed.encodings))
    return OnnxSim.from_state(mark(model, graph, in_place=True), state, notes), placed


def _quantize_absorbed(model: ModelProto, graph: Graph, placed: MatchedEncodings) -> None:
    """Replace stored rows, in place, by the values that a lookup in the quantized table returns."""
    stored = initializers(model.graph)
    for encoding, site in placed.absorbed.values():
        tensor = stored[graph.tensors[graph.sites[site]].name]
        tensor.CopyFrom(numpy_helper.from_array(fake_quantize(encoding, array(tensor)), tensor.name))


def _keeping(owners: Iterable[str]) -> QuantConfig:
    """Return a config that keeps these BatchNorms and Adds from being folded."""
    config = QuantConfig()
    for owner in owners:
        config = config.skip(escape(owner))
    return config
