"""The config that the options `--config`, `--override` and `--skip` describe."""

from typing import Any

from qsdk.core.aimet_config.load_config import PRESETS, load_config
from qsdk.core.config.config import QuantConfig
from qsdk.core.config.json_form import read_choice
from qsdk.core.errors import ConfigError


def config_of(
    name: str,
    overrides: list[tuple[str, str]],
    skipped: list[str],
    *,
    block_size: int | None = None,
    kv_cache: str | None = None,
) -> QuantConfig:
    """Return a preset by name, or a config from a JSON file, with the rules of the command line after its own.

    Args:
        name: of a preset or a file.
        overrides: patterns and texts such as `weight=int8`.
        skipped: patterns of what stays float.
        block_size: input channels per scale of weights, for a preset.
        kv_cache: dtype of a decoder's cache, for a preset.

    Raises:
        ConfigError: an override that is not `KEY=VALUE`, an unknown dtype, or an option of presets for a file.
        FileFormatError: the file cannot be read.
    """
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
