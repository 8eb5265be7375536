"""`qsdk report`: coverage, ranges, sizes and findings of a Q/DQ model, as text or as a page."""

from argparse import Namespace
from typing import Any

from onnx import ModelProto

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.proto.sizes import file_bytes, sizes
from onnx_backend.runtimes.validate import validate
from qsdk.commands.batches import batches_of_options
from qsdk.commands.printing import require_output, show
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report
from qsdk.verbs.analysis.report import opened_file, report
from qsdk.verbs.qdq_files import OnnxSource, checked_qdq


def run(options: Namespace) -> int:
    """Print the report of a model, or write it as a page."""
    if options.out:
        return _write_page(options)
    for name in ("data", "random", "float", "against", "profile"):
        if getattr(options, name):
            raise ConfigError(f"--{name} is for the page; give --out FILE.html too")
    model = load(options.model)
    checked_qdq(load(model), options.model)  # raises an error for an invalid file, or the encodings file of another
    size = sizes(model, file_bytes(options.model, model))
    coverage, findings = coverage_of(load(model), options.model), validate(model)
    if options.json:
        facts = {**coverage.summary, **size.summary, **findings.summary}
        show(Report(coverage.title, coverage.rows, facts), as_json=True)
        return 0
    for part in (coverage, size, findings):
        print(f"{part.full()}\n")
    return 0


def _write_page(options: Namespace) -> int:
    require_output(options.out)
    model = load(options.model)
    data = batches_of_options(options, inputs_of(model)) if options.data or options.random else None
    found = report(
        options.model,
        options.out,
        data=data,
        float_model=options.float,
        against=options.against,
        profile=options.profile,
    )
    show(found, as_json=options.json)
    return 0


def coverage_of(model: ModelProto, source: OnnxSource) -> Report:
    """Return the coverage of a Q/DQ file, whose model is changed, with the ends of ranges and extremes of scales."""
    sim = opened_file(model, source)
    coverage, encodings = sim.coverage(), sim.encodings_where_ready()
    rows = []
    for row in coverage.rows:
        kept = row["state"] == "float" and str(row["reason"]).startswith("kept float32 by a rule")
        changes = {"reason": "float in the file"} if kept else {}
        rows.append({**row, **changes, **_range(encodings.get(row["site"]))})
    return Report(coverage.title, rows, coverage.summary)


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
