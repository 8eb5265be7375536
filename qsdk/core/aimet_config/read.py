"""AIMET's quantsim configs: every key is translated to qsdk's config, or noted as without counterpart."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from qsdk.core.config.aimet_target import GENERIC, PASSES
from qsdk.core.config.config import QuantConfig, w8a8
from qsdk.core.config.rules import OF_TORCH, as_fixed_range
from qsdk.core.encodings.checked import Checked
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import LINEAR, ONNX_OPS
from qsdk.core.numerics.dtypes import BlockFormat, DType, ElementType, dtype_named, float32, int32
from qsdk.core.planning.hardware import HARDWARE
from qsdk.core.planning.ties import PASS_THROUGH
from qsdk.core.report import Report

TAKEN, HOLDS, NONE = "taken over", "holds already", "no counterpart"

_SECTIONS = ("defaults", "params", "op_type", "supergroups", "supergroup_pass_list", "model_input", "model_output")
_FLOAT_BIAS = ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization")
_STATISTICS = ("running_mean", "running_var")
_OP_TYPES = ONNX_OPS | OF_TORCH.keys() | {"ChannelShuffle"}  # AIMET's own configs have the last
_BIAS = "AIMET gives them int32 when it exports: add .override(bias='int32') for that"
_DEPTHWISE = ", of depthwise and three-dimensional convolutions too"
_MADE = "a tensor is quantized where it is made, not where it is read"


@dataclass
class _ConfigReader:
    """The state of reading a config."""

    data: Checked
    base: QuantConfig
    enforce: bool
    config: QuantConfig
    rows: list[dict[str, str]] = field(default_factory=list)

    def note(self, part: Checked, state: str, note: str) -> None:
        """Record the outcome of a key."""
        self.rows.append({"key": part.key, "value": part.shown, "state": state, "note": note})

    def set(self, part: Checked, note: str = "", **choices: Any) -> None:
        """Translate a key to defaults."""
        self.config = replace(self.config, **choices)
        text = ", ".join(f"{name}={value}" for name, value in choices.items())
        self.note(part, TAKEN, text + (f"; {note}" if note else ""))

    def rule(self, part: Checked, note: str = "", pattern: str = "*", **options: Any) -> None:
        """Translate a key to a rule that may match nothing."""
        self.config = self.config.override(pattern, **options, optional=True)
        self.note(part, TAKEN, str(self.config.rules[-1]) + (f"; {note}" if note else ""))


def is_aimet(data: Any) -> bool:
    """Return whether this is the content of an AIMET quantsim config."""
    return isinstance(data, Mapping) and "format" not in data and bool(set(_SECTIONS[:3]).intersection(data))


def from_aimet(data: Mapping[str, Any], where: str, base: QuantConfig | None, *, enforce_kernels: bool) -> QuantConfig:
    """Return a config translated from AIMET's; later sections win over earlier ones, as with AIMET."""
    known = w8a8() if base is None else base
    reading = _ConfigReader(Checked(data, "", where), known, enforce_kernels, known)
    reading.data.require(*_SECTIONS)
    _defaults(reading, reading.data.part("defaults"))
    for name, param in reading.data.part("params").parts():
        _param(reading, param, name, None)
    for op_type, part in reading.data.part("op_type").parts():
        _note_if_unknown(reading, part, [op_type])
        _op_type(reading, part, op_type)
    _supergroups(reading)
    _edges(reading)
    states = [row["state"] for row in reading.rows]
    summary = {state: states.count(state) for state in (TAKEN, HOLDS, NONE)}
    return replace(reading.config, notes=Report(f"AIMET config {where}", reading.rows, summary))


def _defaults(reading: _ConfigReader, part: Checked) -> None:
    part.require(
        *("ops", "params", "strict_symmetric", "unsigned_symmetric", "per_channel_quantization"),
        *("supported_kernels", "hw_version"),
    )
    _default_ops(reading, part.part("ops"))
    _default_params(reading, part.part("params"))
    _grids(reading, part)
    channels = part.part("per_channel_quantization")
    reading.set(channels, per_channel=channels.flag(False))
    for kernels in part.given("supported_kernels"):
        _kernels(reading, kernels, None)
    _hardware(reading, part.part("hw_version"))


def _hardware(reading: _ConfigReader, part: Checked) -> None:
    name = part.text().lower() if part.is_given else GENERIC
    if name in HARDWARE:
        reading.set(part, "its rules hold on top, for norm weights and operands of MatMul", hardware=name)
    else:
        reading.config = replace(reading.config, hardware=GENERIC)
        reading.note(part, NONE, f"no rules of this target are known; those of every target hold ({GENERIC})")


def _default_ops(reading: _ConfigReader, part: Checked) -> None:
    part.require("is_input_quantized", "is_output_quantized", "is_symmetric")
    output, symmetric = part.part("is_output_quantized"), part.part("is_symmetric")
    dtype = reading.base.activation if output.flag(False) else float32
    reading.set(output, activation=dtype)
    reading.set(symmetric, symmetric_activations=symmetric.flag(False))
    for read in part.given("is_input_quantized"):
        reading.note(read, NONE, _MADE)


