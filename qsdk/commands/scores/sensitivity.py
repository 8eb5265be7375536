"""`qsdk sensitivity`: which layers' quantization costs most, of a float model or a Q/DQ file."""

import sys
from argparse import Namespace
from typing import Any

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.quantized_parts import is_anything_quantized
from qsdk.commands.batches import batches_of_options
from qsdk.commands.config_of_options import config_of
from qsdk.commands.printing import show
from qsdk.commands.scores.metric import scorer_of_options
from qsdk.core.errors import ConfigError
from qsdk.verbs.analysis.sensitivity import sensitivity
from qsdk.verbs.quantize import calibrate, quantize


def run(options: Namespace) -> int:
    """Rank the layers; a float model is quantized by the config and calibrated on the data first.

    Raises:
        ConfigError: a config for a file that is quantized already.
    """
    model = load(options.model)
    data = batches_of_options(options, inputs_of(model))
    progress = sys.stderr.isatty() and not options.json
    if is_anything_quantized(model):
        if options.config or options.override or options.skip:
            raise ConfigError(f"{options.model} is quantized already; leave out --config, --override and --skip")
        sim = quantize(options.model)
    else:
        config = config_of(options.config or "w8a8", options.override, options.skip)
        sim = quantize(options.model, next(iter(data), None), config)
        calibrate(sim, data, progress=progress)
    scorer = scorer_of_options(options, data)

    def metric(current: Any) -> float:
        return 0.0 if scorer is None else scorer.main(current.run)

    found = sensitivity(
        sim, data, metric=None if scorer is None else metric, exact=options.exact, progress=progress, seed=options.seed
    )
    show(found, as_json=options.json)
    return 0
