"""Finding the BatchNorms that can be folded: by watching one forward pass, so functional wiring counts too."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.config import QuantConfig
from qsdk.core.site import owner_of, port_of
from torch_bridge.fold import Fold, describe, obstacle
from torch_bridge.runtime import Frame, Runtime

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)


class _Wiring:
    """Who made which tensor, who read it, and how often each module ran."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []  # keeps ids unique while we watch
        self.maker: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.calls: Counter[str] = Counter()
        self.result_of: dict[str, Tensor] = {}

    def visit(self, site: str, x: Tensor) -> Tensor:
        if port_of(site) == "output":
            owner = owner_of(site).partition("@")[0]
            self.kept.append(x)
            self.maker[id(x)] = owner
            self.calls[owner] += 1
            self.result_of[owner] = x
        return x

    def read(self, frame: Frame, args: tuple[Any, ...], result: Any) -> None:
        if not isinstance(result, Tensor | tuple | list):
            return
        for value in args:
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, Tensor):
                    self.kept.append(item)
                    self.readers.setdefault(id(item), []).append(frame.owner)


def watch(runtime: Runtime, run: Callable[[], Any]) -> _Wiring:
    """Run the model once and note its wiring."""
    wiring = _Wiring()
    runtime.reader = wiring.read
    try:
        with runtime.in_phase("visit", wiring.visit), torch.no_grad():
            result = run()
    finally:
        runtime.reader = None
    for leaf in _tensors(result):
        wiring.readers.setdefault(id(leaf), []).append("")
    return wiring


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []


def find_folds(model: nn.Module, wiring: _Wiring, config: QuantConfig) -> tuple[list[Fold], dict[str, str]]:
    """Give the folds to make, and for every BatchNorm that stays: its path and why."""
    modules = dict(model.named_modules())
    folds, kept = [], {}
    for path, norm in modules.items():
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            continue
        found = _fold_or_reason(path, norm, modules, wiring, config)
        if isinstance(found, Fold):
            folds.append(found)
        else:
            kept[path] = found
    return folds, kept


def _fold_or_reason(
    path: str, norm: nn.Module, modules: dict[str, nn.Module], wiring: _Wiring, config: QuantConfig
) -> Fold | str:
    if config.names(path):
        return "a rule names it"
    if wiring.calls[path] != 1:
        return f"it runs {wiring.calls[path]} times in one forward pass"
    source = next((t for t in wiring.kept if path in wiring.readers.get(id(t), ()) and id(t) in wiring.maker), None)
    maker = None if source is None else wiring.maker[id(source)]
    reason = "no Linear or convolution stands directly before or after it"
    if source is not None and maker is not None and isinstance(modules.get(maker), _LINEAR):
        reason = _not_alone(maker, modules, wiring, wiring.readers[id(source)])
        if isinstance(modules[maker], nn.Linear) and source.ndim != 2:
            reason = f"its channels are not the features of {maker}"
        reason = reason or obstacle(norm, modules[maker], before=False) or ""
        if not reason:
            return describe(path, norm, maker, modules[maker], before=False)
    readers = wiring.readers.get(id(wiring.result_of[path]), [])
    after = readers[0] if len(readers) == 1 else None
    if after is not None and isinstance(modules.get(after), _LINEAR):
        reason = _not_alone(after, modules, wiring, readers) or obstacle(norm, modules[after], before=True) or ""
        if not reason:
            return describe(path, norm, after, modules[after], before=True)
    return reason


def _not_alone(layer: str, modules: dict[str, nn.Module], wiring: _Wiring, readers: list[str]) -> str:
    if len(readers) != 1:
        return f"the result of {layer} is also read elsewhere"
    if wiring.calls[layer] != 1:
        return f"{layer} runs {wiring.calls[layer]} times in one forward pass"
    weight = modules[layer]._parameters.get("weight")
    sharing = [p for p, m in modules.items() if weight is not None and any(q is weight for q in m._parameters.values())]
    return f"{layer} shares its weight with {sharing[1]}" if len(sharing) > 1 else ""
