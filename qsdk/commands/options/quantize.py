"""The options of `qsdk quantize`."""

from typing import Any

from qsdk.commands.options.shared import DIALECTS, add_command, add_data, entry


def add_quantize(commands: Any) -> None:
    """Add `qsdk quantize`."""
    quantize = add_command(
        commands,
        "quantize",
        "quantize a float ONNX model on calibration data",
        "qsdk quantize float.onnx model.onnx --data images.npz --config w8a8 --override head weight=int8 --skip 'bn*'",
    )
    quantize.add_argument("model", help="a float ONNX file")
    quantize.add_argument("out", help="the Q/DQ file to write; its encodings stand beside it")
    add_data(quantize)
    quantize.add_argument("--config", default="w8a8", help="w8a8, w8a16, w4a8, w4a16 or a JSON file (default: w8a8)")
    quantize.add_argument(
        "--override",
        nargs=2,
        action="append",
        default=[],
        metavar=("PATTERN", "KEY=DTYPE"),
        help="another choice for the owners that match, such as 'layer1.*' weight=int4,activation=uint16",
    )
    quantize.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="owners that stay float")
    quantize.add_argument(
        "--input",
        type=entry,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input that is always the same, such as sr=16000: the file that is written has it no longer",
    )
    quantize.add_argument("--method", default="min_max", help="range estimator of activations (default: min_max)")
    quantize.add_argument("--weight-method", help="range estimator of weights (default: min_max)")
    quantize.add_argument("--opset", type=int, default=21, help="13 to 25 (default: 21)")
    quantize.add_argument(
        "--providers",
        nargs="+",
        metavar="NAME",
        help="ONNX Runtime's execution providers to calibrate on, best first, such as CUDAExecutionProvider",
    )
    quantize.add_argument(
        "--dialect",
        choices=DIALECTS,
        default="onnxruntime",
        help="the runtime that is to read the file; what it cannot have is changed in the config before calibration",
    )
    quantize.set_defaults(run="qsdk.commands.quantize:run")
