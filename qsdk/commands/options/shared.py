"""What the parsers of all commands share: the frame of a command, and the options that select its data."""

import argparse
from typing import Any, get_args

from qsdk.core.config.for_dialect import Dialect, RuntimeName, TimedRuntime
from qsdk.core.config.rules import CHOICES

CODES = "exit codes: 0 fine; 1 errors found, or refused with the reason; 2 a file cannot be read, or wrong usage"
CONFIGS = "w8a8, w8a16, w4a8, w4a16, weight_only (4 bits) or a JSON file"
DIALECTS, RUNTIMES, TIMED = get_args(Dialect), get_args(RuntimeName), get_args(TimedRuntime)


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
        help=".npz (one array per input, by name), .npy (the only input; with or without a batch axis), pictures "
        "(.jpg, .png, .bmp, .webp), or a folder of them; may be repeated",
    )
    source.add_argument("--random", type=int, metavar="N", help="N random batches: to try out, not to deploy")
    command.add_argument("--batch-size", type=int, default=32, help="samples per batch where the model leaves it open")
    command.add_argument(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="INPUT=1,3,224,224",
        help="the shape of an input whose dimensions are open, for --random; --dialect qnn and to-integer fix it",
    )
    command.add_argument("--seed", type=int, default=0, help="of --random")
    command.add_argument(
        "--max-samples", type=int, metavar="N", help="stop after N samples; of pictures, N spread over all of them"
    )
    _add_pictures(command.add_argument_group("pictures", "from a file to the model's input"))


def _add_pictures(pictures: Any) -> None:
    """Add the options that say how a picture becomes an array."""
    pictures.add_argument(
        "--image-size",
        type=_sides,
        metavar="N|H,W",
        help="height and width (default: those that the model declares, else 224)",
    )
    fit = pictures.add_mutually_exclusive_group()
    fit.add_argument(
        "--crop",
        type=int,
        metavar="N",
        help="resize the shorter side to N, then cut out the centre (default: N is 8/7 of the size, as 256 for 224)",
    )
    fit.add_argument("--resize", action="store_true", help="squeeze the whole picture to the size instead")
    pictures.add_argument(
        "--mean", type=_numbers, metavar="R,G,B", help="taken from pixels of 0..1 (default: ImageNet's; grey: 0)"
    )
    pictures.add_argument(
        "--std", type=_numbers, metavar="R,G,B", help="that divides them then (default: ImageNet's; grey: 1)"
    )
    pictures.add_argument(
        "--layout", choices=("nchw", "nhwc"), help="where the channels are (default: as the model declares, else nchw)"
    )
    pictures.add_argument(
        "--preprocess",
        metavar="FILE.py:function",
        help="your own instead: called with the path of each file, returns its array, or one per input by name",
    )


def _sides(text: str) -> tuple[int, int]:
    sides = text.split(",")
    if not all(side.isdigit() and int(side) for side in sides) or len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 224 or 224,320")
    return int(sides[0]), int(sides[-1])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 0.5,0.5,0.5") from None


def add_rules(command: argparse.ArgumentParser) -> None:
    """Add the options that are rules of a config."""
    command.add_argument(
        "--override",
        nargs=2,
        action="append",
        default=[],
        metavar=("PATTERN", "KEY=VALUE"),
        help="other choices for the owners that match, such as 'layer1.*' weight=int4,block_size=32; keys are "
        f"{', '.join(CHOICES)}",
    )
    command.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="owners that stay float")


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
