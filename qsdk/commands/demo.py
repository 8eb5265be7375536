"""`qsdk demo`."""

from argparse import Namespace

from qsdk.commands.printing import show
from qsdk.demo.run import run_demo


def run(options: Namespace) -> int:
    """Run the demo."""
    show(run_demo(options.out), as_json=options.json)
    return 0
