"""The options of `qsdk report`."""

from typing import Any

from qsdk.commands.options.shared import add_command


def add_report(commands: Any) -> None:
    """Add `qsdk report`."""
    report = add_command(
        commands,
        "report",
        "show what is quantized in a Q/DQ model, its sizes and ranges, as text or as one HTML page",
        "qsdk report model.onnx --out model.html",
    )
    report.add_argument("model")
    report.add_argument("--out", metavar="FILE.html", help="write a page that needs nothing else")
    report.set_defaults(run="qsdk.commands.report:run")
