"""The options of `qsdk report`."""

from typing import Any

from qsdk.commands.options.shared import add_command, add_data


def add_report(commands: Any) -> None:
    """Add `qsdk report`."""
    report = add_command(
        commands,
        "report",
        "show what is quantized in a Q/DQ model, its sizes and ranges, as text or as one HTML page",
        "qsdk report model.onnx --out model.html --data images.npz --float float.onnx",
    )
    report.add_argument("model")
    report.add_argument("--out", metavar="FILE.html", help="write a page that needs nothing else")
    add_data(report, required=False)
    report.add_argument(
        "--float", metavar="FILE", help="on the page: the float model, to compare the outputs and weights with"
    )
    report.add_argument("--against", metavar="FILE", help="on the page: another Q/DQ file, shown beside this one")
    report.add_argument(
        "--profile", action="store_true", help="on the page: the milliseconds of each layer in ONNX Runtime"
    )
    report.set_defaults(run="qsdk.commands.report:run")
