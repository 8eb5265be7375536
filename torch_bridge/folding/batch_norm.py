"""Folding BatchNorm into the linear layer before or after it (Jacob et al. 2017, section 3.2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.layers.expected_means import FoldedNorm
from torch_bridge.torch_values.parameters import held_tensor

_STATISTICS = ("running_mean", "running_var", "weight", "bias", "num_batches_tracked")


@dataclass(frozen=True)
class Fold:
    """A BatchNorm that is folded into a layer.

    Attributes:
        norm: path of the BatchNorm, where an Identity is now, or what its forward does besides.
        layer: path of the layer.
        norm_op: the op that normalizes: the BatchNorm, or `bn/batch_norm.0` inside a forward of its own.
        op: the op that computes the layer's result: the layer, or `conv/conv2d.0` inside a forward of its own.
        before: whether the BatchNorm comes before the layer.
        eps: of the BatchNorm.
        kind: `linear`, `conv` or `conv_transpose`, which decides on the axis of the output channels.
        groups: of the layer.
        had_bias: whether the layer had a bias of its own.
    """

    norm: str
    norm_op: str
    layer: str
    op: str
    before: bool
    eps: float
    kind: str
    groups: int
    had_bias: bool

    @property
    def has_own_forward(self) -> bool:
        """Return whether the BatchNorm's forward is the user's own, which may do more than normalize."""
        return self.norm_op != self.norm


def fold_of(norm_op: str, norm: nn.Module, op: str, layer: nn.Module, *, before: bool) -> Fold:
    """Return the fold of a BatchNorm into a layer; each op is the module's path, or the op inside its forward."""
    layer_path = op.partition("/")[0]
    kind = "linear" if isinstance(layer, nn.Linear) else "conv"
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        kind = "conv_transpose"
    groups = int(getattr(layer, "groups", 1))
    eps = norm.eps
    assert isinstance(eps, float)
    norm_path = norm_op.partition("/")[0]
    return Fold(norm_path, norm_op, layer_path, op, before, eps, kind, groups, layer.bias is not None)


def reason_not_to_fold(norm: nn.Module, layer: nn.Module, *, before: bool) -> str | None:
    """Return why a BatchNorm cannot be folded into a layer exactly, or None."""
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics"
    if not before:
        return None
    padding = getattr(layer, "padding", ())
    padded = padding == "same" if isinstance(padding, str) else any(p != 0 for p in padding)
    if padded and getattr(layer, "padding_mode", "zeros") == "zeros":
        return "the layer after it pads with zeros, which a folded shift would not reach"
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return "a transposed convolution after it adds its taps unevenly at the borders"
    return None


def factor_of(statistics: Mapping[str, Tensor | None], fold: Fold) -> Tensor:
    """Return the factor of a BatchNorm for each channel, in float64."""
    var, gamma = statistics["running_var"], statistics.get("weight")
    assert var is not None
    factor = torch.rsqrt(var.double() + fold.eps)
    return factor if gamma is None else factor * gamma.double()


