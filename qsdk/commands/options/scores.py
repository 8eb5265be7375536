"""The options of the commands that score a model: evaluate, sensitivity."""

import argparse
from typing import Any

from qsdk.commands.options.shared import CONFIGS, RUNTIMES, add_command, add_data, add_rules


def add_evaluate(commands: Any) -> None:
    """Add `qsdk evaluate`."""
    evaluate = add_command(
        commands,
        "evaluate",
        "score a model in a runtime: top-1 and top-5 on labels, or a metric of your own",
        "qsdk evaluate model.onnx --data pictures --labels folder-names --against float.onnx",
    )
    evaluate.add_argument("model", help="an ONNX file: float, Q/DQ or integer-only (with float edges)")
    add_data(evaluate)
    add_metric(evaluate)
    evaluate.add_argument("--against", metavar="FILE", help="a model to score beside it, such as the float one")
    evaluate.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="run the files there as an application would (default: onnxruntime, on its CPU)",
    )
    evaluate.set_defaults(run="qsdk.commands.scores.evaluate:run")


def add_sensitivity(commands: Any) -> None:
    """Add `qsdk sensitivity`."""
    sensitivity = add_command(
        commands,
        "sensitivity",
        "rank the layers by what quantizing each alone costs at the outputs, worst first",
        "qsdk sensitivity float.onnx --data images.npz --config w4a8",
    )
    sensitivity.add_argument("model", help="a float ONNX file, which is quantized first, or a Q/DQ file")
    add_data(sensitivity)
    sensitivity.add_argument("--config", help=f"of a float model: {CONFIGS} (default: w8a8)")
    add_rules(sensitivity)
    add_metric(sensitivity)
    sensitivity.add_argument(
        "--exact", action="store_true", help="measure each layer, in two passes each, instead of an estimate in one"
    )
    sensitivity.set_defaults(run="qsdk.commands.scores.sensitivity:run")


def add_metric(command: argparse.ArgumentParser) -> None:
    """Add the options of a score on the data."""
    command.add_argument(
        "--labels",
        metavar="FILE|folder-names",
        help="indices of the classes: .npy, .npz (array 'labels'), .csv (label, or file,label), or folder-names where "
        "pictures lie in one folder per class",
    )
    command.add_argument(
        "--metric",
        metavar="FILE.py:function",
        help="called with the outputs (a list of arrays, over all samples) and the labels (an array, or None); returns "
        "a number, larger being better (default with --labels: top-1)",
    )
