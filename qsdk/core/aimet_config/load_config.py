"""Config files: qsdk's own, AIMET's, and AIMET's built-in ones by name."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from qsdk.core.aimet_config.read import from_aimet, is_aimet
from qsdk.core.config.config import QuantConfig, block_scaled, w4a8, w4a16, w8a8, w8a16, weight_only
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.missing_names import other_config, other_widths
from qsdk.core.numerics.dtypes import BlockName
from qsdk.core.read_files import parse_json, read_text

_Preset = Callable[..., QuantConfig]
_IN_BLOCKS: dict[str, _Preset] = {name: partial(block_scaled, name) for name in get_args(BlockName)}
PRESETS: Mapping[str, _Preset] = MappingProxyType(
    {"w8a8": w8a8, "w8a16": w8a16, "w4a8": w4a8, "w4a16": w4a16, "weight_only": weight_only, **_IN_BLOCKS}
)


def preset_named(name: str) -> Callable[..., QuantConfig] | None:
    """Return the preset of a name, or of one with a cache of keys and values, such as `w8a8kv8`; None for others."""
    base, _, bits = name.partition("kv")
    if base in PRESETS and bits in ("4", "8"):
        return partial(PRESETS[base], kv_cache=f"int{bits}")
    return PRESETS.get(name)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    base: QuantConfig | None = None,
    enforce_kernels: bool = False,
) -> QuantConfig:
    """Read a config from a JSON file of qsdk or of AIMET, or from one of AIMET's built-in ones by its name.

    Args:
        source: a path, the content of a file, or a name: of a preset such as `w4a8`, or `w8a8kv8` with a cache of 8
            bits, or of an AIMET config such as `htp_v73`.
        base: the choices that an AIMET file leaves open, above all the dtypes; `w8a8()` if None.
        enforce_kernels: where an AIMET file lists supported kernels and the dtypes of `base` are not among them, take
            the first one (AIMET does so only behind a switch of its own).

    Returns:
        The config. That of an AIMET file has `notes`, which `print(config)` shows: a row for each key, taken over,
        holding already, or without a counterpart here.

    Raises:
        FileFormatError: the file cannot be read, or is no JSON.
        ConfigError: its content makes no sense, or no file and no built-in config has this name.

    Examples:
        >>> load_config("htp_v73").hardware
        'v73'
    """
    preset = preset_named(source) if isinstance(source, str) else None
    if preset is not None and base is None and not enforce_kernels:
        return preset()
    data, where = (source, "config") if isinstance(source, Mapping) else _open(source)
    if is_aimet(data):
        return from_aimet(data, where, base, enforce_kernels=enforce_kernels)
    if base is not None or enforce_kernels:
        raise ConfigError(f"{where} is no AIMET config, so base= and enforce_kernels= mean nothing; leave them out")
    return QuantConfig.from_dict(data, where=where)


def config_or_preset(config: QuantConfig | str | None) -> QuantConfig | None:
    """Return the config that a verb was given, or the preset that it was given the name of."""
    if isinstance(config, QuantConfig | None):
        return config
    if not isinstance(config, str):
        raise ConfigError(f"expected a QuantConfig such as qsdk.w8a8(), got {type(config).__name__}")
    preset = preset_named(config)
    if preset is None:
        remedy = f"give config=qsdk.load_config({config!r}) for a file or for one of AIMET's configs"
        raise ConfigError(
            f"config={config!r} is none of the presets {', '.join(PRESETS)}; {other_config(config) or remedy}"
        )
    return preset()


def _open(source: str | os.PathLike[str]) -> tuple[Any, str]:
    path, name = Path(source), os.fspath(source)
    if not path.exists():
        known = aimet_alias(name)
        if known is not None:
            return known, name
        if other_widths(name):
            raise ConfigError(
                f"there is no preset {name}; {other_widths(name)}, and in the shell as "
                "--override '*' weight=...,activation=..."
            )
        names = ", ".join((*PRESETS, *aimet_aliases()))
        raise ConfigError(f"there is no file {name}, and no built-in config of that name; the names are {names}")
    return parse_json(read_text(path, "give a JSON file"), name, "correct it, or give another config file"), name


# --- The contents of AIMET's built-in quantsim configs by alias, in the form of its files. Facts of aimet-onnx 2.42

_PER_CHANNEL = ("Conv", "ConvTranspose", "Gemm", "MatMul", "PRelu")
_FREE_NORMS = ("LayerNormalization", "RMSNormalization")
_CHAINS = ("Conv+Relu", "Conv+Clip", "ConvTranspose+Relu", "Add+Relu", "Gemm+Relu")
_FEW_CHAINS = ("ConvTranspose+Relu", "Add+Relu", "Gemm+Relu")
_MANY_CHAINS = (
    "Add+Relu",
    *(f"Conv+BatchNormalization+{type}" for type in ("HardSwish", "PRelu", "LeakyRelu", "Relu")),
    *(f"Conv+Transpose+{type}" for type in ("Relu", "PRelu", "LeakyRelu")),
    *(f"Conv+{type}" for type in ("Clip", "PRelu", "LeakyRelu", "Relu")),
    "ConvTranspose+Relu",
    "Gemm+Relu",
)
_PASSES = ("LayerNormalization", "RMSNormalization", "MatmulAdd")

_UNIT = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0)}
_SIGNED = {"Sin": (-1.0, 1.0), "Cos": (-1.0, 1.0), "Tanh": (-1.0, 1.0)}


def aimet_alias(name: str) -> dict[str, Any] | None:
    """Return the content of a built-in config, by alias (`htp_v73`) or file name (`htp_quantsim_config_v73.json`)."""
    wanted = name.removesuffix(".json").replace("_quantsim_config", "")
    return _CONFIGS[wanted]() if wanted in _CONFIGS else None


def aimet_aliases() -> list[str]:
    """Return every alias that `aimet_alias` knows."""
    return sorted(_CONFIGS)


def _default(*, per_channel: bool = True) -> dict[str, Any]:
    op_type: dict[str, Any] = {
        **_per_channel(_PER_CHANNEL if per_channel else ()),
        "BatchNormalization": _statistics(),
        "Cast": {"is_output_quantized": "False"},
    }
    defaults = {**_ops_and_params(), "strict_symmetric": "False", "per_channel_quantization": "False"}
    return _config(defaults, op_type, _CHAINS, ("MatmulAdd",), {})


def _htp(version: str) -> dict[str, Any]:
    """Return the config of the Hexagon tensor processor; from V73 on they differ only in the version."""
    number = int(version[1:])
    defaults = {**_ops_and_params(), "per_channel_quantization": "False", "strict_symmetric": "False"}
    defaults |= {"unsigned_symmetric": "False", "hw_version": version}
    free = ["LayerNormalization"] if number == 66 else [*_FREE_NORMS, "InstanceNormalization"]
    unquantized = ["Cast", "ChannelShuffle", "Gather", "NonMaxSuppression", *(["Flatten"] if number == 66 else [])]
    channels = {66: (), 68: ("Conv", "ConvTranspose", "PRelu")}.get(number, _PER_CHANNEL)
    ranges = _SIGNED if number < 73 else {**_SIGNED, **_UNIT}
    op_type: dict[str, Any] = {
        **_per_channel(channels),
        **{type: {"is_output_quantized": "False"} for type in unquantized},
        **{type: {"params": {"weight": {"is_symmetric": "False"}}} for type in free},
        "BatchNormalization": _statistics(),
        "Relu": {"encoding_constraints": {"min": 0.0}},
        **_constraints(ranges),
    }
    if number >= 73:
        op_type["GroupNormalization"] = {"params": {"bias": {"is_quantized": "True"}}}
    chains = _MANY_CHAINS if number >= 73 else _FEW_CHAINS
    return _config(defaults, op_type, chains, None if number == 66 else _PASSES, {})


def _enpu(version: int, *, per_channel: bool = False) -> dict[str, Any]:
    """Return the configs of the embedded NPU: symmetric activations, many supergroups with activation functions."""
    defaults = _ops_and_params()
    defaults["ops"]["is_symmetric"] = "True"
    defaults |= {"per_channel_quantization": "False", "strict_symmetric": "False", "unsigned_symmetric": "False"}
    norm = _statistics()
    norm["params"] |= {"weight": {"is_quantized": "False"}, "bias": {"is_quantized": "False"}}
    op_type: dict[str, Any] = {
        "BatchNormalization": norm,
        **{type: {"per_channel_quantization": str(per_channel)} for type in sorted(LINEAR)},
        **_constraints({**_UNIT, **_SIGNED}),
    }
    if version == 7:
        op_type |= {type: {"params": {"weight": {"is_symmetric": "False"}}} for type in _FREE_NORMS}
    chains = _enpu_chains(version, per_channel=per_channel)
    return _config(defaults, op_type, chains, _PASSES, {"is_output_quantized": "True"})


def _enpu_chains(version: int, *, per_channel: bool) -> list[str]:
    plain = ("Relu", "Clip", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "Gelu")
    behind_norm = ("Relu", "Clip", "Sigmoid", "Tanh", "HardSwish", "Gelu")
    pools, convolutions = ("AveragePool", "MaxPool"), ("Conv", "ConvTranspose")
    sloped = pools if per_channel else (*convolutions, *pools)  # heads that take a PRelu
    normed = pools if per_channel else (*convolutions, *pools)  # heads that take a BatchNormalization
    heads = (*convolutions, "Gemm", "MatMul", *pools, "Add", "Sub", "Mul")
    chains = ["+".join(pair) for pair in product(heads, plain)]
    chains += [f"{head}+PRelu" for head in sloped]
    chains += [f"{head}+BatchNormalization{rest}" for head in normed for rest in ("", *(f"+{t}" for t in behind_norm))]
    return chains + [f"BatchNormalization+{type}" for type in behind_norm if version == 7]


def _config(
    defaults: dict[str, Any],
    op_type: dict[str, Any],
    chains: Iterable[str],
    passes: Iterable[str] | None,
    model_output: dict[str, str],
) -> dict[str, Any]:
    return {
        "defaults": defaults,
        "params": {"bias": {"is_quantized": "False"}},
        "op_type": op_type,
        **({} if passes is None else {"supergroup_pass_list": list(passes)}),
        "supergroups": [{"op_list": chain.split("+")} for chain in chains],
        "model_input": {"is_input_quantized": "True"},
        "model_output": model_output,
    }


def _ops_and_params() -> dict[str, Any]:
    return {"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"}}


def _statistics() -> dict[str, Any]:
    return {"params": {name: {"is_quantized": "False"} for name in ("running_mean", "running_var")}}


def _per_channel(types: Iterable[str]) -> dict[str, Any]:
    return {type: {"per_channel_quantization": "True"} for type in types}


def _constraints(ranges: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    return {type: {"encoding_constraints": {"min": low, "max": high}} for type, (low, high) in ranges.items()}


_CONFIGS: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {
        "default": _default,
        "default_config_per_channel": _default,
        "default_config": partial(_default, per_channel=False),
        **{f"htp_v{n}": partial(_htp, f"V{n}") for n in (66, 68, 69, 73, 75, 79, 81, 85)},
        **{f"htp_v{n}_per_channel_linear": partial(_htp, f"V{n}") for n in (69, 73, 75, 79, 81)},
        "enpu_v6": partial(_enpu, 6),
        "enpu_v7": partial(_enpu, 7),
        "enpu_v7_per_channel": partial(_enpu, 7, per_channel=True),
    }
)
