"""`qsdk validate`. It loads nothing that the check does not need, so that it is quick in CI."""

from argparse import Namespace

from onnx_backend.model import load
from onnx_backend.validate import validate
from qsdk.commands.printing import show


def run(options: Namespace) -> int:
    """Check a model; 1 where there are errors, with `--strict` also where there are warnings."""
    report = validate(load(options.model))
    show(report, as_json=options.json)
    counted = report.summary["errors"] + (report.summary["warnings"] if options.strict else 0)
    return 1 if counted else 0
