"""Finding the BatchNorms that can be folded: by watching one forward pass, so functional wiring counts too."""

from torch import Tensor, nn

from qsdk.core.config import QuantConfig
from torch_bridge.fold import Fold, describe, obstacle
from torch_bridge.wiring import Wiring

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)


def find_folds(model: nn.Module, wiring: Wiring, config: QuantConfig) -> tuple[list[Fold], dict[str, str]]:
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
    path: str, norm: nn.Module, modules: dict[str, nn.Module], wiring: Wiring, config: QuantConfig
) -> Fold | str:
    if config.names(path, "BatchNormalization"):
        return "a rule names it"
    if wiring.calls[path] != 1:
        return f"it runs {wiring.calls[path]} times in one forward pass"
    source = next((t for t in wiring.kept if path in wiring.readers.get(id(t), ()) and id(t) in wiring.maker), None)
    maker = None if source is None else wiring.maker[id(source)]
    reason = "no Linear or convolution stands directly before or after it"
    if source is not None and maker is not None and isinstance(modules.get(maker), _LINEAR):
        reason = _not_alone(maker, modules, wiring, wiring.readers[id(source)])
        reason = reason or _other_axis(maker, modules[maker], source)
        reason = reason or obstacle(norm, modules[maker], before=False) or ""
        if not reason:
            return describe(path, norm, maker, modules[maker], before=False)
    readers = wiring.readers.get(id(wiring.result_of[path]), [])
    after = readers[0] if len(readers) == 1 else None
    if after is not None and isinstance(modules.get(after), _LINEAR):
        reason = _not_alone(after, modules, wiring, readers) or _other_axis(
            after, modules[after], wiring.result_of[path]
        )
        reason = reason or obstacle(norm, modules[after], before=True) or ""
        if not reason:
            return describe(path, norm, after, modules[after], before=True)
    return reason


def _other_axis(layer: str, module: nn.Module, between: Tensor) -> str:
    """BatchNorm counts channels on axis 1; a Linear on the last axis, an unbatched convolution on axis 0."""
    ranks = 2 if isinstance(module, nn.Linear) else len(module._parameters["weight"].shape)  # type: ignore[union-attr]
    return "" if between.ndim == ranks else f"its channels are not those of {layer}"


def _not_alone(layer: str, modules: dict[str, nn.Module], wiring: Wiring, readers: list[str]) -> str:
    if len(readers) != 1:
        return f"the result of {layer} is also read elsewhere"
    if wiring.calls[layer] != 1:
        return f"{layer} runs {wiring.calls[layer]} times in one forward pass"
    weight = modules[layer]._parameters.get("weight")
    sharing = [p for p, m in modules.items() if weight is not None and any(q is weight for q in m._parameters.values())]
    return f"{layer} shares its weight with {sharing[1]}" if len(sharing) > 1 else ""
