"""The config that the options `--config`, `--override` and `--skip` describe."""

from qsdk.core.aimet_config.load_config import load_config
from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError


def config_of(name: str, overrides: list[tuple[str, str]], skipped: list[str]) -> QuantConfig:
    """Return a preset by name, or a config from a JSON file, with the rules of the command line after its own.

    Raises:
        ConfigError: an override that is not `KEY=DTYPE`, or an unknown dtype.
        FileFormatError: the file cannot be read.
    """
    config = load_config(name)
    for pattern, text in overrides:
        choices = dict(part.partition("=")[::2] for part in text.split(","))
        unknown = sorted(set(choices) - {"weight", "activation", "bias", "input", "output"})
        if unknown:
            raise ConfigError(
                f"--override {pattern} {text}: {unknown[0]!r} is none of weight, activation, bias, input, output; "
                "write for example weight=int8,activation=uint16"
            )
        config = config.override(
            pattern,
            weight=choices.get("weight"),
            activation=choices.get("activation"),
            bias=choices.get("bias"),
            input=choices.get("input"),
            output=choices.get("output"),
        )
    for pattern in skipped:
        config = config.skip(pattern)
    return config
