"""The command line: `qsdk quantize`, `validate`, `parity` and their kin. Light to import; commands load on use."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from qsdk import __version__
from qsdk.commands.options import CODES, add_commands
from qsdk.core.errors import ConfigError, FileFormatError, QsdkError
from qsdk.core.run_options import options as run_options

UNREADABLE = 2
INTERRUPTED = 130  # the exit code of shells for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 fine, 1 errors found or refused, 2 unreadable or wrong usage."""
    parser, words = _parser(), sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(UNREADABLE)
    options = parser.parse_args(words)
    module, function = options.run.split(":")
    try:
        with run_options(progress=sys.stderr.isatty() and not getattr(options, "json", False)):
            code: int = getattr(import_module(module), function)(options)
        sys.stdout.flush()
    except QsdkError as error:
        words = import_module("qsdk.commands.printing").in_shell_words(str(error), vars(options))
        print(f"qsdk: {words}", file=sys.stderr)
        return UNREADABLE if isinstance(error, FileFormatError | ConfigError) else 1  # wrong usage is a ConfigError
    except KeyboardInterrupt:
        print("qsdk: interrupted; what was being written was not put in place", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest choice to one that does not exist."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1) if found else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="qsdk", description="Quantize, simulate, export and prove neural networks.", epilog=CODES)
    parser.add_argument("--version", action="version", version=f"qsdk {__version__}")
    add_commands(parser.add_subparsers(required=True, metavar="command"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
