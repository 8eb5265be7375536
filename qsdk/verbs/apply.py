"""The verb that combines a float ONNX model with given encodings."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from onnx import ModelProto

from onnx_backend.opening.encodings_of_file import stored_encodings
from onnx_backend.proto import model_io
from onnx_backend.sim import OnnxSim
from onnx_backend.sim_with_encodings import NOT_MENTIONED, sim_with_encodings
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.encodings.formats import read_any
from qsdk.core.encodings.provenance import GRAPH
from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.encodings.tensors import UNMATCHED, MatchedEncodings, match_by_name, match_by_structure, tensor_facts
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.graph_json import graph_from_text
from qsdk.core.read_files import read_text
from qsdk.core.report import Report
from qsdk.verbs.export import export
from qsdk.verbs.qdq_files import OnnxSource, opened_qdq, scales_beside

ABSORBED = "absorbed"


def apply_encodings(
    model: OnnxSource,
    encodings: OnnxSource,
    out: str | os.PathLike[str],
    *,
    opset: int = 21,
    dialect: AnyDialect = "onnxruntime",
    strict: bool = True,
) -> Report:
    """Quantize a float ONNX model with encodings that exist already, without data and without the PyTorch model.

    Tensors that the encodings do not mention stay float.

    Args:
        model: the float model, a path or an onnx model.
        encodings: a file of encodings, of qsdk or of AIMET (0.6.1, 1.0.0, 2.0.0, 2.1.0), whose entries name tensors or
            sites of the model; or a Q/DQ model (`.onnx`) of the same network, whose sites are matched by structure, or
            else by name.
        out: where the Q/DQ model is written, with its own encodings file beside it.
        opset: 13 to 25.
        dialect: see `qsdk.export`.
        strict: raise an error for entries that fit no tensor; False lists them in the report.

    Returns:
        Rows `site`, `name` (in the encodings), `state` (applied, float, absorbed: a table whose rows the model stores
        instead, or unmatched), `dtype`, `form` and `detail`.

    Raises:
        FileFormatError: a file cannot be read; or a list of all entries that fit no tensor, or whose number of scales
            is not that of the tensor's channels or blocks. Nothing is written.
        ModelError: the model is quantized already, or its opset cannot be converted.
        ConfigError: an opset or dialect that cannot be written.
        ExportError: the folder cannot be written.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, layer, x = tempfile.mkdtemp(), torch.nn.Linear(8, 4).eval(), torch.randn(64, 8)
        >>> _ = torch.onnx.export(layer, (x,), folder + "/float.onnx", verbose=False)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(layer, x), [x], progress=False)
        >>> _ = qsdk.export(sim, folder + "/model.onnx")  # and model.encodings.json beside it
        >>> files = [folder + name for name in ("/float.onnx", "/model.encodings.json", "/again.onnx")]
        >>> qsdk.apply_encodings(*files).summary["applied"]
        4
    """
    where = "the model with encodings" if isinstance(encodings, ModelProto) else os.fspath(encodings)
    sim, placed = sim_with_encodings(model_io.load(model), _matcher_for(encodings, where), where, strict=strict)
    exported = export(sim, out, opset=opset, dialect=dialect)
    return _report(exported, placed, where)


def _matcher_for(source: OnnxSource, where: str) -> Callable[[Graph], MatchedEncodings]:
    """Return the function that matches the encodings to tensors: by structure if they hold a graph, else by name."""
    if isinstance(source, ModelProto) or Path(source).suffix == ".onnx":
        opened = opened_qdq(source)
        file, graph = stored_encodings(opened), OnnxSim.from_qdq(opened).graph
        return lambda target: _match(file, graph, target)
    text = read_text(source, "give an encodings file or an .onnx model")

    def place(target: Graph) -> MatchedEncodings:
        read = read_any(text, where, tensor_facts(target), partial(scales_beside, source, text))
        if GRAPH not in read.provenance:
            return match_by_name(read, target)
        return _match(read, graph_from_text(read.provenance[GRAPH], where), target)

    return place


def _match(file: StoredEncodings, source: Graph, target: Graph) -> MatchedEncodings:
    """Match by structure; if a tool has changed that (dropped a Relu, say), by name, if all names are there."""
    placed = match_by_structure(file, source, target)
    named = match_by_name(file, target) if placed.problems else placed
    return placed if named.problems else named


def _report(exported: Report, placed: MatchedEncodings, where: str) -> Report:
    rows = []
    for row in exported.rows:
        name = placed.names.get(str(row["site"]), "")
        state = "applied" if name else "float"
        detail = "" if name else NOT_MENTIONED
        rows.append({"site": row["site"], "name": name, "state": state, "dtype": row["dtype"], "form": row["form"]})
        rows[-1]["detail"] = detail
    unplaced = {name: ("", UNMATCHED, why) for name, (_, why) in placed.problems.items()}
    for name, (_, site) in placed.absorbed.items():
        unplaced[name] = site, ABSORBED, f"the model stores {placed.names[site]} instead, which is quantized twice"
    for name, (site, state, why) in unplaced.items():
        rows.append({"site": site, "name": name, "state": state, "dtype": "", "form": "", "detail": why})
    states = ("applied", "float", ABSORBED, UNMATCHED)
    counts = {state: sum(row["state"] == state for row in rows) for state in states}
    return Report("Applied encodings", rows, {"encodings": where, **counts, **exported.summary})
