"""The options of all commands, and the configs that they describe. Light to import."""

import argparse
from typing import Any, get_args

from qsdk.core.aimet_config.load_config import PRESETS, load_config
from qsdk.core.config.config import QuantConfig
from qsdk.core.config.for_dialect import Dialect, RuntimeName, TimedRuntime
from qsdk.core.config.json_form import read_choice
from qsdk.core.config.rules import CHOICES
from qsdk.core.errors import ConfigError
from qsdk.core.ranges.estimators import METHODS

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
    evaluate.set_defaults(run="qsdk.commands.scores:run_evaluate")


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
    sensitivity.set_defaults(run="qsdk.commands.scores:run_sensitivity")


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


def add_validate(commands: Any) -> None:
    """Add `qsdk validate`."""
    validate = add_command(
        commands,
        "validate",
        "check a quantized ONNX model (exit 1 on errors or if nothing is quantized, 2 if unreadable)",
        "qsdk validate model.onnx --json",
    )
    validate.add_argument("model")
    validate.add_argument("--dialect", choices=DIALECTS, help="check for this runtime (default: ONNX Runtime's CPU)")
    validate.add_argument("--strict", action="store_true", help="exit 1 on warnings too")
    validate.set_defaults(run="qsdk.commands.validate:run")


def add_parity(commands: Any) -> None:
    """Add `qsdk parity`."""
    parity = add_command(
        commands,
        "parity",
        "compare a Q/DQ file in ONNX Runtime's own session with its simulation, site by site (exit 1 if they differ)",
        "qsdk parity model.onnx --data test.npz --float float.onnx --min-float-sqnr 20",
    )
    parity.add_argument("model", help="a Q/DQ ONNX file")
    add_data(parity)
    parity.add_argument(
        "--level",
        choices=("none", "basic", "extended", "all"),
        default="all",
        help="graph optimization of the session (default: all, as the runtime's own default)",
    )
    parity.add_argument(
        "--entry",
        type=entry,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="configuration entry of the session, such as session.qdq_matmulnbits_accuracy_level=0",
    )
    parity.add_argument(
        "--min-sqnr", type=float, metavar="DB", help="what each float output must reach, against the simulation's"
    )
    parity.add_argument("--float", metavar="FILE", help="the float model, to say how far the outputs are from it")
    parity.add_argument(
        "--min-float-sqnr", type=float, metavar="DB", help="what each float output must reach, against that of --float"
    )
    parity.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="run the file there as an application would, with its fusions, in place of a session of --level",
    )
    parity.add_argument("--against", metavar="FILE", help="compare with the simulation of this Q/DQ file instead")
    parity.set_defaults(run="qsdk.commands.checks:run_parity")


def add_compare(commands: Any) -> None:
    """Add `qsdk compare`."""
    compare = add_command(
        commands,
        "compare",
        "compare two forms of a network tensor by tensor, and name the first one that is off (exit 1 if there is one)",
        "qsdk compare float.onnx device_dump/ --data images.npz",
    )
    side = "an ONNX file (float, Q/DQ or integer-only), or a folder of dumped tensors (.npy, .raw, .bin)"
    compare.add_argument("a", help=side)
    compare.add_argument("b", help="another form of the same network")
    add_data(compare, required=False)
    compare.add_argument(
        "--name",
        type=entry,
        action="append",
        default=[],
        metavar="A=B",
        help="a tensor of a and the one of b that it is, where their names have nothing in common",
    )
    compare.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="the largest difference that counts as none, relative to the largest value of a tensor, such as 1e-2",
    )
    compare.set_defaults(run="qsdk.commands.checks:run_compare")


def add_profile(commands: Any) -> None:
    """Add `qsdk profile`."""
    profile = add_command(
        commands,
        "profile",
        "show where the time of a model goes in a runtime: by layer, in integers, float or conversions",
        "qsdk profile model.onnx --against float.onnx --threads 4",
    )
    profile.add_argument("model", help="an ONNX file: float, Q/DQ or integer-only")
    add_data(profile, required=False)
    profile.add_argument(
        "--runtime",
        choices=TIMED,
        default="onnxruntime",
        help="that runs the model (default: onnxruntime)",
    )
    profile.add_argument("--threads", type=int, metavar="N", help="of the runtime (default: its own choice)")
    profile.add_argument("--repeats", type=int, default=20, metavar="N", help="runs that are timed (default: 20)")
    profile.add_argument("--against", metavar="FILE", help="a model to compare with, such as the float one")
    profile.set_defaults(run="qsdk.commands.checks:run_profile")


