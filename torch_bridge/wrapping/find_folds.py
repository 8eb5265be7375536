"""The BatchNorms that can be folded, found from one forward pass, so that functional code counts too."""

from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.config.config import QuantConfig
from torch_bridge.folding.batch_norm import Fold, fold_of, fold_tensors, reason_not_to_fold
from torch_bridge.torch_values.layers import is_leaf
from torch_bridge.torch_values.parameters import held_tensor
from torch_bridge.torch_values.pytree import tensors_of
from torch_bridge.wrapping.dataflow import Dataflow
from torch_bridge.wrapping.wrapped_state import state_of

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)


def find_folds(model: nn.Module, dataflow: Dataflow, config: QuantConfig) -> tuple[list[Fold], dict[str, str]]:
    """Return the folds to make, and path -> reason for every BatchNorm that stays.

    A module with running statistics whose forward calls `F.batch_norm` is a BatchNorm too, whatever its class.
    """
    modules = dict(model.named_modules())
    folds, kept = [], {}
    for path, norm in modules.items():
        foreign = path in dataflow.norm_calls and "running_mean" in norm._buffers
        if not foreign and not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            continue
        fold_or_reason = _fold_or_reason(path, norm, modules, dataflow, config)
        if isinstance(fold_or_reason, Fold):
            folds.append(fold_or_reason)
        else:
            kept[path] = fold_or_reason
    return folds, kept


def _fold_or_reason(
    path: str, norm: nn.Module, modules: dict[str, nn.Module], dataflow: Dataflow, config: QuantConfig
) -> Fold | str:
    if config.names(path, "BatchNormalization"):
        return "a rule names it"
    norm_op, reason = _norm_op(path, norm, dataflow)
    if reason:
        return reason
    source: Tensor | None
    if norm_op == path:
        source = next(
            (t for t in dataflow.tensors if path in dataflow.readers.get(id(t), ()) and id(t) in dataflow.maker), None
        )
    else:
        source = dataflow.norm_calls[path][0]["input"]
        source = source if id(source) in dataflow.maker else None
    op = "" if source is None else dataflow.maker[id(source)]
    maker = op.partition("/")[0]  # the layer `conv` of `conv/conv2d.0`, a function that the layer's own forward calls
    reason = "no Linear or convolution stands directly before or after it"
    if source is not None and isinstance(modules.get(maker), _LINEAR):
        fold = fold_of(norm_op, norm, op, modules[maker], before=False)
        reason = _sharing_reason(maker, op, modules, dataflow, dataflow.readers[id(source)])
        reason = reason or _axis_reason(maker, modules[maker], source)
        reason = reason or reason_not_to_fold(norm, modules[maker], before=False) or ""
        if not reason and op != maker and not _follows_weight(modules[maker], dataflow.read_by_maker[id(source)], fold):
            reason = f"{maker} computes something else than its weight and bias say"
        if not reason:
            return fold
    readers = dataflow.readers.get(id(dataflow.result_of[norm_op]), [])
    after = readers[0] if len(readers) == 1 else None
    if after is not None and isinstance(modules.get(after), _LINEAR) and is_leaf(modules[after]):
        reason = _sharing_reason(after, after, modules, dataflow, readers) or _axis_reason(
            after, modules[after], dataflow.result_of[norm_op]
        )
        reason = reason or reason_not_to_fold(norm, modules[after], before=True) or ""
        if not reason:
            return fold_of(norm_op, norm, after, modules[after], before=True)
    return reason


def _norm_op(path: str, norm: nn.Module, dataflow: Dataflow) -> tuple[str, str]:
    """Return the op that normalizes: the module, or `bn/batch_norm.0` inside a forward of its own; and why not to fold.

    A forward of its own may do more before and after, which stays.
    """
    state = state_of(norm)
    if state.leaf:
        count = dataflow.calls[path]
        times = "does not run" if count == 0 else f"runs {count} times"
        return path, "" if count == 1 else f"it {times} in one forward pass"
    calls = dataflow.norm_calls.get(path, [])
    if len(calls) != 1:
        how_often = f"{len(calls)} times" if calls else "never"
        return path, f"its forward calls F.batch_norm {how_often} in one forward pass"
    if state.own_forward is not None:
        return path, "its forward is set on the object; write it in a subclass to have it folded"
    own = {**norm._parameters, **norm._buffers}
    names = ("running_mean", "running_var", "weight", "bias")
    given = calls[0]
    if any(given[name] is not own.get(name) for name in names) or given["training"] or given["eps"] != norm.eps:
        return path, "its forward normalizes with something else than its own weight, bias, statistics and eps"
    return f"{path}/batch_norm.0", ""


def _axis_reason(layer: str, module: nn.Module, between: Tensor) -> str:
    """Return why channels are on another axis, or nothing.

    BatchNorm counts channels on axis 1; a Linear on the last axis, an unbatched convolution on axis 0.
    """
    ranks = 2 if isinstance(module, nn.Linear) else held_tensor(module, "weight").ndim
    return "" if between.ndim == ranks else f"its channels are not those of {layer}"


@torch.no_grad()
def _follows_weight(layer: nn.Module, x: Tensor, fold: Fold) -> bool:
    """Return whether a layer with a forward of its own (padding, a standardised weight) computes what a fold relies on.

    Its weight and bias are changed for two calls, as a fold would change them: each output channel must follow.
    """
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    count = int(getattr(layer, "out_features", getattr(layer, "out_channels", 0)))
    factor, shift = torch.linspace(0.5, 2, count).to(weight), torch.linspace(-1, 1, count).to(weight)
    unit = {"running_mean": torch.zeros_like(shift), "running_var": torch.ones_like(shift) - fold.eps}
    try:
        before = _only_tensor(layer(x))
        new_weight, new_bias = fold_tensors(weight, bias, {**unit, "weight": factor, "bias": shift}, fold)
        layer._parameters |= {"weight": nn.Parameter(new_weight), "bias": nn.Parameter(new_bias)}
        after = _only_tensor(layer(x))
        along = (-1,) if isinstance(layer, nn.Linear) else (-1, *[1] * (before.ndim - 2))
        expected = before * factor.view(along) + shift.view(along)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # it needs more tensors, or one of another shape, or gives more than one
    finally:
        layer._parameters |= {"weight": weight, "bias": bias}
    return bool((after - expected).abs().max() <= 1e-3 * expected.abs().max())


def _only_tensor(result: Any) -> Tensor:
    """Return the tensor that a layer gives, in whatever container."""
    (tensor,) = tensors_of(result)
    return tensor


def _sharing_reason(layer: str, op: str, modules: dict[str, nn.Module], dataflow: Dataflow, readers: list[str]) -> str:
    if len(readers) != 1:
        return f"the result of {layer} is also read elsewhere"
    if dataflow.calls[op] != 1:
        return f"{layer} runs {dataflow.calls[op]} times in one forward pass"
    weight = modules[layer]._parameters.get("weight")
    sharing = [p for p, m in modules.items() if weight is not None and any(q is weight for q in m._parameters.values())]
    return f"{layer} shares its weight with {sharing[1]}" if len(sharing) > 1 else ""
