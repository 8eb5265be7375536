"""Configs: presets and rules for what is wanted where. Plain frozen data."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Unpack

from qsdk.core.atomic_files import write_text
from qsdk.core.config.for_dialect import changed_choices, exact_weights_for, first_rules, hardware_in, scale_bits_of
from qsdk.core.config.json_form import read_object, to_json
from qsdk.core.config.rules import (
    CHOICES,
    CONDITIONS,
    CacheScales,
    Compute,
    Conditions,
    FixedRange,
    Rule,
    RuleKeywords,
    make_rule,
    require_allowed,
    require_known,
    with_dtypes,
)
from qsdk.core.config.target import Target, load_target
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import (
    BLOCK_FORMATS,
    BlockName,
    DType,
    ElementType,
    dtype_named,
    element_type_named,
    float32,
    int4,
    int8,
    int32,
    uint8,
    uint16,
)
from qsdk.core.numerics.spec import Dynamic
from qsdk.core.patterns.terms import Pattern
from qsdk.core.report import Report
from qsdk.core.site import matches


@dataclass(frozen=True)
class QuantConfig:
    """The choices for every site, and the rules that differ from them; the last matching rule wins, choice by choice.

    Attributes:
        weight: dtype of weights, or a format of blocks such as `mxfp4`. Embeddings, norms and other constants keep 8
            bits where it is narrower. Raise it (int8, float16) where accuracy falls, lower it (int4) to save memory.
        activation: dtype of activations, and of inputs and outputs unless they are given; uint16 for wide ranges. Or a
            format of blocks such as `nvfp4`: of what linear layers with a quantized weight read, along what they sum
            over; all other activations stay float then.
        bias: int32 where input and weight have 8 bits or fewer; float32 leaves every bias float, for biases that int32
            clips or rounds to 0, which reports mention.
        input: dtype of the model's inputs where it differs from other activations.
        output: dtype of the model's outputs where it differs from other activations, such as a wider one for scores.
        kv_cache: dtype of the keys and values that a decoder takes and gives back from step to step: int8, int4,
            float8e4m3fn or float32; None for that of activations.
        kv_cache_scales: one scale of keys, and one of values, for each "tensor" (None too), "head" or "channel", where
            4 bits per tensor lose too much; "token": one for each token and head, found when the token is new. The
            pattern of a rule may name keys or values alone: `past_key_values.*.value`.
        per_channel: one weight scale per output channel, else per tensor, where a chip has no scales per channel.
        block_size: one weight scale per run of input channels, 32 to 128 for accurate 4-bit weights; None for none. The
            rows of an embedding have blocks where a rule names it.
        symmetric_weights: fixes the zero points of weights; None for those of a signed dtype only. False helps where
            all weights have one sign.
        symmetric_activations: fixes the zero points of activations, where a chip has none; costs accuracy on lopsided
            ranges.
        dynamic_activations: uint8 activations have the range of each tensor, found while the model runs
            (DynamicQuantizeLinear); they need no calibration, and biases behind them stay float. "token": int8 without
            zero points, with the range of each row along the last axis, for folders that vLLM reads. The name of a
            format of blocks says the same as `activation="nvfp4"`.
        per_channel_activations: one scale per channel, the last axis, for the activations that nothing reads but sums
            and layer normalizations; all others keep one scale. A transformer's residual sums have channels a hundred
            times larger than the rest.
        two_level_scales: block scales are integers, 1 to 16 (256 for more than 4 bits), times one float32 per channel
            (AIMET's LPBQ).
        scale_bits: significant binary digits of every scale, 1 for powers of two, where a chip rescales by shifts;
            None for those of float32.
        fixed_range: `(low, high)` whatever the data, "observed" for no fixed range at all; None for the ranges that
            belong to an op (Softmax lies in 0..1).
        tie: whether a Concat, or another op that keeps the grid, shares its inputs' encoding; None ties all but a
            Concat of parts of different kinds that leaves the model (boxes and scores of a detector);
            `qsdk.analysis.advise` says where another choice helps.
        supergroup: whether ops that run as one are quantized as one; None as ONNX Runtime runs them: all but a
            LeakyRelu or PRelu behind a convolution of 8 bits.
        supergroups: names of the supergroups to look for, chains of op types such as `Conv+Relu` among them; None for
            all that qsdk knows.
        hardware: name of the chip whose placement rules are applied as well, such as `v73`; None for none.
        only_linear: quantizes the weights of linear layers and what these layers read, and nothing else, as servers of
            language models compute, which read whole blocks alone. A table that an embedding shares with a linear layer
            stays float too.
        integer_ops: ONNX types for which the target has integer kernels; what none of them reads or writes stays float.
            None for all.
        exact_weights: dtype of the int8 weights of layers that read 8 bits, in the place of int8: that with which the
            processor's kernels are exact (`for_dialect("onnxruntime", processor=)`); None leaves int8.
        compute: what layers multiply whose weights alone are quantized. "int8": they round their float input to int8,
            for each block of 16 to 256 input channels as the weight has them, else of 32, as ONNX Runtime's fast kernel
            does by itself; "float32" leaves it as it is. None is float32, until `for_dialect("onnxruntime")`.
        rules: in order.
        layers: class name -> the parameters of it that are read through quantizers.
        patterns: supergroups of one's own, preferred to those of qsdk; Python only, they do not go into a file.
        notes: the report of `load_config` about a foreign file, which `print(config)` shows too; not part of the config
            itself.

    Examples:
        >>> print(QuantConfig(weight="int4", activation="uint16").override("head", weight="int8"))
        config: weight=int4, activation=uint16
        rule: 'head' -> weight=int8
    """

    weight: ElementType = int8
    activation: ElementType = uint8
    bias: DType = int32
    per_channel: bool = True
    block_size: int | None = None
    symmetric_activations: bool = False
    scale_bits: int | None = None
    tie: bool | None = None
    rules: tuple[Rule, ...] = ()
    layers: Mapping[str, tuple[str, ...]] | None = None
    input: DType | None = None
    output: DType | None = None
    kv_cache: DType | None = None
    kv_cache_scales: CacheScales | None = None
    symmetric_weights: bool | None = None
    fixed_range: FixedRange | None = None
    supergroup: bool | None = None
    supergroups: tuple[str, ...] | None = None
    hardware: str | None = None
    dynamic_activations: Dynamic = False
    two_level_scales: bool = False
    per_channel_activations: bool = False
    only_linear: bool = False
    integer_ops: tuple[str, ...] | None = None
    exact_weights: DType | None = None
    compute: Compute | None = None
    patterns: tuple[Pattern, ...] = ()
    notes: Report | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Accept names in place of dtypes, as `override` does."""
        choices = {name: getattr(self, name) for name in CHOICES}
        require_allowed(choices, "config")
        for name, value in {"dynamic_activations": False, **with_dtypes(choices)}.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        """Return the dtypes, what differs from the defaults, the rules, and what became of a foreign file's keys."""
        shown = {"weight": self.weight, "activation": self.activation}
        others = [part.name for part in fields(self) if part.name not in (*shown, "rules", "notes")]
        shown |= {name: getattr(self, name) for name in others if getattr(self, name) != getattr(_DEFAULTS, name)}
        lines = ["config: " + ", ".join(f"{name}={value}" for name, value in shown.items())]
        lines += [f"rule: {rule}" for rule in self.rules]
        return "\n".join([*lines, *([str(self.notes)] if self.notes else [])])

    def override(self, pattern: str = "*", **choices: Unpack[RuleKeywords]) -> "QuantConfig":
        """Return a config with one more rule, for the places that fit `pattern` and every condition given.

        Args:
            pattern: a shell glob over owners, or, with a colon, over whole sites (`conv1:weight`).
            choices: what is to hold there: attributes of this class, from `weight` to `compute`. And the conditions:
                `op_type`, the ONNX type, one of several, or a glob, such as "MatMul"; a class of PyTorch stands for the
                types that it becomes ("Linear": every Gemm and MatMul, "Conv2d": every Conv). `shape` of the tensor;
                None stands for any dimension. `tensor_dtype` of the tensor in the float model, where that has several.
                `optional=True`: the rule may match nothing, and keeps no BatchNorm from being folded.

        Raises:
            ConfigError: an unknown dtype or keyword, or a rule without any choice.
        """
        require_known("override", choices, (*CONDITIONS, *CHOICES, "optional"))
        return self._with_rule(pattern, choices)

    def skip(self, pattern: str = "*", dtype: DType | str = float32, **conditions: Unpack[Conditions]) -> "QuantConfig":
        """Return a config that leaves the places that fit `pattern` and every condition in a float dtype.

        Args:
            pattern: as for `override`.
            dtype: float32, float16 or bfloat16.
            conditions: `op_type`, `shape`, `tensor_dtype`, `optional`: as for `override`.

        Raises:
            ConfigError: dtype is not a float type, or a keyword is unknown.
        """
        require_known("skip", conditions, ("dtype", *CONDITIONS, "optional"))
        result = dtype_named(dtype)
        if result.kind != "float":
            raise ConfigError(f"skip({pattern!r}) keeps owners float; {result} is not a float dtype, use override")
        return self._with_rule(pattern, {**conditions, "weight": result, "activation": result, "bias": result})

    def _with_rule(self, pattern: str, keywords: Mapping[str, Any]) -> "QuantConfig":
        rule = make_rule(pattern, keywords, optional=keywords.get("optional", False))
        return replace(self, rules=(*self.rules, rule))

    def for_dialect(
        self,
        dialect: str | os.PathLike[str],
        *,
        processor: Literal["any", "vnni", "avx2", "arm64"] = "any",
        placement: Literal["kernels", "all"] | None = None,
    ) -> "QuantConfig":
        """Return the config with what the runtime of a dialect cannot have changed to what it can.

        Activations of int8 become uint8 for `qnn` and `openvino`; those for `tensorrt` are int8 and symmetric, and
        biases stay float. For `qnn`, what a MatMul reads as its second operand has the middle of its grid for its zero
        point. A LeakyRelu or PRelu is quantized as one with the layer in front of it for `openvino` and `tensorrt`, and
        apart from it for `qnn`. Calibrate and train after it, so that the simulation is what the runtime computes.

        For `onnxruntime`, activations of 8 bits are quantized only where an integer kernel reads or writes them, and
        the other tensors stay float with that reason: a pair around an op in floats only takes time. Int8 weights of
        layers that read 8 bits are made exact on the processors named (`exact_weights`), whichever rule asks for int8:
        x86 without VNNI saturates sums of two products. Layers whose weights alone are quantized compute in int8
        (`compute`), unless the config says float32.

        `compressed-tensors`, the format of `qsdk.export`, quantizes linear layers alone (`only_linear`): weights, and
        activations of int8 or float8e4m3fn without zero points; those of 16 bits stay float. `gguf`, the format of
        llama.cpp, has weights of up to 8 bits with scales that float16 holds, and so have their products with zero
        points; activations stay float, and layers round their input to int8 (`compute`), as llama.cpp does. `genai`,
        of onnxruntime-genai, has a cache of float32 where none is chosen, and one of int8 without zero points;
        activations of 16 bits stay float, and layers round their input to int8 (`compute`), as its fast kernels do.

        Args:
            dialect: the name of a target (`qsdk.core.config.targets`), a `.toml` file that describes one, or an AIMET
                quantsim config (`.json`), whose limits are taken.
            processor: for `onnxruntime`, where the file is to be exact: `any` (`int8_exact`: int8 with scales so large
                that no sum of products saturates, as fast everywhere), `vnni` and `arm64` (int8), or `avx2` (uint8 with
                a zero point of 128, slower).
            placement: for `onnxruntime`, `kernels` (the default), or `all` for pairs everywhere, as integer-only models
                and NPUs need them.

        Raises:
            ConfigError: an unknown dialect, processor or placement, or a choice for which the dialect has nothing, such
                as float8 activations for `qnn`.
        """
        target = load_target(dialect)
        rules = tuple(replace(r, choices={**r.choices, **changed_choices(r.choices, target)}) for r in self.rules)
        own = {name: getattr(self, name) for name in CHOICES}
        floats = changed_choices({"activation": self.activation}, target).get("activation", self.activation)
        in_int8 = target.int8_inputs and (floats.kind == "float" or self.dynamic_activations is True)
        compute = self.compute or "int8" if in_int8 and not target.only_linear else self.compute
        first, exact = first_rules(target), exact_weights_for(target, processor)
        changed = replace(
            self,
            **changed_choices(own, target),
            # before the user's own, which are preferred to them
            rules=(*first, *(rule for rule in rules if rule not in first)),
            only_linear=self.only_linear or target.only_linear,
            integer_ops=self.integer_ops or target.integer_ops,
            supergroups=target.supergroups if self.supergroups is None else self.supergroups,
            hardware=self.hardware or hardware_in(target, placement),
            exact_weights=exact if target.weights_by_processor else self.exact_weights,
            compute=None if target.only_linear else compute,  # files for which they are have no field for it
        )
        if target.scale_bits is not None and self.scale_bits is None:
            changed = replace(changed, scale_bits=target.scale_bits)
        if target.symmetric_weights:
            changed = replace(changed, symmetric_weights=True)
        if target.weight_scale_bits is not None:
            changed = self._with_scale_digits(changed, target)
        if target.kv_cache is not None and changed.kv_cache is None:
            changed = replace(changed, kv_cache=dtype_named(target.kv_cache))
        if not target.float_biases:
            return changed
        return changed.override("*", op_type=target.float_biases, bias=float32, optional=True)

    def _with_scale_digits(self, changed: "QuantConfig", target: Target) -> "QuantConfig":
        """Return the config for a target with scales of weights that its types can hold, in rules as well."""
        own, rules = {name: getattr(self, name) for name in CHOICES}, []
        for rule in changed.rules:
            about_scales = {"weight", "symmetric_weights", "scale_bits"} & rule.choices.keys()
            digits = scale_bits_of({**own, **rule.choices}, target) if about_scales else None
            rules.append(rule if digits is None else replace(rule, choices={**rule.choices, "scale_bits": digits}))
        changed = replace(changed, scale_bits=scale_bits_of(own, target), rules=tuple(rules))
        if all(choice.get("symmetric_weights") is not False for choice in (own, *(rule.choices for rule in rules))):
            return changed
        # tables keep 8 bits, which no type holds with zero points
        digits = target.weight_scale_bits
        return changed.override("*", op_type="Gather", symmetric_weights=True, scale_bits=digits, optional=True)

    def layer(self, class_name: str, *parameters: str) -> "QuantConfig":
        """Return a config that names the parameters of a module class which are read through quantizers.

        Without it all parameters of a class that qsdk does not know are, and the traced graph shows what each one is.
        """
        return replace(self, layers={**(self.layers or {}), class_name: parameters})

    def pattern(self, *patterns: Pattern) -> "QuantConfig":
        """Return a config with supergroups of one's own, which are preferred to those known so far."""
        return replace(self, patterns=(*patterns, *self.patterns))

    @property
    def has_kv_cache(self) -> bool:
        """Return whether the config or one of its rules names a dtype for a cache of keys and values."""
        return self.kv_cache is not None or any(rule.kv_cache is not None for rule in self.rules)

    def names(self, owner: str, *op_types: str) -> bool:
        """Return whether a rule names this owner, or one of its op types, by more than a bare `*`.

        Optional rules do not count.
        """
        return any(
            (rule.pattern.strip("*") or rule.op_type is not None)
            and not rule.optional
            and rule.fits_op_type(op_types)
            and matches(rule.pattern, owner)
            for rule in self.rules
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values for JSON, in the form that `config_schema` describes.

        Raises:
            ConfigError: it holds patterns, which are Python.
        """
        if self.patterns:
            named = ", ".join(pattern.name for pattern in self.patterns)
            raise ConfigError(f"a file cannot hold the patterns {named}; save the config without, and add them again")
        return to_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config as JSON, for `load_config`.

        Raises:
            ConfigError: it holds patterns, which are Python.
            ExportError: the file cannot be written.
        """
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config") -> "QuantConfig":
        """Read the dictionary that `to_dict` returned; `where` names the source in errors.

        Raises:
            ConfigError: an unknown key, a value of the wrong type, or a rule that makes no sense.
        """
        result = read_object(data, where)
        rules = result.pop("rules", ())
        return cls(**result, rules=rules)

    def of_saved_sim(self) -> "QuantConfig":
        """Return the config with rules that need not reach anything: a sim was made with them before it was saved."""
        return replace(self, rules=tuple(replace(rule, accepted=True) for rule in self.rules))


_DEFAULTS = QuantConfig()


def _preset(
    weight: DType, activation: DType, block_size: int | None, symmetric: bool, kv_cache: DType | str | None
) -> QuantConfig:
    cached = None if kv_cache is None else dtype_named(kv_cache)
    return QuantConfig(weight, activation, block_size=block_size, symmetric_activations=symmetric, kv_cache=cached)


def w8a8(
    *, block_size: int | None = None, symmetric_activations: bool = False, kv_cache: DType | str | None = None
) -> QuantConfig:
    """Return the config for 8-bit weights and 8-bit activations.

    Examples:
        >>> print(w8a8().override("head", weight="int4").skip("bn*"))
        config: weight=int8, activation=uint8
        rule: 'head' -> weight=int4
        rule: 'bn*' -> weight=float32, activation=float32, bias=float32
    """
    return _preset(int8, uint8, block_size, symmetric_activations, kv_cache)


def w8a16(
    *, block_size: int | None = None, symmetric_activations: bool = False, kv_cache: DType | str | None = None
) -> QuantConfig:
    """Return the config for 8-bit weights and 16-bit activations.

    Examples:
        >>> print(w8a16())
        config: weight=int8, activation=uint16
    """
    return _preset(int8, uint16, block_size, symmetric_activations, kv_cache)


def w4a8(
    *, block_size: int | None = None, symmetric_activations: bool = False, kv_cache: DType | str | None = None
) -> QuantConfig:
    """Return the config for 4-bit weights and 8-bit activations.

    Examples:
        >>> print(w4a8(block_size=32))
        config: weight=int4, activation=uint8, block_size=32
    """
    return _preset(int4, uint8, block_size, symmetric_activations, kv_cache)


def w4a16(
    *, block_size: int | None = None, symmetric_activations: bool = False, kv_cache: DType | str | None = None
) -> QuantConfig:
    """Return the config for 4-bit weights and 16-bit activations.

    Examples:
        >>> print(w4a16(symmetric_activations=True))
        config: weight=int4, activation=uint16, symmetric_activations=True
    """
    return _preset(int4, uint16, block_size, symmetric_activations, kv_cache)


def block_scaled(format: BlockName = "nvfp4", *, kv_cache: DType | str | None = None) -> QuantConfig:
    """Return the config for weights and activations of linear layers in blocks of narrow floats or integers.

    Each block has a scale; those of activations are found while the model runs. NVFP4 has blocks of 16 and one number
    for each tensor besides, which calibration finds; the others have blocks of 32 and scales that are powers of two.
    What no linear layer reads stays float. Servers with such kernels read folders of
    `qsdk.export(format="compressed-tensors")`.

    Args:
        format: "nvfp4" or "mxfp4" (4 bits), "mxfp8" or "mxint8" (8 bits).
        kv_cache: dtype of the keys and values of a decoder's cache, such as "float8e4m3fn".

    Raises:
        ConfigError: an unknown format.

    Examples:
        >>> print(block_scaled("mxfp8"))
        config: weight=mxfp8, activation=mxfp8
    """
    if format not in BLOCK_FORMATS:
        raise ConfigError(f"unknown format {format!r} of blocks; choose one of {', '.join(BLOCK_FORMATS)}")
    cached = None if kv_cache is None else dtype_named(kv_cache)
    return QuantConfig(BLOCK_FORMATS[format], BLOCK_FORMATS[format], kv_cache=cached)


def weight_only(
    weight: ElementType | str = int4,
    *,
    block_size: int | None = None,
    kv_cache: DType | str | None = None,
    compute: Compute | None = None,
) -> QuantConfig:
    """Return the config for quantized weights and float activations.

    Runtimes have fast kernels for `block_size=32` or more.

    Args:
        weight: a dtype, a format of blocks such as `mxfp4`, or the name of one.
        block_size: one scale per so many input channels; None for one per output channel.
        kv_cache: dtype of the keys and values of a decoder's cache, "float32" for one that is not quantized; None for
            a file without a cache, unless the example brings one.
        compute: "int8" where layers round their input to int8 while the model runs, as the fast kernel of ONNX Runtime
            does (a layer of 2048 takes 0.15 to 0.33 of float's time for one row), which is simulated then; "float32"
            for exact inputs. None is float32, and int8 `for_dialect("onnxruntime")`.

    Examples:
        >>> print(weight_only("int4", block_size=32))
        config: weight=int4, activation=float32, block_size=32
    """
    cached = None if kv_cache is None else dtype_named(kv_cache)
    return QuantConfig(element_type_named(weight), float32, block_size=block_size, kv_cache=cached, compute=compute)
