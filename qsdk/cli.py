"""The command line: `qsdk quantize`, `validate`, `parity` and their kin. Light to import; commands load on use."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from qsdk import __version__
from qsdk.core.errors import ConfigError, FileFormatError, QsdkError

UNREADABLE = 2
INTERRUPTED = 130  # the exit code of shells for Ctrl-C
_CODES = "exit codes: 0 fine; 1 errors found, or refused with the reason; 2 a file cannot be read, or wrong usage"


_DIALECTS = ("onnxruntime", "onnx", "openvino", "qnn", "tensorrt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 fine, 1 errors found or refused, 2 unreadable or wrong usage."""
    options = _parser().parse_args(arguments)
    module, function = options.run.split(":")
    try:
        code: int = getattr(import_module(module), function)(options)
        sys.stdout.flush()
    except (FileFormatError, ConfigError) as error:
        print(f"qsdk: {error}", file=sys.stderr)
        return UNREADABLE  # or wrong usage
    except QsdkError as error:
        print(f"qsdk: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("qsdk: interrupted; what was being written was not put in place", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qsdk", description="Quantize, simulate, export and prove neural networks.", epilog=_CODES
    )
    parser.add_argument("--version", action="version", version=f"qsdk {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = _command(commands, "demo", "a real network from float to integer-only, in one table", "qsdk demo --out demo")
    demo.add_argument("--out", metavar="DIR", help="folder for the files and results.json")
    demo.set_defaults(run="qsdk.commands.demo:run")
    _add_quantize(commands)
    inspect = _command(commands, "inspect", "list the encodings of a quantized ONNX model", "qsdk inspect model.onnx")
    inspect.add_argument("model")
    inspect.set_defaults(run="qsdk.commands.files:run_inspect")
    _add_validate(commands)
    _add_parity(commands)
    _add_to_integer(commands)
    _add_encodings(commands)
    _add_report(commands)
    _add_profile(commands)
    return parser


def _command(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a command with its help, an example, and `--json`."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}\n\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print the report as one JSON document")
    return command


def _add_quantize(commands: Any) -> None:
    quantize = _command(
        commands,
        "quantize",
        "quantize a float ONNX model on calibration data",
        "qsdk quantize float.onnx model.onnx --data images.npz --config w8a8 --override head weight=int8 --skip 'bn*'",
    )
    quantize.add_argument("model", help="a float ONNX file")
    quantize.add_argument("out", help="the Q/DQ file to write; its encodings stand beside it")
    _add_data(quantize)
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
        type=_entry,
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
        choices=_DIALECTS,
        default="onnxruntime",
        help="the runtime that is to read the file; what it cannot have is changed in the config before calibration",
    )
    quantize.set_defaults(run="qsdk.commands.quantize:run")


