"""The contents of AIMET's built-in quantsim configs by alias, in the form of its files. Facts of aimet-onnx 2.42."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

from qsdk.core.graph.op_facts import LINEAR

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
