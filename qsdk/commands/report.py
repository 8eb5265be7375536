"""`qsdk report`: coverage, ranges, sizes and findings of a Q/DQ model, as text or as a page."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnx_backend.proto.model_io import load
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.sizes import sizes
from onnx_backend.sim_from_qdq import open_with_config
from onnx_backend.validation.validate import validate
from qsdk.commands.outputs import require_output
from qsdk.commands.page import page
from qsdk.commands.printing import show
from qsdk.core.atomic_files import write_text
from qsdk.core.config.config import w8a8
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report
from qsdk.verbs.qdq_files import checked_qdq


def run(options: Namespace) -> int:
    """Print the report of a model, or write it as a page."""
    if options.out:
        require_output(options.out)
    model = load(options.model)
    checked_qdq(load(model), options.model)  # raises an error for an invalid file, or the encodings file of another
    coverage = coverage_of(load(model), options.model)
    size, findings = sizes(model), validate(model)
    if options.out:
        facts = _facts(model, options.model)
        write_text(options.out, page(Path(options.model).name, facts, coverage, size, findings))
    facts = {**coverage.summary, **size.summary, **findings.summary, **({"page": options.out} if options.out else {})}
    if options.json or options.out:
        rows = coverage.rows if options.json else ()
        show(Report(coverage.title, rows, facts), as_json=options.json)
        return 0
    for report in (coverage, size, findings):
        print(f"{report}\n")
    return 0


def coverage_of(model: ModelProto, path: str | os.PathLike[str]) -> Report:
    """Return the coverage of a Q/DQ file, with the ends of each range and the smallest and largest scale.

    The file is opened with a config that keeps all other tensors float, so that these are listed too.

    Args:
        model: as loaded from the file; it is changed.
        path: of the file.
    """
    sim = open_with_config(model, path, w8a8().skip("*", optional=True))
    report, encodings = sim.coverage(), sim.encodings_where_ready()
    rows = []
    for row in report.rows:
        kept = row["state"] == "float" and str(row["reason"]).startswith("kept float32 by a rule")
        changes = {"reason": "float in the file"} if kept else {}
        rows.append({**row, **changes, **_range(encodings.get(row["site"]))})
    return Report(report.title, rows, report.summary)


def _range(encoding: Encoding | None) -> dict[str, Any]:
    if encoding is None:
        return {"low": None, "high": None, "smallest_scale": None, "largest_scale": None}
    wide = encoding.dtype.name == "int32"  # a bias, whose grid is far wider than its values
    return {
        "low": None if wide else float(encoding.low.min()),
        "high": None if wide else float(encoding.high.max()),
        "smallest_scale": float(encoding.scale.min()),
        "largest_scale": float(encoding.scale.max()),
    }


def _facts(model: ModelProto, path: str | os.PathLike[str]) -> dict[str, Any]:
    producer = f"{model.producer_name} {model.producer_version}".strip()
    return {
        "file": os.fspath(path),
        "bytes": Path(path).stat().st_size,
        "opset": opset_of(model),
        "IR version": model.ir_version,
        "nodes": len(model.graph.node),
        "producer": producer or "unknown",
    }
