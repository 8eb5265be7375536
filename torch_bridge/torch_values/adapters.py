"""Low-rank adapters of peft (LoRA) beside a base: which there are, and what files hold of them."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError, ExportError

#: the path of an adapter's matrix: its layer and `lora_A` or `lora_B`, the adapter's name, what follows
ADAPTER = re.compile(r"(.*\.lora_[AB])\.([^.:]+)([.:].*)")
_MATRICES = "*.lora_[AB].*"
Matrices = dict[str, npt.NDArray[np.float32]]


def with_float_adapters(config: QuantConfig, model: nn.Module) -> QuantConfig:
    """Return the config with a rule that leaves the matrices of adapters float, where a model has some.

    It stands before the first rule whose pattern names such matrices, which decides for itself.
    """
    if not _layers(model):
        return config
    named = next((at for at, own in enumerate(config.rules) if "lora_" in own.pattern), len(config.rules))
    before = replace(config, rules=config.rules[:named]).skip(_MATRICES, optional=True)
    return replace(config, rules=(*before.rules, *config.rules[named:]))


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of the adapters of a model, in its own order."""
    return list(dict.fromkeys(name for layer in _layers(model).values() for name in layer.lora_A))


def matrices_of(model: nn.Module, name: str, like: str) -> Matrices:
    """Return the matrices of an adapter under the names that those of the adapter `like` have in a file.

    The file multiplies with the scaling of `like`, which the matrices B make up for; layers that the adapter leaves
    alone have zeros.

    Raises:
        ExportError: an adapter of another kind than LoRA's product, or one for layers that `like` leaves alone.
    """
    result: Matrices = {}
    for path, layer in _layers(model).items():
        has, wanted = name in layer.lora_A, like in layer.lora_A
        if has and not wanted:
            raise ExportError(
                f"the adapter {name!r} changes {path}, for which the file has no inputs; export it with an active "
                f"adapter that changes all layers that others do ({like!r} does not)"
            )
        if {name, like}.intersection(getattr(layer, "lora_variant", ())):
            raise ExportError(
                f"{path} has a variant of LoRA (such as DoRA), which cannot be an input; merge the adapter"
            )
        for part in ("lora_A", "lora_B") if wanted else ():
            own = getattr(layer, part)[name if has else like]
            if getattr(own, "bias", None) is not None or own.weight.ndim != 2:
                raise ExportError(f"{path}.{part} is no plain matrix, which alone can be an input; merge the adapter")
            values = own.weight.detach().float().cpu().numpy()
            factor = layer.scaling[name] / layer.scaling[like] if has else 0.0
            result[f"{path}.{part}.{like}.weight"] = values * np.float32(factor) if part == "lora_B" else values
    return result


def active_adapter(model: nn.Module) -> str:
    """Return the name of the one adapter that is active; ConfigError where none or several are."""
    active = {name for layer in _layers(model).values() for name in layer.active_adapters if name in layer.lora_A}
    if len(active) != 1 or any(layer.merged or layer.disable_adapters for layer in _layers(model).values()):
        raise ConfigError(
            f"{len(active)} adapters of peft are active and not merged ({', '.join(sorted(active)) or 'none'}); "
            "choose one: sim.model.set_adapter(name)"
        )
    return str(active.pop())


def _layers(model: Any) -> dict[str, Any]:
    """Return the layers of peft that have matrices of adapters, by path; none of what is no module."""
    if not isinstance(model, nn.Module):
        return {}
    found = ((path, getattr(one, "lora_A", None), one) for path, one in model.named_modules())
    return {path: one for path, matrices, one in found if isinstance(matrices, nn.ModuleDict) and len(matrices)}
