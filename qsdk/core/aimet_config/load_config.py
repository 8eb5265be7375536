"""Config files: qsdk's own, AIMET's, and AIMET's built-in ones by name."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from qsdk.core.aimet_config.names import aimet_alias, aimet_aliases
from qsdk.core.aimet_config.read import from_aimet, is_aimet
from qsdk.core.config.config import QuantConfig, block_scaled, w4a8, w4a16, w8a8, w8a16, weight_only
from qsdk.core.errors import ConfigError
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
