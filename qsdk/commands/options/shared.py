"""What the parsers of all commands share: the frame of a command, and the options that select its data."""

import argparse
from typing import Any

CODES = "exit codes: 0 fine; 1 errors found, or refused with the reason; 2 a file cannot be read, or wrong usage"
DIALECTS = ("onnxruntime", "onnx", "openvino", "qnn", "tensorrt")


def add_command(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a command with its help, an example, and `--json`."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}\n\n{CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print the report as one JSON document")
    return command


def add_data(command: argparse.ArgumentParser, *, required: bool = True) -> None:
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
        type=shape,
        action="append",
        default=[],
        metavar="INPUT=1,3,224,224",
        help="the shape of an input whose dimensions are open, for --random, and for --dialect qnn, which fixes it",
    )
    command.add_argument("--seed", type=int, default=0, help="of --random")


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `INPUT=1,3,224,224`."""
    name, _, sizes = text.rpartition("=")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if not name or any(size < 1 for size in shape):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form INPUT=1,3,224,224")
    return name, shape


def entry(text: str) -> tuple[str, str]:
    """Read `KEY=VALUE`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return name, value
