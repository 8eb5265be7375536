"""The options of `qsdk quantize`."""

import argparse
from typing import Any

from qsdk.commands.options.scores import add_metric
from qsdk.commands.options.shared import CONFIGS, DIALECTS, add_command, add_data, add_rules, entry
from qsdk.core.ranges.estimators import METHODS


def add_quantize(commands: Any) -> None:
    """Add `qsdk quantize`."""
    quantize = add_command(
        commands,
        "quantize",
        "quantize a float ONNX model or PyTorch module on calibration data",
        "qsdk quantize float.onnx model.onnx --data images.npz --config w8a8 --override head weight=int8 --skip 'bn*'",
    )
    quantize.add_argument(
        "model",
        help="a float ONNX file; FILE.py:function, which returns a PyTorch module, or (module, example); or the folder "
        "of a Hugging Face checkpoint",
    )
    quantize.add_argument(
        "out", help="the Q/DQ file to write; its encodings stand beside it. A folder for a checkpoint"
    )
    quantize.add_argument(
        "--format",
        choices=("onnx", "compressed-tensors"),
        default="onnx",
        help="compressed-tensors: a folder for vLLM and transformers, of the linear layers of a PyTorch model",
    )
    add_data(quantize)
    quantize.add_argument(
        "--length", type=int, default=512, help="tokens of a window of text, for a checkpoint folder (default: 512)"
    )
    _add_config(quantize)
    _add_improvements(quantize)
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
        help="the runtime that is to read the file (default: onnxruntime, with the config as it is); what it cannot "
        "have is changed before calibration; for onnxruntime, int8 weights become uint8, exact on every processor",
    )
    quantize.add_argument(
        "--prefer",
        choices=("speed", "size"),
        default="speed",
        help="size: two 4-bit weights share a byte beside quantized activations too, where no integer kernel of ONNX "
        "Runtime reads them (default: speed)",
    )
    quantize.set_defaults(run="qsdk.commands.quantize:run")


def _add_config(quantize: argparse.ArgumentParser) -> None:
    """Add the options that say what is quantized, and how ranges are found."""
    quantize.add_argument("--config", default="w8a8", help=f"{CONFIGS} (default: w8a8)")
    quantize.add_argument("--block-size", type=int, metavar="N", help="one scale of a weight per N input channels")
    quantize.add_argument(
        "--kv-cache", metavar="DTYPE", help="a decoder's file has a cache of this dtype: int8, float32, ..."
    )
    add_rules(quantize)
    quantize.add_argument(
        "--input",
        type=entry,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an input that is always the same, such as sr=16000: the file that is written has it no longer",
    )
    quantize.add_argument(
        "--method",
        default="min_max",
        metavar="NAME",
        help=f"range estimator of activations: {', '.join(METHODS)} (default: min_max)",
    )
    quantize.add_argument(
        "--weight-method", metavar="NAME", help="range estimator of weights, one of the same (default: min_max)"
    )


def _add_improvements(quantize: argparse.ArgumentParser) -> None:
    """Add the options of what is done after calibration."""
    quantize.add_argument(
        "--verbs",
        default="",
        metavar="VERB,VERB",
        help="what to do after calibration, in this order: rotate, equalize, smooth_quant, awq, "
        "reestimate_batch_norm, correct_bias, seq_mse, adaround, gptq; of a "
        "PyTorch module also tune_blocks, tune_ranges",
    )
    quantize.add_argument(
        "--mixed-precision",
        action="store_true",
        help="raise the sites that need it until the metric is within --max-drop (exit 1 if none is)",
    )
    quantize.add_argument(
        "--max-drop", type=float, default=0.01, metavar="X", help="of the metric, from the float model (default: 0.01)"
    )
    add_metric(quantize)
    quantize.add_argument(
        "--metric-data",
        action="append",
        metavar="PATH",
        help="as --data: what --metric and --labels are for instead, all of it, while --data calibrates",
    )
