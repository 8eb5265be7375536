"""The dialects, and what a config has to change so that a target can compute every site as it is simulated.

The facts of a target stand in its file in `targets/`; how to write for a runtime, and how to run it, says its object in
`onnx_backend/runtimes/`.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

from qsdk.core.config.rules import Rule, make_rule
from qsdk.core.config.target import Target
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import BlockFormat, DType, dtype_named, float32, int8

#: the dialects of ONNX files that have code of their own, one per runtime, and the standard's own form
Dialect = Literal["onnxruntime", "onnx", "openvino", "qnn", "iree", "tensorrt"]
#: how a user names one: these, other targets that come with qsdk, or the .toml file that describes a target
AnyDialect = Dialect | str | os.PathLike[str]
#: those of them that run here, and those whose times can be taken
RuntimeName = Literal["onnxruntime", "openvino", "qnn", "iree"]
TimedRuntime = Literal["onnxruntime", "openvino"]
#: those in which an exported file can be compared with its sim: besides, what runs files of other formats
ParityRuntime = Literal["onnxruntime", "openvino", "qnn", "iree", "litert", "executorch"]


def changed_choices(choices: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Return the choices of a config or rule that differ for a target; ConfigError where it has nothing for one."""
    found = dict[str, Any]()
    for name in ("activation", "input", "output", "kv_cache", "weight"):
        value = choices.get(name)
        if value is None:
            continue
        instead = target.weights_instead if name == "weight" else target.activations_instead
        if str(value) in instead:
            found[name] = dtype_named(instead[str(value)])
        else:
            target.require(name, str(value))
    size, sizes = choices.get("block_size"), target.block_sizes
    if size is not None and sizes is not None and size not in sizes:
        remedy = f"choose {' or '.join(map(str, sizes))}" if sizes else "leave it out"
        raise ConfigError(f"block_size={size} cannot be had in the dialect {target.name}; {remedy}")
    if target.symmetric_activations and choices.get("symmetric_activations") is False:
        found["symmetric_activations"] = True
    if target.symmetric_weights and choices.get("symmetric_weights") is False:
        found["symmetric_weights"] = True
    if not target.per_channel and choices.get("per_channel"):
        found["per_channel"] = False
    if target.scale_bits is not None and (choices.get("scale_bits") or target.scale_bits) > target.scale_bits:
        found["scale_bits"] = target.scale_bits
    return found


def scale_bits_of(choices: Mapping[str, Any], target: Target) -> int | None:
    """Return the digits that scales of weights can have for a target, no more than the choices ask for."""
    digits, wanted = target.weight_scale_bits, choices.get("scale_bits")
    weight = changed_choices({"weight": choices["weight"]}, target).get("weight", choices["weight"])
    if digits is None or isinstance(weight, BlockFormat) or not weight.is_integer:
        return wanted
    symmetric = weight.signed if choices.get("symmetric_weights") is None else choices["symmetric_weights"]
    most = digits if symmetric else max(digits - max(weight.bits, 4), 2)  # 8 would be bfloat16's
    return min(most, wanted or most)


def first_rules(target: Target) -> list[Rule]:
    """Return the rules of a target, which come before those of the user."""
    rules = [
        make_rule("*", {"op_type": op_type, "fixed_range": interval}, optional=True)
        for op_type, interval in target.fixed_ranges.items()
    ]
    for op_types, choices in (
        (target.float_results, {"activation": float32}),
        (target.one_scale_ops, {"per_channel": False}),
    ):
        if op_types:
            rules.append(make_rule("*", {"op_type": op_types, **choices}, optional=True))
    if target.tied_ops:
        rules.append(make_rule("*", {"op_type": target.tied_ops, "tie": True}, optional=True))
    if target.fused_slopes is not None:
        slopes = {"op_type": ("LeakyRelu", "PRelu"), "supergroup": target.fused_slopes}
        rules.append(make_rule("*", slopes, optional=True))
    return rules


def exact_weights_for(target: Target, processor: str) -> DType | None:
    """Return the dtype in the place of int8 with which a processor's kernels are exact, None for int8 itself."""
    known = target.weights_by_processor
    if processor not in (*known, "any"):
        raise ConfigError(
            f"unknown processor {processor!r} for the dialect {target.name}; choose "
            f"{'one of ' if known else ''}{', '.join(known) or 'any'}"
        )
    dtype = dtype_named(known[processor]) if processor in known else int8
    return None if dtype == int8 else dtype


def hardware_in(target: Target, placement: str | None) -> str | None:
    """Return the hardware whose rules hold for a target in configs that name none."""
    if placement not in (None, *target.placements):
        raise ConfigError(
            f"unknown placement {placement!r} for the dialect {target.name}; choose all, or kernels for onnxruntime"
        )
    return target.hardware if placement in (None, target.placements[0]) else None
