"""Adopting a Q/DQ file: the plan it must have come from."""

from collections.abc import Mapping
from typing import Any, cast

from onnx import ModelProto

from onnx_backend.export import ENCODINGS_KEY, HASH_KEY
from onnx_backend.marks import Opened
from onnx_backend.model import metadata
from onnx_backend.qdq_read import LITERAL_KEY
from qsdk.core.dtypes import dtype_named
from qsdk.core.encodings_file import loads
from qsdk.core.graph import Graph
from qsdk.core.planning.given import plan_as_given
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.spec import Kind

_ORIGIN = ("config", "patterns", "network")  # parts of a provenance that outlive being opened and exported


def adopted_plan(graph: Graph, opened: Opened) -> Plan:
    """The plan that a Q/DQ file must have come from: its encodings, and which biases are derived."""
    casts = {site: dtype_named(name) for site, name in opened.casts.items()}
    kinds = {site: cast(Kind, kind) for site, kind in opened.kinds.items() if kind}
    plan = plan_as_given(graph, opened.encodings, casts, kinds=kinds, dynamic=opened.dynamic)
    kept = [node for node in opened.model.graph.node if LITERAL_KEY in metadata(node)]
    reason = "int32 codes that no float32 stands for: they stay as the file has them"
    inside = (Decision(f"({node.output[0]})", node.op_type, "bias", None, reason) for node in kept)
    return Plan(plan.decisions, tuple(inside))


def provenance_kept(fresh: Mapping[str, Any], model: ModelProto) -> dict[str, Any]:
    """The provenance of an opened file that is exported again: config and network are still those it was made of.

    Args:
        fresh: of this export.
        model: marked; it has what its file said in its properties.

    Raises:
        FileFormatError: the text in the model cannot be read.
    """
    text = {entry.key: entry.value for entry in model.metadata_props}.get(ENCODINGS_KEY)
    said = {} if text is None else loads(text, "the encodings in the model").provenance
    kept = {name: said[name] if name in _ORIGIN else fresh[name] for name in said if name in _ORIGIN or name in fresh}
    return {**kept, **{name: value for name, value in fresh.items() if name not in kept}}


def without_origin(model: ModelProto) -> None:
    """Drop what a file said of its encodings, in place: it is the start of something else now."""
    kept = [entry for entry in model.metadata_props if entry.key not in (ENCODINGS_KEY, HASH_KEY)]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
