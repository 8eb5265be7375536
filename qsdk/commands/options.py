"""The options of all commands, and the configs that they describe. Light to import."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_args

from qsdk.core.aimet_config.load_config import load_config, preset_named
from qsdk.core.config.config import QuantConfig
from qsdk.core.config.for_dialect import RuntimeName, TimedRuntime
from qsdk.core.config.json_form import read_choice
from qsdk.core.config.rules import CHOICES
from qsdk.core.config.target import is_target_file, shipped_targets
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import BLOCK_FORMATS
from qsdk.core.ranges.estimators import METHODS

CODES = "exit codes: 0 fine; 1 errors found, or refused with the reason; 2 a file cannot be read, or wrong usage"
CONFIGS = (
    "w8a8, w8a16, w4a8, w4a16 (w8a8kv8: a cache of 8 bits), weight_only (4 bits), nvfp4, mxfp4, mxfp8, mxint8 or a "
    "JSON file"
)


def add_command(commands: Any, name: str, text: str, example: str, run: str) -> argparse.ArgumentParser:
    """Return the parser of a command with its help, an example, and `--json`; `run` is its `module:function`."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}\n\n{CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print the report as one JSON document")
    command.set_defaults(run=run)
    return command


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


def _length(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdigit() or not int(size):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form batch=64")
    return name, int(size)


def entry(text: str) -> tuple[str, str]:
    """Read `KEY=VALUE`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return name, value


def _target(text: str) -> str:
    if is_target_file(text) or text in shipped_targets():
        return text
    near = get_close_matches(text, shipped_targets(), n=1)
    known = f"did you mean {near[0]}?" if near else f"choose {_DIALECTS}"
    raise argparse.ArgumentTypeError(f"unknown target {text!r}; {known}")


#: how the value of an option is read, by the word that stands for it
_READ: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "N": int,
        **dict.fromkeys(("DB", "X", "SHARE"), float),
        **dict.fromkeys(("KEY=VALUE", "NAME=VALUE", "A=B"), entry),
        "INPUT=1,3,224,224": shape,
        "AXIS=N": _length,
        "N|H,W": _sides,
        "R,G,B": _numbers,
        "TARGET": _target,
    }
)
_ROW = re.compile(r"(?P<name>\S+)(?: (?P<value>\S+))?(?P<more> \.\.\.)?  (?P<help>.+)")


def add_options(parser: Any, rows: str, **defaults: Any) -> None:
    """Add the options of a text: in each row the name, the word for its value, two blanks, and the help.

    A value in braces is one of those; without a value, an option is a switch; with `...` it may be repeated. A row goes
    on where the next one begins with blanks.
    """
    for row in re.sub(r"\n\s+(?=\S)", " ", re.sub(r"\n {4}(?=\S)", "\n", rows)).strip().split("\n"):
        found = _ROW.fullmatch(row)
        assert found is not None, row
        name, value = found["name"], found["value"]
        settings: dict[str, Any] = {"help": found["help"]}
        if name.startswith("-") and value is None:
            settings["action"] = "store_true"
        elif value is not None and value.startswith("{"):
            settings["choices"] = tuple(value[1:-1].split(","))
        elif value is not None:
            settings |= {"metavar": value, "type": _READ.get(value, str)}
        if found["more"]:
            settings |= {"action": "append", "default": []}
        dest = name.lstrip("-").replace("-", "_")
        parser.add_argument(name, **settings, **({"default": defaults[dest]} if dest in defaults else {}))


def _one_of(names: Iterable[str]) -> str:
    return f"{{{','.join(names)}}}"


_RUNTIMES, _TIMED = (_one_of(get_args(kind)) for kind in (RuntimeName, TimedRuntime))
_DIALECTS = f"{', '.join(shipped_targets())}, or a file that describes a target (.toml, or AIMET's .json)"

_METRIC = """
    --labels FILE|folder-names  indices of the classes: .npy, .npz (array 'labels'), .csv (label, or file,label), or
        folder-names where pictures lie in one folder per class
    --metric FILE.py:function  called with the outputs (a list of arrays, over all samples) and the labels (an array, or
        None); returns a number, larger being better (default with --labels: top-1)"""


def add_data(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that select the batches."""
    source = """
    --data PATH ...  .npz (one array per input, by name), .npy (the only input; with or without a batch axis), pictures
        (.jpg, .png, .bmp, .webp), or a folder of them; may be repeated
    --random N  N random batches: to try out, not to deploy"""
    add_options(command.add_mutually_exclusive_group(required=required), source)
    rows = """
    --batch-size N  samples per batch where the model leaves it open
    --shape INPUT=1,3,224,224 ...  the shape of an input whose dimensions are open, for --random; --dialect qnn and
        to-integer fix it
    --seed N  of --random
    --max-samples N  stop after N samples; of pictures, N spread over all of them"""
    add_options(command, rows, batch_size=32, seed=0)
    pictures = command.add_argument_group("pictures", "from a file to the model's input")
    add_options(pictures, "--image-size N|H,W  height and width (default: those that the model declares, else 224)")
    fit = """
    --crop N  resize the shorter side to N, then cut out the centre (default: N is 8/7 of the size, as 256 for 224)
    --resize  squeeze the whole picture to the size instead"""
    add_options(pictures.add_mutually_exclusive_group(), fit)
    rows = """
    --mean R,G,B  taken from pixels of 0..1 (default: ImageNet's; grey: 0)
    --std R,G,B  that divides them then (default: ImageNet's; grey: 1)
    --layout {nchw,nhwc}  where the channels are (default: as the model declares, else nchw)
    --preprocess FILE.py:function  your own instead: called with the path of each file, returns its array, or one per
        input by name"""
    add_options(pictures, rows)


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
    add_options(command, "--skip PATTERN ...  owners that stay float")


def add_evaluate(commands: Any) -> None:
    """Add `qsdk evaluate`."""
    text = "score a model in a runtime: top-1 and top-5 on labels, or a metric of your own"
    example = "qsdk evaluate model.onnx --data pictures --labels folder-names --against float.onnx"
    evaluate = add_command(commands, "evaluate", text, example, "qsdk.commands.scores:run_evaluate")
    add_options(evaluate, "model  an ONNX file: float, Q/DQ or integer-only (with float edges)")
    add_data(evaluate)
    rows = f"""
    --against FILE  a model to score beside it, such as the float one
    --runtime {_RUNTIMES}  run the files there as an application would (default: onnxruntime, on its CPU)"""
    add_options(evaluate, _METRIC + rows)


def add_sensitivity(commands: Any) -> None:
    """Add `qsdk sensitivity`."""
    text = "rank the layers by what quantizing each alone costs at the outputs, worst first"
    example = "qsdk sensitivity float.onnx --data images.npz --config w4a8"
    sensitivity = add_command(commands, "sensitivity", text, example, "qsdk.commands.scores:run_sensitivity")
    add_options(sensitivity, "model  a float ONNX file, which is quantized first, or a Q/DQ file")
    add_data(sensitivity)
    add_options(sensitivity, f"--config CONFIG  of a float model: {CONFIGS} (default: w8a8)")
    add_rules(sensitivity)
    rows = """
    --exact  measure each layer, in two passes each, instead of an estimate in one"""
    add_options(sensitivity, _METRIC + rows)


def add_validate(commands: Any) -> None:
    """Add `qsdk validate`."""
    text = "check a quantized ONNX model (exit 1 on errors or if nothing is quantized, 2 if unreadable)"
    validate = add_command(commands, "validate", text, "qsdk validate model.onnx --json", "qsdk.commands.validate:run")
    rows = f"""
    model  a quantized ONNX file
    --dialect TARGET  check for this runtime: {_DIALECTS} (default: ONNX Runtime's CPU)
    --strict  exit 1 on warnings too"""
    add_options(validate, rows)


def add_parity(commands: Any) -> None:
    """Add `qsdk parity`."""
    text = "compare a Q/DQ file in ONNX Runtime's own session with its simulation, site by site (exit 1 if they differ)"
    example = "qsdk parity model.onnx --data test.npz --float float.onnx --min-float-sqnr 20"
    parity = add_command(commands, "parity", text, example, "qsdk.commands.checks:run_parity")
    add_options(parity, "model  a Q/DQ ONNX file")
    add_data(parity)
    rows = f"""
    --level {{none,basic,extended,all}}  graph optimization of the session (default: all, as the runtime's own default)
    --entry KEY=VALUE ...  configuration entry of the session, such as session.qdq_matmulnbits_accuracy_level=0
    --min-sqnr DB  what each float output must reach, against the simulation's
    --float FILE  the float model, to say how far the outputs are from it
    --min-float-sqnr DB  what each float output must reach, against that of --float
    --runtime {_RUNTIMES}  run the file there as an application would, with its fusions, in place of a session of
        --level
    --against FILE  compare with the simulation of this Q/DQ file instead"""
    add_options(parity, rows, level="all")


def add_compare(commands: Any) -> None:
    """Add `qsdk compare`."""
    text = "compare two forms of a network tensor by tensor, and name the first that is off (exit 1 if there is one)"
    example = "qsdk compare float.onnx device_dump/ --data images.npz"
    compare = add_command(commands, "compare", text, example, "qsdk.commands.checks:run_compare")
    sides = """
    a  an ONNX file (float, Q/DQ or integer-only), or a folder of dumped tensors (.npy, .raw, .bin)
    b  another form of the same network"""
    add_options(compare, sides)
    add_data(compare, required=False)
    rows = """
    --name A=B ...  a tensor of a and the one of b that it is, where their names have nothing in common
    --tolerance SHARE  the largest difference that counts as none, relative to the largest value of a tensor, such as
        1e-2"""
    add_options(compare, rows)


def add_profile(commands: Any) -> None:
    """Add `qsdk profile`."""
    text = "show where the time of a model goes in a runtime: by layer, in integers, float or conversions"
    example = "qsdk profile model.onnx --against float.onnx --threads 4"
    profile = add_command(commands, "profile", text, example, "qsdk.commands.checks:run_profile")
    add_options(profile, "model  an ONNX file: float, Q/DQ or integer-only")
    add_data(profile, required=False)
    rows = f"""
    --runtime {_TIMED}  that runs the model (default: onnxruntime)
    --threads N  of the runtime (default: its own choice)
    --repeats N  runs that are timed (default: 20)
    --against FILE  a model to compare with, such as the float one"""
    add_options(profile, rows, runtime="onnxruntime", repeats=20)


def add_inspect(commands: Any) -> None:
    """Add `qsdk inspect`."""
    text = "list the encodings that the nodes of a Q/DQ file hold, by site: what a runtime computes with"
    inspect = add_command(commands, "inspect", text, "qsdk inspect model.onnx", "qsdk.commands.files:run_inspect")
    add_options(inspect, "model  a Q/DQ ONNX file")


def add_to_integer(commands: Any) -> None:
    """Add `qsdk to-integer`."""
    text, example = (
        "make a quantized ONNX model integer-only",
        "qsdk to-integer model.onnx model.int.onnx --edges integer",
    )
    integer = add_command(commands, "to-integer", text, example, "qsdk.commands.files:run_to_integer")
    rows = """
    model  a Q/DQ ONNX file
    out  the integer-only file to write
    --edges {float,integer}  what the model takes and gives
    --target {standard,onnxruntime,portable}  operators to write; portable: the same integers on every runtime
    --rounding ROUNDING  of requantization: half_even, half_up, half_away or gemmlowp (default: half_even)
    --allow-float GLOB ...  a node or op type that may stay float
    --firmware PATH  write the network without ONNX too: .npz (arrays) or .h (a C header)"""
    add_options(integer, rows, edges="float", target="standard", rounding="half_even")
    add_data(integer, required=False)


def add_encodings(commands: Any) -> None:
    """Add `qsdk encodings`."""
    text = "show or convert files of encodings"
    encodings = commands.add_parser("encodings", help=text, description=f"{text.capitalize()}.", epilog=CODES)
    verbs = encodings.add_subparsers(required=True, metavar="show|convert")
    source = "source  a file of encodings, or a Q/DQ ONNX model"
    model = "--model MODEL  the float ONNX model that they belong to, for what a file does not say"
    text = "list a file of encodings before it is loaded or converted: kinds, granularity, what is frozen"
    example = "qsdk encodings show model.encodings.json"
    add_options(
        add_command(verbs, "show", text, example, "qsdk.commands.files:run_show"),
        f"{source}\n{model}",
    )
    text = "write encodings in another format or version"
    example = "qsdk encodings convert model.onnx model.aimet.json --to 1.0.0"
    convert = add_command(verbs, "convert", text, example, "qsdk.commands.files:run_convert")
    add_options(convert, f"{source}\nout  the file to write")
    convert.add_argument("--to", required=True, metavar="VERSION", help="qsdk, 1.0.0, 2.0.0 or 2.1.0")
    add_options(convert, f"{model}\n--allow-loss  leave out what the version cannot say, and list it")


def add_report(commands: Any) -> None:
    """Add `qsdk report`."""
    text = "show what is quantized in a Q/DQ model, its sizes and ranges, as text or as one HTML page"
    example = "qsdk report model.onnx --out model.html --data images.npz --float float.onnx"
    report = add_command(commands, "report", text, example, "qsdk.commands.report:run")
    add_options(report, "model  a Q/DQ ONNX file\n--out FILE.html  write a page that needs nothing else")
    add_data(report, required=False)
    rows = """
    --float FILE  on the page: the float model, to compare the outputs and weights with
    --against FILE  on the page: another Q/DQ file, shown beside this one
    --profile  on the page: the milliseconds of each layer in ONNX Runtime"""
    add_options(report, rows)


def add_quantize(commands: Any) -> None:
    """Add `qsdk quantize`."""
    text = "quantize a float ONNX model or PyTorch module on calibration data"
    example = (
        "qsdk quantize float.onnx model.onnx --data images.npz --config w8a8 --override head weight=int8 --skip 'bn*'"
    )
    quantize = add_command(commands, "quantize", text, example, "qsdk.commands.quantize:run")
    rows = """
    model  a float ONNX file; FILE.py:function, which returns a PyTorch module, or (module, example); or the folder of a
        Hugging Face checkpoint
    out  the Q/DQ file to write; its encodings stand beside it. A folder for a checkpoint
    --format {onnx,compressed-tensors,genai,gguf,pt2e,tflite}  compressed-tensors: a folder for vLLM and transformers,
        of the linear layers of a PyTorch model; gguf: a file for llama.cpp, of a causal language model; pt2e: a program
        of torch.export for ExecuTorch, of a PyTorch model (--dialect xnnpack: what its kernels take); tflite: a file
        for LiteRT, of either"""
    add_options(quantize, rows, format="onnx")
    add_data(quantize, required=False)
    rows = f"""
    --length N  tokens of a window of text, for a checkpoint folder (default: 512)
    --config CONFIG  {CONFIGS} (default: w8a8)
    --block-size N  one scale of a weight per N input channels
    --kv-cache DTYPE  a decoder's file has a cache of this dtype: int8, float32, ..."""
    add_options(quantize, rows, length=512, config="w8a8")
    add_rules(quantize)
    rows = f"""
    --input NAME=VALUE ...  an input that is always the same, such as sr=16000: the file that is written has it no
        longer
    --method NAME  range estimator of activations: {", ".join(METHODS)} (default: min_max)
    --weight-method NAME  range estimator of weights, one of the same (default: min_max)
    --verbs VERB,VERB  what to do after calibration, in this order: rotate, equalize, smooth_quant, awq,
        reestimate_batch_norm, correct_bias, seq_mse, adaround, gptq; of a PyTorch module also tune_blocks, tune_ranges
    --mixed-precision  raise the sites that need it until the metric is within --max-drop (exit 1 if none is)
    --max-drop X  of the metric, from the float model (default: 0.01)"""
    add_options(quantize, rows + _METRIC, method="min_max", verbs="", max_drop=0.01)
    rows = f"""
    --metric-data PATH ...  as --data: what --metric and --labels are for instead, all of it, while --data calibrates
    --opset N  13 to 25 (default: 21)
    --dialect TARGET  the runtime that is to read the file: {_DIALECTS} (default: onnxruntime, with the config as it
        is); what it cannot have is changed before calibration; for onnxruntime, int8 weights are made exact on every
        processor
    --prefer {{speed,size}}  size: two 4-bit weights share a byte beside quantized activations too, where no integer
        kernel of ONNX Runtime reads them (default: speed)
    --longest AXIS=N ...  of a program (pt2e): the greatest length of an open axis, for which ExecuTorch plans memory"""
    add_options(quantize, rows, opset=21, prefer="speed")
    quantize.add_argument(
        "--providers",
        nargs="+",
        metavar="NAME",
        help="ONNX Runtime's execution providers to calibrate on, best first, such as CUDAExecutionProvider",
    )


def add_demo(commands: Any) -> None:
    """Add `qsdk demo`."""
    text = "a real network from float to integer-only, in one table"
    demo = add_command(commands, "demo", text, "qsdk demo --out demo", "qsdk.commands.demo:run")
    add_options(demo, "--out DIR  folder for the files and results.json")


def add_commands(commands: Any) -> None:
    """Add every command."""
    for add in (
        *(add_demo, add_quantize, add_inspect, add_validate, add_parity, add_compare, add_to_integer, add_encodings),
        *(add_report, add_profile, add_evaluate, add_sensitivity),
    ):
        add(commands)


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
    preset = preset_named(name)
    if given and preset is None:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is for a preset; write it into {name} instead")
    if block_size is not None and name in BLOCK_FORMATS:
        raise ConfigError(f"--block-size is not for {name}, which has blocks of {BLOCK_FORMATS[name].block_size}")
    config = preset(**given) if given and preset is not None else load_config(name)
    for pattern, text in overrides:
        where, parts = f"--override {pattern} {text}", [part.partition("=") for part in text.split(",")]
        choices: Any = {name: read_choice(name, value, where) for name, _, value in parts}
        config = config.override(pattern, **choices)
    for pattern in skipped:
        config = config.skip(pattern)
    return config
