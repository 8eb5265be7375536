"""`qsdk quantize FOLDER OUT`: a checkpoint folder in, a folder with the exported model out."""

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from qsdk.commands.config_of_options import config_of
from qsdk.commands.data.tokens import random_tokens, token_batches
from qsdk.commands.printing import show
from qsdk.core.errors import ConfigError
from qsdk.core.report import Report
from qsdk.verbs.checkpoints.named_verbs import require_verbs
from qsdk.verbs.checkpoints.quantize_checkpoint import quantize_checkpoint

_SCORES = ("mixed_precision", "metric", "labels", "metric_data")
_PICTURES = ("image_size", "crop", "resize", "mean", "std", "layout", "preprocess")
_NOT_HERE = (*_SCORES, *_PICTURES, "input", "shape", "providers", "weight_method")


def quantize_folder(options: Namespace) -> int:
    """Quantize, calibrate, improve and export the model of a checkpoint folder.

    Raises:
        ConfigError: an option that is not for checkpoint folders, or see `quantize_checkpoint`.
    """
    given = [name for name in _NOT_HERE if getattr(options, name, None)]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is not for a checkpoint folder; leave it out, or write a function that "
            "reads the model: FILE.py:function"
        )
    more_of_preset = {"block_size": options.block_size, "kv_cache": options.kv_cache}
    config = config_of(options.config, options.override, options.skip, **more_of_preset)
    dialect = options.dialect if options.format == "onnx" else options.format
    if dialect:
        config = config.for_dialect(dialect)
    data: Iterable[Any]
    if options.data:
        data = token_batches(options.model, options.data, length=options.length, most=options.max_samples)
    else:
        print(
            "qsdk: calibrated on random tokens: the file runs and has its final size and speed, its accuracy means "
            "nothing; give --data with text for ranges of real data",
            file=sys.stderr,
        )
        data = random_tokens(options.model, options.random, length=options.length, seed=options.seed)
    report = quantize_checkpoint(
        options.model,
        options.out,
        config,
        data=data,
        verbs=require_verbs(options.verbs.split(","), given_as="--verbs"),
        method=options.method,
        opset=options.opset,
        prefer=options.prefer,
        dialect=options.dialect or "onnxruntime",
        format=options.format,
    )
    show(Report("Quantized", report.rows, report.summary), as_json=options.json)
    return 0