def _default_params(reading: _ConfigReader, part: Checked) -> None:
    part.require("is_quantized", "is_symmetric")
    quantized, symmetric = part.part("is_quantized"), part.part("is_symmetric")
    weight, bias = (reading.base.weight, reading.base.bias) if quantized.flag(False) else (float32, float32)
    reading.set(quantized, weight=weight, bias=bias)
    reading.set(symmetric, symmetric_weights=symmetric.flag(False))


def _grids(reading: _ConfigReader, part: Checked) -> None:
    strict, unsigned = part.part("strict_symmetric"), part.part("unsigned_symmetric")
    config = reading.config
    weight, activation = _plain(config.weight), _plain(config.activation)
    if config.symmetric_activations and not unsigned.flag(False):
        activation = _signed(activation)
    if strict.flag(False):
        weight, activation = _strict(weight), _strict(activation)
    reading.set(strict, weight=weight, activation=activation)
    if unsigned.flag(False) or not config.symmetric_activations:
        reading.note(unsigned, HOLDS, "an unsigned dtype with a fixed zero point uses 0 where nothing is negative")
    else:
        reading.note(unsigned, TAKEN, f"symmetric activations are {activation}, also where nothing is negative")


def _signed(dtype: DType) -> DType:
    return dtype_named(dtype.name.removeprefix("u")) if dtype.is_integer else dtype


def _strict(dtype: DType) -> DType:
    return dtype.strict if dtype.is_integer and dtype.signed else dtype


def _param(reading: _ConfigReader, part: Checked, name: str, op_type: str | None) -> None:
    """Translate a stored tensor of a name: for every op, or for those of a type."""
    part.require("is_quantized", "is_symmetric")
    quantized, symmetric = part.part("is_quantized"), part.part("is_symmetric")
    if name in _STATISTICS:
        for given in (quantized, symmetric):
            if given.is_given:
                state = NONE if given.flag(False) else HOLDS
                reading.note(given, state, "statistics of a norm stay float")
        return
    pattern = "*" if name in ("weight", "bias") else f"*:{name}"
    if name == "bias" and op_type in _FLOAT_BIAS and quantized.flag(False):
        reading.note(quantized, NONE, f"the bias of {op_type} has no integer form here and stays float")
    elif quantized.is_given:
        kind = "bias" if name == "bias" else "weight"
        wanted = _stored_dtype(reading, kind) if quantized.flag(False) else float32
        note = _BIAS if kind == "bias" and op_type is None and not wanted.is_quantized else ""
        reading.rule(quantized, note, pattern, op_type=op_type, **{kind: wanted})
    if symmetric.is_given and name == "bias":
        reading.note(symmetric, HOLDS, "a quantized bias is int32 with zero point 0")
    elif symmetric.is_given:
        reading.rule(symmetric, "", pattern, op_type=op_type, symmetric_weights=symmetric.flag(False))


def _stored_dtype(reading: _ConfigReader, kind: str) -> DType:
    if kind == "bias":
        return reading.base.bias if reading.base.bias.is_quantized else int32
    weight = _plain(reading.config.weight)
    return weight if weight.is_quantized else _plain(reading.base.weight)


def _plain(dtype: ElementType) -> DType:
    if isinstance(dtype, BlockFormat):
        raise ConfigError(
            f"an AIMET config changes dtypes, not the format of blocks {dtype}; give a base of plain dtypes"
        )
    return dtype


def _note_if_unknown(reading: _ConfigReader, part: Checked, op_types: Iterable[str]) -> None:
    """Note the op types that ONNX does not have, and warn of those that look misspelt; ops of one's own may have them.

    The key itself is taken over, since it does reach such ops.
    """
    for op_type in op_types:
        if op_type in _OP_TYPES:
            continue
        near = get_close_matches(op_type, _OP_TYPES, n=1)
        remedy = f"; did you mean {near[0]!r}?" if near else ""
        note = f"ONNX has no op type {op_type!r}, so it reaches nothing but custom ops of that name{remedy}"
        reading.note(part, NONE, note)
        if near:
            warnings.warn(f"{part.where}: {note}", stacklevel=4)


def _op_type(reading: _ConfigReader, part: Checked, op_type: str) -> None:
    part.require(
        *("is_input_quantized", "is_output_quantized", "is_symmetric", "params", "supported_kernels"),
        *("per_channel_quantization", "encoding_constraints"),
    )
    for read in part.given("is_input_quantized"):
        reading.note(read, NONE, _MADE)
    for made in part.given("is_output_quantized"):
        _output(reading, made, op_type)
    for symmetric in part.given("is_symmetric"):
        reading.rule(symmetric, _MADE, op_type=op_type, symmetric_activations=symmetric.flag(False))
    for channels in part.given("per_channel_quantization"):
        if channels.flag(False) and op_type not in LINEAR:
            reading.note(channels, NONE, f"a stored operand of {op_type} has one scale here")
        else:
            reading.rule(channels, op_type=op_type, per_channel=channels.flag(False))
    for kernels in part.given("supported_kernels"):
        _kernels(reading, kernels, op_type)
    for constraint in part.given("encoding_constraints"):
        _constraint(reading, constraint, op_type)
    for name, param in part.part("params").parts():
        _param(reading, param, name, op_type)