def add_inspect(commands: Any) -> None:
    """Add `qsdk inspect`."""
    inspect = add_command(
        commands,
        "inspect",
        "list the encodings that the nodes of a Q/DQ file hold, by site: what a runtime computes with",
        "qsdk inspect model.onnx",
    )
    inspect.add_argument("model")
    inspect.set_defaults(run="qsdk.commands.files:run_inspect")


def add_to_integer(commands: Any) -> None:
    """Add `qsdk to-integer`."""
    integer = add_command(
        commands,
        "to-integer",
        "make a quantized ONNX model integer-only",
        "qsdk to-integer model.onnx model.int.onnx --edges integer",
    )
    integer.add_argument("model")
    integer.add_argument("out")
    integer.add_argument(
        "--edges", choices=("float", "integer"), default="float", help="what the model takes and gives"
    )
    integer.add_argument(
        "--target",
        choices=("standard", "onnxruntime", "portable"),
        default="standard",
        help="operators to write; portable: the same integers on every runtime",
    )
    integer.add_argument(
        "--rounding",
        default="half_even",
        help="of requantization: half_even, half_up, half_away or gemmlowp (default: half_even)",
    )
    integer.add_argument(
        "--allow-float", action="append", default=[], metavar="GLOB", help="a node or op type that may stay float"
    )
    integer.add_argument(
        "--firmware", metavar="PATH", help="write the network without ONNX too: .npz (arrays) or .h (a C header)"
    )
    add_data(integer, required=False)
    integer.set_defaults(run="qsdk.commands.files:run_to_integer")


def add_encodings(commands: Any) -> None:
    """Add `qsdk encodings`."""
    text = "show or convert files of encodings"
    encodings = commands.add_parser("encodings", help=text, description=f"{text.capitalize()}.", epilog=CODES)
    verbs = encodings.add_subparsers(required=True, metavar="show|convert")
    of_model = "the float ONNX model that they belong to, for what a file does not say"
    show = add_command(
        verbs,
        "show",
        "list a file of encodings before it is loaded or converted: kinds, granularity, what is frozen",
        "qsdk encodings show model.encodings.json",
    )
    show.add_argument("source", help="a file of encodings, or a Q/DQ ONNX model")
    show.add_argument("--model", help=of_model)
    show.set_defaults(run="qsdk.commands.files:run_show")
    convert = add_command(
        verbs,
        "convert",
        "write encodings in another format or version",
        "qsdk encodings convert model.onnx model.aimet.json --to 1.0.0",
    )
    convert.add_argument("source", help="a file of encodings, or a Q/DQ ONNX model")
    convert.add_argument("out")
    convert.add_argument("--to", required=True, metavar="VERSION", help="qsdk, 1.0.0, 2.0.0 or 2.1.0")
    convert.add_argument("--model", help=of_model)
    convert.add_argument("--allow-loss", action="store_true", help="leave out what the version cannot say, and list it")
    convert.set_defaults(run="qsdk.commands.files:run_convert")


def add_report(commands: Any) -> None:
    """Add `qsdk report`."""
    report = add_command(
        commands,
        "report",
        "show what is quantized in a Q/DQ model, its sizes and ranges, as text or as one HTML page",
        "qsdk report model.onnx --out model.html --data images.npz --float float.onnx",
    )
    report.add_argument("model")
    report.add_argument("--out", metavar="FILE.html", help="write a page that needs nothing else")
    add_data(report, required=False)
    report.add_argument(
        "--float", metavar="FILE", help="on the page: the float model, to compare the outputs and weights with"
    )
    report.add_argument("--against", metavar="FILE", help="on the page: another Q/DQ file, shown beside this one")
    report.add_argument(
        "--profile", action="store_true", help="on the page: the milliseconds of each layer in ONNX Runtime"
    )
    report.set_defaults(run="qsdk.commands.report:run")


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


def config_of(
    name: str,
    overrides: list[tuple[str, str]],
    skipped: list[str],
    *,
    block_size: int | None = None,
    kv_cache: str | None = None,
) -> QuantConfig:
    """Return a preset by name, or a config from a JSON file, with the rules of the command line after its own."""
    of_preset = {"block_size": block_size, "kv_cache": kv_cache}
    given = {key: value for key, value in of_preset.items() if value is not None}
    if given and name not in PRESETS:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is for a preset; write it into {name} instead")
    config = PRESETS[name](**given) if given else load_config(name)
    for pattern, text in overrides:
        where, parts = f"--override {pattern} {text}", [part.partition("=") for part in text.split(",")]
        choices: Any = {name: read_choice(name, value, where) for name, _, value in parts}
        config = config.override(pattern, **choices)
    for pattern in skipped:
        config = config.skip(pattern)
    return config
