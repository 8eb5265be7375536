"""The command line: `qsdk demo`, `inspect`, `validate`, `to-integer`. Light to import; verbs load on use."""

import argparse
import sys
from collections.abc import Sequence

from qsdk.core.errors import FileFormatError, QsdkError

UNREADABLE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give the exit code: 0 fine, 1 errors found, 2 unreadable or refused."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except FileFormatError as error:
        print(f"qsdk: {error}", file=sys.stderr)
        return UNREADABLE
    except QsdkError as error:
        print(f"qsdk: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qsdk", description="Quantize, simulate, export and prove neural networks.")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="a real network from float to integer-only, in one table")
    demo.add_argument("--out", metavar="DIR", help="folder for the files and results.json")
    demo.set_defaults(run=_demo)
    inspect = commands.add_parser("inspect", help="list the encodings of a quantized ONNX model")
    inspect.add_argument("model")
    inspect.set_defaults(run=_inspect)
    validate = commands.add_parser("validate", help="check a quantized ONNX model (exit 1 on errors, 2 if unreadable)")
    validate.add_argument("model")
    validate.set_defaults(run=_validate)
    integer = commands.add_parser("to-integer", help="make a quantized ONNX model integer-only")
    integer.add_argument("model")
    integer.add_argument("out")
    integer.add_argument("--edges", choices=("float", "integer"), default="float")
    integer.set_defaults(run=_to_integer)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from qsdk.demo.run import run_demo

    print(run_demo(options.out))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from qsdk.workflow import inspect

    print(inspect(options.model))
    return 0


def _validate(options: argparse.Namespace) -> int:
    from qsdk.workflow import validate

    report = validate(options.model)
    print(report)
    return 1 if any(row["severity"] == "error" for row in report.rows) else 0


def _to_integer(options: argparse.Namespace) -> int:
    from qsdk.workflow import to_integer

    print(to_integer(options.model, options.out, edges=options.edges))
    return 0


if __name__ == "__main__":
    sys.exit(main())