def _output(reading: _ConfigReader, part: Checked, op_type: str) -> None:
    if part.flag(False):
        reading.rule(part, op_type=op_type, activation=reading.base.activation)
    elif op_type in PASS_THROUGH or op_type == "Pad":
        note = "it moves values, and shares the encoding of its input"
        table = "; rows of a table get an encoding of their own" if op_type == "Gather" else ""
        reading.note(part, HOLDS, note + table)
    else:
        reading.rule(part, op_type=op_type, activation=float32)


def _constraint(reading: _ConfigReader, part: Checked, op_type: str) -> None:
    part.require("min", "max")
    low, top = part.part("min").number(), part.part("max")
    if not top.is_given:
        holds = low == 0 and op_type in ("Relu", "Sigmoid", "Softmax", "Clip")
        why = "nothing it makes is negative" if holds else "a range is fixed at both ends or at none"
        reading.note(part, HOLDS if holds else NONE, why)
        return
    high = top.number()
    as_fixed_range((low, high), f" ({part.where})")
    options: dict[str, Any] = {"symmetric_activations": True} if low == -high else {}
    reading.rule(part, op_type=op_type, fixed_range=(low, high), **options)


def _kernels(reading: _ConfigReader, part: Checked, op_type: str | None) -> None:
    pairs = []
    for kernel in part.items():
        kernel.require("activation", "param")
        weight = kernel.part("param")
        pairs.append((_kernel(kernel.part("activation")), _kernel(weight) if weight.is_given else None))
    config = reading.config
    have = (_kind(_plain(config.activation)), _kind(_plain(config.weight)))
    shown = " with ".join(f"{kind} {bits}" for kind, bits in have)
    if any(pair in (have, (have[0], None)) for pair in pairs):
        reading.note(part, HOLDS, f"{shown} is among them")
    elif not reading.enforce or not pairs:
        reading.note(part, NONE, f"{shown} is not among them; load with enforce_kernels=True to take the first")
    else:
        options: dict[str, Any] = {"activation": _dtype(pairs[0][0], _plain(config.activation))}
        if pairs[0][1] is not None:
            options["weight"] = _dtype(pairs[0][1], _plain(config.weight))
        if op_type is None:
            reading.set(part, **options)
        else:
            reading.rule(part, op_type=op_type, **options)


def _kernel(part: Checked) -> tuple[str, int]:
    part.require("bitwidth", "dtype")
    kind, bits = part.part("dtype").text(), part.part("bitwidth").number()
    if kind not in ("int", "float") or bits not in (4, 8, 16, 32) or (kind == "float" and bits < 16):
        raise ConfigError(f"{part.where} is int 4, 8, 16 or 32, or float 16 or 32, not {kind} {bits:g}; correct it")
    return kind, int(bits)


def _kind(dtype: DType) -> tuple[str, int]:
    return ("int" if dtype.is_integer else "float"), dtype.bits


def _dtype(kernel: tuple[str, int], like: DType) -> DType:
    kind, bits = kernel
    unsigned = kind == "int" and bits < 32 and like.is_integer and not like.signed
    return dtype_named(f"{'u' if unsigned else ''}{kind}{bits}")


def _supergroups(reading: _ConfigReader) -> None:
    names: list[str] = []
    for entry in reading.data.part("supergroups").items():
        entry.require("op_list")
        chain = [op.text() for op in entry.part("op_list").items()]
        if len(chain) < 2:
            raise ConfigError(f"{entry.where} needs two op types or more; it has {len(chain)}")
        names.append("+".join(chain))
        _note_if_unknown(reading, entry, chain)
        reading.note(entry, TAKEN, f"supergroup {names[-1]}{_DEPTHWISE if chain[0] == 'Conv' else ''}")
    for entry in reading.data.part("supergroup_pass_list").items():
        known = PASSES.get(entry.text())
        if known is not None:
            names.append(known)
        text = "no supergroup of that name" if known is None else f"supergroup {known}"
        reading.note(entry, NONE if known is None else TAKEN, text)
    reading.config = replace(reading.config, supergroups=tuple(names))


def _edges(reading: _ConfigReader) -> None:
    inputs, outputs = reading.data.part("model_input"), reading.data.part("model_output")
    inputs.require("is_input_quantized")
    outputs.require("is_output_quantized")
    given = inputs.part("is_input_quantized")
    dtype = reading.config.activation if reading.config.activation.is_quantized else reading.base.activation
    reading.set(given, input=dtype if given.flag(False) else float32)
    for made in outputs.given("is_output_quantized"):
        reading.rule(made, output=dtype if made.flag(False) else float32)
