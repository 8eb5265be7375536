"""`qsdk validate`. It loads nothing that the check does not need, so that it is quick in CI."""

import sys
from argparse import Namespace

from onnx_backend.proto.model_io import load
from onnx_backend.qdq.narrow_regions import NOTHING_QUANTIZED, is_anything_quantized
from qsdk.commands.printing import show
from qsdk.core.report import Report
from qsdk.verbs.qdq_files import validated


def run(options: Namespace) -> int:
    """Check a model; return 1 on errors or if nothing is quantized, with `--strict` on warnings too."""
    model = load(options.model)
    report, quantized = validated(model, options.dialect), is_anything_quantized(model)
    reason = {} if quantized else {"reason": NOTHING_QUANTIZED}
    show(Report(report.title, report.rows, {**report.summary, **reason}), as_json=options.json)
    if not quantized:
        print(f"{options.model}: {NOTHING_QUANTIZED}", file=sys.stderr)
        return 1
    counted = report.summary["errors"] + (report.summary["warnings"] if options.strict else 0)
    return 1 if counted else 0