def _add_data(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that select the batches."""
    source = command.add_mutually_exclusive_group(required=required)
    source.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        help=".npz (one array per input, by name), .npy (the only input), or a folder of them; may be repeated",
    )
    source.add_argument("--random", type=int, metavar="N", help="N random batches: to try out, not to deploy")
    command.add_argument("--batch-size", type=int, default=32, help="samples per batch where the model leaves it open")
    command.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="INPUT=1,3,224,224",
        help="the shape of an input whose dimensions are open, for --random, and for --dialect qnn, which fixes it",
    )
    command.add_argument("--seed", type=int, default=0, help="of --random")


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition("=")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if not name or any(size < 1 for size in shape):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form INPUT=1,3,224,224")
    return name, shape


def _entry(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return name, value


def _add_validate(commands: Any) -> None:
    validate = _command(
        commands,
        "validate",
        "check a quantized ONNX model (exit 1 on errors or if nothing is quantized, 2 if unreadable)",
        "qsdk validate model.onnx --json",
    )
    validate.add_argument("model")
    validate.add_argument("--dialect", choices=_DIALECTS, help="check for this runtime (default: ONNX Runtime's CPU)")
    validate.add_argument("--strict", action="store_true", help="exit 1 on warnings too")
    validate.set_defaults(run="qsdk.commands.validate:run")


def _add_parity(commands: Any) -> None:
    parity = _command(
        commands,
        "parity",
        "compare a Q/DQ file in ONNX Runtime's own session with its simulation, site by site (exit 1 if they differ)",
        "qsdk parity model.onnx --data test.npz --float float.onnx --min-float-sqnr 20",
    )
    parity.add_argument("model", help="a Q/DQ ONNX file")
    _add_data(parity)
    parity.add_argument(
        "--level",
        choices=("none", "basic", "extended", "all"),
        default="all",
        help="graph optimization of the session (default: all, as the runtime's own default)",
    )
    parity.add_argument(
        "--entry",
        type=_entry,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="configuration entry of the session, such as session.qdq_matmulnbits_accuracy_level=0",
    )
    parity.add_argument(
        "--min-sqnr", type=float, metavar="DB", help="what the outputs must reach, against the simulation's"
    )
    parity.add_argument("--float", metavar="FILE", help="the float model, to say how far the outputs are from it")
    parity.add_argument(
        "--min-float-sqnr", type=float, metavar="DB", help="what the outputs must reach, against those of --float"
    )
    parity.add_argument(
        "--runtime",
        choices=("onnxruntime", "openvino", "qnn"),
        help="run the file there as an application would, with its fusions, in place of a session of --level",
    )
    parity.add_argument("--against", metavar="FILE", help="compare with the simulation of this Q/DQ file instead")
    parity.set_defaults(run="qsdk.commands.parity:run")


def _add_to_integer(commands: Any) -> None:
    integer = _command(
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
    integer.add_argument("--rounding", default="half_even", help="of requantization (default: half_even)")
    integer.add_argument(
        "--requantize", choices=("integer", "qlinear"), default="integer", help="on integers alone, or by QLinearConv"
    )
    integer.add_argument(
        "--weights", choices=("auto", "unsigned", "signed"), default="auto", help="of kernels (see the guide)"
    )
    integer.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="INPUT=1,3,224,224",
        help="fix the open dimensions of an input",
    )
    integer.add_argument("--product-bits", type=int, choices=(32, 64), default=64, help="of requantization")
    integer.add_argument(
        "--tables", choices=("exact", "interpolated"), default="exact", help="of functions of 16-bit codes"
    )
    integer.add_argument(
        "--allow-float", action="append", default=[], metavar="GLOB", help="a node or op type that may stay float"
    )
    integer.add_argument(
        "--firmware", metavar="PATH", help="write the network without ONNX too: .npz (arrays) or .h (a C header)"
    )
    integer.set_defaults(run="qsdk.commands.files:run_to_integer")


def _add_encodings(commands: Any) -> None:
    encodings = commands.add_parser("encodings", help="show or convert files of encodings")
    verbs = encodings.add_subparsers(required=True, metavar="show|convert")
    of_model = "the float ONNX model that they belong to, for what a file does not say"
    show = _command(verbs, "show", "list the encodings of a file", "qsdk encodings show model.encodings.json")
    show.add_argument("source", help="a file of encodings, or a Q/DQ ONNX model")
    show.add_argument("--model", help=of_model)
    show.set_defaults(run="qsdk.commands.encodings:run_show")
    convert = _command(
        verbs,
        "convert",
        "write encodings in another format or version",
        "qsdk encodings convert model.onnx model.aimet.json --to 1.0.0",
    )
    convert.add_argument("source", help="a file of encodings, or a Q/DQ ONNX model")
    convert.add_argument("out")
    convert.add_argument("--to", required=True, metavar="VERSION", help="qsdk, 0.6.1, 1.0.0, 2.0.0 or 2.1.0")
    convert.add_argument("--model", help=of_model)
    convert.add_argument("--allow-loss", action="store_true", help="leave out what the version cannot say, and list it")
    convert.set_defaults(run="qsdk.commands.encodings:run_convert")


def _add_report(commands: Any) -> None:
    report = _command(
        commands,
        "report",
        "show what is quantized in a Q/DQ model, its sizes and ranges, as text or as one HTML page",
        "qsdk report model.onnx --out model.html",
    )
    report.add_argument("model")
    report.add_argument("--out", metavar="FILE.html", help="write a page that needs nothing else")
    report.set_defaults(run="qsdk.commands.report:run")


def _add_profile(commands: Any) -> None:
    profile = _command(
        commands,
        "profile",
        "show where the time of a model goes in a runtime: by layer, in integers, float or conversions",
        "qsdk profile model.onnx --against float.onnx --threads 4",
    )
    profile.add_argument("model", help="an ONNX file: float, Q/DQ or integer-only")
    _add_data(profile, required=False)
    profile.add_argument(
        "--runtime",
        choices=("onnxruntime", "openvino"),
        default="onnxruntime",
        help="that runs the model (default: onnxruntime)",
    )
    profile.add_argument("--threads", type=int, metavar="N", help="of the runtime (default: its own choice)")
    profile.add_argument("--repeats", type=int, default=20, metavar="N", help="runs that are timed (default: 20)")
    profile.add_argument("--against", metavar="FILE", help="a model to compare with, such as the float one")
    profile.set_defaults(run="qsdk.commands.profile:run")


if __name__ == "__main__":
    sys.exit(main())
