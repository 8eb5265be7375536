"""The options of the commands on files: inspect, to-integer, encodings."""

from typing import Any

from qsdk.commands.options.shared import CODES, add_command, add_data


def add_inspect(commands: Any) -> None:
    """Add `qsdk inspect`."""
    inspect = add_command(
        commands,
        "inspect",
        "list the encodings that the nodes of a Q/DQ file hold, by site: what a runtime computes with",
        "qsdk inspect model.onnx",
    )
    inspect.add_argument("model")
    inspect.set_defaults(run="qsdk.commands.files:run_inspect")


def add_to_integer(commands: Any) -> None:
    """Add `qsdk to-integer`."""
    integer = add_command(
        commands,
        "to-integer",
        "make a quantized ONNX model integer-only",
        "qsdk to-integer model.onnx model.int.onnx --edges integer",
    )
    integer.add_argument("model")
    integer.add_argument("out")
    integer.add_argument(
        "--edges", choices=("float", "integer"), default="float", help="what the model takes and gives"
    )
    integer.add_argument(
        "--target",
        choices=("standard", "onnxruntime", "portable"),
        default="standard",
        help="operators to write; portable: the same integers on every runtime",
    )
    integer.add_argument(
        "--rounding",
        default="half_even",
        help="of requantization: half_even, half_up, half_away or gemmlowp (default: half_even)",
    )
    integer.add_argument(
        "--allow-float", action="append", default=[], metavar="GLOB", help="a node or op type that may stay float"
    )
    integer.add_argument(
        "--firmware", metavar="PATH", help="write the network without ONNX too: .npz (arrays) or .h (a C header)"
    )
    add_data(integer, required=False)
    integer.set_defaults(run="qsdk.commands.files:run_to_integer")


def add_encodings(commands: Any) -> None:
    """Add `qsdk encodings`."""
    text = "show or convert files of encodings"
    encodings = commands.add_parser("encodings", help=text, description=f"{text.capitalize()}.", epilog=CODES)
    verbs = encodings.add_subparsers(required=True, metavar="show|convert")
    of_model = "the float ONNX model that they belong to, for what a file does not say"
    show = add_command(
        verbs,
        "show",
        "list a file of encodings before it is loaded or converted: kinds, granularity, what is frozen",
        "qsdk encodings show model.encodings.json",
    )
    show.add_argument("source", help="a file of encodings, or a Q/DQ ONNX model")
    show.add_argument("--model", help=of_model)
    show.set_defaults(run="qsdk.commands.encodings:run_show")
    convert = add_command(
        verbs,
        "convert",
        "write encodings in another format or version",
        "qsdk encodings convert model.onnx model.aimet.json --to 1.0.0",
    )
    convert.add_argument("source", help="a file of encodings, or a Q/DQ ONNX model")
    convert.add_argument("out")
    convert.add_argument("--to", required=True, metavar="VERSION", help="qsdk, 1.0.0, 2.0.0 or 2.1.0")
    convert.add_argument("--model", help=of_model)
    convert.add_argument("--allow-loss", action="store_true", help="leave out what the version cannot say, and list it")
    convert.set_defaults(run="qsdk.commands.encodings:run_convert")
