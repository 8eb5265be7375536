"""What to write instead, for whoever types a name that qsdk, a sim or a module does not have."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_FLOAT8 = 'qsdk.w8a8(symmetric_activations=True).override("*", weight="float8e4m3fn", activation="float8e4m3fn")'
#: the functions of the face whose first argument is a sim
TAKE_A_SIM = frozenset(
    [
        "calibrate",
        "seq_mse",
        "tune_blocks",
        "adaround",
        "gptq",
        "correct_bias",
        "reestimate_batch_norm",
        "equalize",
        "smooth_quant",
        "awq",
        "rotate",
        "export",
        "check_parity",
        "load_encodings",
        "mixed_precision",
        "report",
        "sensitivity",
        "distill_loss",
        "save_encodings",
        "save",
    ]
)

#: where AIMET keeps the quantizers of a module
OF_MODULES = ("param_quantizers", "input_quantizers", "output_quantizers")


def quantizers_of(name: str, path: str) -> str:
    """Return what to use in place of the quantizers that AIMET keeps on a module."""
    kind, dtype = ("weight", "int4") if name.startswith("param") else ("activation", "uint16")
    site = f"{path or 'self'}:{'weight' if kind == 'weight' else 'output'}"
    return (
        f"a module of a sim has no {name}; its sites have encodings: sim.encodings[{site!r}] reads one, "
        f"config.override({site!r}, {kind}={dtype!r}) or sim.set_precision changes its dtype, and sim.freeze({site!r}) "
        "keeps it as it is"
    )


def missing_name(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """Return the text of the error for a name that qsdk does not have; `elsewhere`: name -> place in its modules."""
    if other_widths(name):
        return f"qsdk has no preset {name}; {other_widths(name)}"
    places = {**{one: one for one in known}, **elsewhere}
    spelled = {candidate.replace("_", "").lower(): place for candidate, place in places.items()}
    near = get_close_matches(name.replace("_", "").lower(), spelled, n=1, cutoff=0.75)
    if name in elsewhere:
        remedy = f"it is qsdk.{elsewhere[name]}"
    elif near:
        remedy = f"did you mean qsdk.{spelled[near[0]]}?"
    else:
        remedy = "help(qsdk) lists its names by task, docs/coming_from those of other tools with their counterparts"
    return f"module 'qsdk' has no attribute {name!r}; {remedy}"


def other_widths(name: str) -> str:
    """Return how to write a config of widths that no preset has, such as `w4a4kv8`; "" for a name of another kind."""
    widths = re.fullmatch(r"w([2-9]|1[0-6])a([2-9]|1[0-6])(?:kv([48]))?", name.lower())
    if widths is None:
        return ""
    cache = f', kv_cache="int{widths[3]}"' if widths[3] else ""
    preset = f"w{widths[1]}a{widths[2]}"
    if preset in ("w8a8", "w8a16", "w4a8", "w4a16"):
        return f"write it as qsdk.{preset}({cache[2:]})"
    return f'write it as qsdk.w8a8().override("*", weight="int{widths[1]}", activation="uint{widths[2]}"{cache})'


def other_config(name: str) -> str:
    """Return how to write a config that is named by its widths or by one dtype, such as `int8`; "" for another name."""
    if other_widths(name):
        return other_widths(name)
    if re.fullmatch(r"u?int[2-9]|u?int1[0-6]", name):
        bits = name.partition("int")[2]
        preset = {"4": "w4a8", "16": "w8a16"}.get(bits, "w8a8")
        return f'"{preset}" quantizes all, qsdk.weight_only("int{bits}") weights alone'
    if re.fullmatch(r"fp8|float8\w*", name):
        known = re.fullmatch(r"float8(e5m2|e4m3fnuz|e5m2fnuz)", name)
        return f"write it as {_FLOAT8.replace('float8e4m3fn', name) if known else _FLOAT8}"
    return ""


def missing_in_sim(name: str, cls: str, model: object, known: Iterable[str]) -> str:
    """Return the text of the AttributeError for a name that a sim does not have.

    Args:
        name: that was asked for.
        cls: name of the sim's class.
        model: the wrapped module, None for a sim of an ONNX model.
        known: names that the sim has.
    """
    text = f"{cls!r} object has no attribute {name!r}"
    if name in TAKE_A_SIM:
        return f"{text}; it is a function: qsdk.{name}(sim, ...)"
    if name == "train" and model is not None:
        return f"{text}; train inside `with sim.training() as model:`"
    if not name.startswith("_") and model is not None and hasattr(type(model), name):
        return f"{text}; the module has it: sim.model.{name}"
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{text}; did you mean sim.{near[0]}?" if near else text
