"""The names of runtimes, and what a config has to change so that one can compute every site as it is simulated.

How to write for a runtime, and how to run it, says its object in `onnx_backend/runtimes/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import BlockFormat, DType, float32, int4, int8, int8_exact, uint8, uint16

#: the dialects of ONNX files, one per runtime, and the standard's own form
Dialect = Literal["onnxruntime", "onnx", "openvino", "qnn", "tensorrt"]
#: those of them that run here, and those whose times can be taken
RuntimeName = Literal["onnxruntime", "openvino", "qnn"]
TimedRuntime = Literal["onnxruntime", "openvino"]


@dataclass(frozen=True)
class Changes:
    """The changes that one runtime needs.

    Attributes:
        activations: name of a dtype -> the one in its place.
        no_activations: dtypes that have none in their place.
        weights: as `activations`, for weights.
        no_weights: as `no_activations`, for weights and formats of weights.
        blocks: True if block-wise scales of weights are read.
        symmetric: True if activations have no zero points.
        float_biases: globs over op types whose biases stay float.
        only_linear: True if linear layers alone are quantized.
        weights_by_processor: kind of processor -> the dtype of int8 weights of layers beside activations of uint8, with
            which its kernels are exact.
        hardware: of `qsdk.core.planning.hardware`, for configs that name none.
        placements: of pairs, the default first; with `all` in place of it, no hardware is named.
        int8_inputs: True if layers whose weights alone are quantized are fastest on inputs rounded to int8.
        scale_digits: significant binary digits of scales of weights, and of their products with zero points.
        kv_cache: of configs that choose none for what they carry from step to step.
        fused_slopes: whether a LeakyRelu or PRelu is one op with the layer in front of it; None as in ONNX Runtime.
    """

    activations: Mapping[str, DType] = field(default_factory=dict)
    no_activations: frozenset[str] = frozenset()
    weights: Mapping[str, DType] = field(default_factory=dict)
    no_weights: frozenset[str] = frozenset()
    blocks: bool = True
    symmetric: bool = False
    float_biases: tuple[str, ...] = ()
    only_linear: bool = False
    weights_by_processor: Mapping[str, DType] = field(default_factory=dict)
    hardware: str | None = None
    placements: tuple[str, ...] = ("all",)
    int8_inputs: bool = False
    scale_digits: int | None = None
    kv_cache: DType | None = None
    fused_slopes: bool | None = None


_FLOAT8 = frozenset({"float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"})
_NARROW = frozenset({"uint2", "int2", "float4e2m1"})
_FORMATS = frozenset({"mxfp4", "mxfp8", "nvfp4"})

CHANGES: Mapping[str, Changes] = {
    "onnxruntime": Changes(
        weights_by_processor={"any": int8_exact, "vnni": int8, "avx2": uint8, "arm64": int8},
        int8_inputs=True,
        hardware="onnxruntime",
        placements=("kernels", "all"),
    ),
    "onnx": Changes(),
    "openvino": Changes(
        activations={"int8": uint8, "int4": uint8},
        no_activations=_FLOAT8 | _NARROW,
        weights={"uint8": int8},
        no_weights=_NARROW | _FORMATS,
        fused_slopes=True,
    ),
    "qnn": Changes(
        activations={"int8": uint8, "int16": uint16, "uint4": uint8, "int4": uint8},
        no_activations=_FLOAT8 | _NARROW,
        weights={"uint8": int8, "int16": int8},
        no_weights=_FLOAT8 | _NARROW | _FORMATS,
        blocks=False,
        float_biases=("LayerNormalization", "LayerNorm*", "GroupNorm*", "InstanceNorm*"),
        hardware="qnn",
        fused_slopes=False,
    ),
    "tensorrt": Changes(
        activations={"uint8": int8},
        no_activations=frozenset({"uint16", "int16", "uint4", "int4"}) | _NARROW,
        weights={"uint8": int8},
        no_weights=frozenset({"uint2", "int2", "int16", "uint4"}),
        symmetric=True,
        float_biases=("*",),
        fused_slopes=True,
    ),
    "compressed-tensors": Changes(
        activations={"uint8": int8, "uint16": float32, "int16": float32},
        no_activations=_FLOAT8 - {"float8e4m3fn"} | _NARROW | {"uint4", "int4"},
        weights={"uint8": int8, "uint4": int4},
        no_weights=_FLOAT8 - {"float8e4m3fn"}
        | _NARROW
        | _FORMATS
        | {"int3", "int5", "int6", "int7", "int8_exact", "int16", "uint16"},
        symmetric=True,
        float_biases=("*",),
        only_linear=True,
    ),
    "genai": Changes(
        activations={"uint16": float32, "int16": float32},
        no_weights=frozenset({"int16", "uint16"}),
        int8_inputs=True,
        kv_cache=float32,
    ),
    "gguf": Changes(
        activations={"uint16": float32, "int16": float32},
        no_activations=_FLOAT8 | _NARROW | {"uint8", "int8", "uint4", "int4"},
        weights={"uint8": int8, "int8_exact": int8},
        no_weights=_FLOAT8 | {"float4e2m1", "mxfp8", "nvfp4", "int16", "uint16"},
        int8_inputs=True,
        scale_digits=11,  # of float16, which all its integers have for scales and minima
    ),
}


def changes_for(dialect: str) -> Changes:
    """Return what a config has to change for a dialect of `qsdk.export`; an unknown one is a ConfigError."""
    if dialect not in CHANGES:
        raise ConfigError(f"unknown dialect {dialect!r}; choose one of {', '.join(CHANGES)}")
    return CHANGES[dialect]


def changed_choices(choices: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """Return the choices of a config or rule that differ for a dialect; ConfigError where it has nothing for one."""
    changes, found = changes_for(dialect), dict[str, Any]()
    activations, weights = (changes.activations, changes.no_activations), (changes.weights, changes.no_weights)
    for name in ("activation", "input", "output", "kv_cache", "weight"):
        value, (known, refused) = str(choices.get(name)), weights if name == "weight" else activations
        if value in refused:
            raise ConfigError(f"{name}={value} cannot be had in the dialect {dialect}; choose another dtype")
        if value in known:
            found[name] = known[value]
    if choices.get("block_size") is not None and not changes.blocks:
        raise ConfigError(f"block_size={choices['block_size']} cannot be had in the dialect {dialect}; leave it out")
    if changes.symmetric and choices.get("symmetric_activations") is False:
        found["symmetric_activations"] = True
    return found


def scale_bits_of(choices: Mapping[str, Any], dialect: str) -> int | None:
    """Return the digits that scales of weights can have in a dialect, no more than the choices ask for."""
    digits, wanted = CHANGES[dialect].scale_digits, choices.get("scale_bits")
    weight = changed_choices({"weight": choices["weight"]}, dialect).get("weight", choices["weight"])
    if digits is None or isinstance(weight, BlockFormat) or not weight.is_integer:
        return wanted
    symmetric = weight.signed if choices.get("symmetric_weights") is None else choices["symmetric_weights"]
    most = digits if symmetric else max(digits - max(weight.bits, 4), 2)  # 8 would be bfloat16's
    return min(most, wanted or most)


def weight_for(dialect: str, processor: str) -> DType | None:
    """Return the dtype of int8 weights of layers with which a processor's kernels are exact, None for any dtype."""
    known = CHANGES[dialect].weights_by_processor
    if processor not in (*known, "any"):
        raise ConfigError(
            f"unknown processor {processor!r} for the dialect {dialect}; choose "
            f"{'one of ' if known else ''}{', '.join(known) or 'any'}"
        )
    return known.get(processor)


def hardware_in(dialect: str, placement: str | None) -> str | None:
    """Return the target whose rules hold in a dialect for configs that name none."""
    changes = CHANGES[dialect]
    if placement not in (None, *changes.placements):
        raise ConfigError(
            f"unknown placement {placement!r} for the dialect {dialect}; choose all, or kernels for onnxruntime"
        )
    return changes.hardware if placement in (None, changes.placements[0]) else None