def fold_tensors(
    weight: Tensor, bias: Tensor | None, statistics: Mapping[str, Tensor | None], fold: Fold
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias that do what layer and BatchNorm do together, computed in float64.

    `statistics` holds running_mean, running_var and, where affine, weight and bias.
    """
    if not fold.before:
        return fold_weight(weight, statistics, fold), fold_bias(bias, statistics, fold, weight.dtype)
    wide = weight.double()
    old_bias = wide.new_zeros(1) if bias is None else bias.double()
    factor = factor_of(statistics, fold)
    return _fold_before(wide, old_bias, factor, _shift(statistics, factor), fold, weight.dtype)


def fold_weight(weight: Tensor, statistics: Mapping[str, Tensor | None], fold: Fold) -> Tensor:
    """Return the weight of a layer with the BatchNorm after it folded in."""
    return (weight * channel_view(factor_of(statistics, fold), weight, fold)).to(weight.dtype)


def fold_bias(bias: Tensor | None, statistics: Mapping[str, Tensor | None], fold: Fold, dtype: torch.dtype) -> Tensor:
    """Return the bias of a layer with the BatchNorm after it folded in."""
    factor = factor_of(statistics, fold)
    shift = _shift(statistics, factor)
    return (shift if bias is None else bias.double() * factor + shift).to(dtype)


def _shift(statistics: Mapping[str, Tensor | None], factor: Tensor) -> Tensor:
    mean, beta = statistics["running_mean"], statistics.get("bias")
    assert mean is not None
    shift = -mean.double() * factor
    return shift if beta is None else shift + beta.double()


def channel_view(factor: Tensor, weight: Tensor, fold: Fold) -> Tensor:
    """Return one factor per output channel in the shape that multiplies the stored weight."""
    if fold.kind != "conv_transpose":
        return factor.reshape(-1, *[1] * (weight.ndim - 1))
    # stored [in, out / groups, ...]: rows of group g carry that group's output channels
    per_group = factor.reshape(fold.groups, 1, -1).expand(-1, weight.shape[0] // fold.groups, -1)
    return per_group.reshape(weight.shape[0], weight.shape[1], *[1] * (weight.ndim - 2))


def _fold_before(
    weight: Tensor, bias: Tensor, factor: Tensor, shift: Tensor, fold: Fold, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale the input channels; the shift becomes bias. Stored [out, in / groups, ...]."""
    out = weight.shape[0]
    per_row = factor.reshape(fold.groups, 1, -1).expand(-1, out // fold.groups, -1).reshape(out, -1)
    moved = shift.reshape(fold.groups, 1, -1).expand(-1, out // fold.groups, -1).reshape(out, -1)
    tail = [1] * (weight.ndim - 2)
    added = (weight * moved.reshape(*moved.shape, *tail)).flatten(1).sum(1)
    return (weight * per_row.reshape(*per_row.shape, *tail)).to(dtype), (bias + added).to(dtype)


def statistics_of(norm: nn.Module) -> dict[str, Tensor | None]:
    """Return the running statistics of a BatchNorm, and its gamma and beta."""
    return {**norm._parameters, **norm._buffers}


def apply_fold(model: nn.Module, fold: Fold) -> Callable[[], None]:
    """Fold in place and replace the BatchNorm by an Identity; return the function that undoes both, bit for bit."""
    norm, layer = model.get_submodule(fold.norm), model.get_submodule(fold.layer)
    statistics = statistics_of(norm)
    weight, bias = held_tensor(layer, "weight"), layer._parameters.get("bias")
    identity = _without_normalization(norm) if fold.has_own_forward else nn.Identity()
    old_weight = weight.detach().clone()
    old_bias = None if bias is None else bias.detach().clone()
    with torch.no_grad():
        new_weight, new_bias = fold_tensors(weight, bias, statistics, fold)
        weight.copy_(new_weight)
        if bias is None:
            layer._parameters["bias"] = nn.Parameter(new_bias, requires_grad=weight.requires_grad)
        else:
            bias.copy_(new_bias)
    replace_module(model, norm, identity)

    @torch.no_grad()
    def undo() -> None:
        weight.copy_(old_weight)
        if bias is None or old_bias is None:
            layer._parameters["bias"] = None
        else:
            bias.copy_(old_bias)
        replace_module(model, identity, norm)

    return undo


def _without_normalization(norm: nn.Module) -> nn.Module:
    """Return a BatchNorm of the same class and children whose statistics, no part of its state_dict, change nothing."""
    result = norm.__class__.__new__(norm.__class__)
    result.__dict__ |= {**vars(norm), "_modules": dict(norm._modules), "eps": 0.0, "track_running_stats": False}
    own = {**norm._parameters, **norm._buffers}
    neutral = {name: 1.0 if name in ("running_var", "weight") else 0.0 for name in _STATISTICS if name in own}
    result._parameters = {name: x for name, x in norm._parameters.items() if name not in neutral}
    result._buffers = {name: x for name, x in norm._buffers.items() if name not in neutral}
    for name, value in neutral.items():
        x = own[name]
        result._buffers[name] = None if x is None else torch.full_like(x, value, requires_grad=False)
    result._non_persistent_buffers_set = norm._non_persistent_buffers_set | neutral.keys()
    return result


class _WithoutNormalization(TorchFunctionMode):
    """Lets `F.batch_norm` return its input; tells `notice` whether it was to use the statistics of the batch."""

    def __init__(self, notice: Callable[[bool], None]) -> None:
        super().__init__()
        self.notice = notice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, but not `F.batch_norm`."""
        given = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **given)
        self.notice(bool(args[5] if len(args) > 5 else given.get("training", False)))
        return args[0] if args else given["input"]


def run_without_normalization(
    forward: Callable[..., Any], notice: Callable[[bool], None], *args: Any, **kwargs: Any
) -> Any:
    """Run a BatchNorm's own forward on what its layer has normalized already.

    `notice` is called with whether it would use the statistics of the batch.
    """
    with _WithoutNormalization(notice):
        return forward(*args, **kwargs)


@torch.no_grad()
def output_statistics_of(statistics: Mapping[str, Tensor | None], *, before: bool) -> FoldedNorm:
    """Return the statistics that a BatchNorm implies for its layer's outputs, or with `before` for its inputs.

    `statistics` holds running_mean, running_var and, where affine, weight and bias.
    """
    mean, var = statistics["running_mean"], statistics["running_var"]
    assert mean is not None
    assert var is not None
    if before:
        return FoldedNorm(mean.float().cpu().numpy().copy(), var.float().sqrt().cpu().numpy(), before=True)
    gamma, beta = statistics.get("weight"), statistics.get("bias")
    std = torch.ones_like(mean) if gamma is None else gamma.abs()
    shift = torch.zeros_like(mean) if beta is None else beta
    return FoldedNorm(shift.float().cpu().numpy().copy(), std.float().cpu().numpy())


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another one in every place where it occurs."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


def fold_norm_in_checkpoint(model: nn.Module, state_dict: dict[str, Any], prefix: str, fold: Fold) -> FoldedNorm | None:
    """Fold a float checkpoint on its way into a folded model, in place, and return its BatchNorm's statistics.

    A checkpoint that is folded already stays as it is; the result is None then.
    """
    norms, layers = (key_prefixes(model, prefix, path) for path in (fold.norm, fold.layer))
    if f"{norms[0]}running_mean" not in state_dict or f"{layers[0]}weight" not in state_dict:
        return None
    statistics = {name: state_dict[norms[0] + name] for name in _STATISTICS if norms[0] + name in state_dict}
    result = fold_tensors(state_dict[f"{layers[0]}weight"], state_dict.get(f"{layers[0]}bias"), statistics, fold)
    for layer in layers:
        state_dict[f"{layer}weight"], state_dict[f"{layer}bias"] = result
    for norm in norms:
        for name in _STATISTICS:
            state_dict.pop(norm + name, None)
    return output_statistics_of(statistics, before=fold.before)


def key_prefixes(model: nn.Module, prefix: str, path: str) -> list[str]:
    """Return the prefixes of a module's keys in a state_dict, one for each of its paths in the model."""
    module = model.get_submodule(path)
    paths = [other for other, child in model.named_modules(remove_duplicate=False) if child is module]
    return [f"{prefix}{other}." if other else prefix for other in (path, *(p for p in paths if p != path))]
