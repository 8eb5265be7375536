"""`qsdk quantize`: a float ONNX file and data in, a Q/DQ file and its encodings out."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from qsdk.commands.batches import batches_of_options
from qsdk.commands.outputs import require_output
from qsdk.commands.printing import show
from qsdk.core.aimet_config.load_config import load_config
from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError
from qsdk.core.report import Report
from qsdk.verbs.quantize import calibrate, export, quantize


def run(options: Namespace) -> int:
    """Quantize, calibrate and export; the report says what was done to each tensor.

    Raises:
        ConfigError: the output path is the float model, or cannot be written.
    """
    require_output(options.out)
    config = config_of(options.config, options.override, options.skip).for_dialect(options.dialect)
    fixed = {name: _value(name, text) for name, text in options.input}
    inputs = [result for result in inputs_of(load(options.model)) if result.name not in fixed]
    if Path(options.out).exists() and Path(options.out).samefile(options.model):
        raise ConfigError(f"{options.out} is the float model, which would be gone; name another file to write")
    data, source = batches_of_options(options, inputs), ", ".join(options.data or ["random inputs"])
    if not options.data:
        print(
            "qsdk: calibrated on random inputs: the file runs and has its final size and speed, its accuracy means "
            "nothing; give --data for ranges of real data",
            file=sys.stderr,
        )
    sim = quantize(options.model, next(iter(data), None), config, inputs=fixed, providers=options.providers)
    progress = sys.stderr.isatty() and not options.json
    calibrate(sim, data, method=options.method, weight_method=options.weight_method, progress=progress)
    shapes = dict(options.shape) if options.dialect == "qnn" and options.shape else None
    exported = export(sim, options.out, opset=options.opset, dialect=options.dialect, shapes=shapes)
    coverage = sim.coverage()
    facts = {"calibration": f"{options.method} on {source}", "bytes": Path(options.out).stat().st_size}
    if options.providers:
        facts |= sim.placement().summary
    show(Report("Quantized", coverage.rows, {**coverage.summary, **facts, **exported.summary}), as_json=options.json)
    return 0


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ConfigError(f"--input {name}={text}: give a number, true or false, or a list in brackets") from None


def config_of(name: str, overrides: list[tuple[str, str]], skipped: list[str]) -> QuantConfig:
    """Return a preset by name, or a config from a JSON file, with the rules of the command line after its own.

    Raises:
        ConfigError: an override that is not `KEY=DTYPE`, or an unknown dtype.
        FileFormatError: the file cannot be read.
    """
    config = load_config(name)
    for pattern, text in overrides:
        choices = dict(part.partition("=")[::2] for part in text.split(","))
        unknown = sorted(set(choices) - {"weight", "activation", "bias", "input", "output"})
        if unknown:
            raise ConfigError(
                f"--override {pattern} {text}: {unknown[0]!r} is none of weight, activation, bias, input, output; "
                "write for example weight=int8,activation=uint16"
            )
        config = config.override(
            pattern,
            weight=choices.get("weight"),
            activation=choices.get("activation"),
            bias=choices.get("bias"),
            input=choices.get("input"),
            output=choices.get("output"),
        )
    for pattern in skipped:
        config = config.skip(pattern)
    return config
