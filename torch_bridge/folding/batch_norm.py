"""BatchNorms folded into the linear layer before or after them (Jacob et al. 2017, section 3.2), some to be trained.

One that was folded into the layer before it can still be trained, with the folding simulated. While it is active, it is
in the model again, and its layer has the weight that it has in the float model. The layer's call does the work of both,
in front of its output site (Krishnamoorthi 2018, section 3.2, with one convolution). With batch statistics, the layer
multiplies with the weight that the exported model would have; behind the weight's quantizer it is divided by the
BatchNorm's factor again, and the BatchNorm normalizes the result. In eval mode, weight and bias are folded exactly as
others are, and gamma and beta are trained through them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.errors import ModelError
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.site import site_name
from torch_bridge.sites.calls import Frame
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.parameters import held_tensor
from torch_bridge.torch_values.pytree import map_leaves, tensors_of
from torch_bridge.torch_values.sharding import full_tensor_of, write_full_tensor

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
    """

    norm: str
    norm_op: str
    layer: str
    op: str
    before: bool
    eps: float
    kind: str
    groups: int

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
    return Fold(norm_path, norm_op, layer_path, op, before, eps, kind, groups)


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


# A buffer of an active BatchNorm: the running variance that scales its layer's weight while batch statistics are
# used. It is updated between optimizer steps, not within, so that a recomputed forward reads the same weight.
VARIANCE = "qsdk_variance"
_SMALLEST = 1e-30  # smallest factor by which a weight is divided


@dataclass(eq=False)
class TrainableBatchNorm:
    """A BatchNorm that was folded into the layer before it, and what is needed to bring it back.

    Attributes:
        fold: how it was folded.
        norm: the module, with gamma, beta and statistics as they were folded the last time.
        own_bias: the layer's bias without the BatchNorm, where it had one.
        lost_weights: the layer's weights of channels with a factor of 0, which folding loses.
        identity: the Identity that replaces the BatchNorm while it is folded; held here while it is active.
        bias_when_folded: the bias that only the folded layer has; held here while the BatchNorm is active.
        is_separate: whether the layer's call ends before the BatchNorm, to show the BatchNorm's input.
        input_hook: called with the BatchNorm's input, in eval mode.
    """

    fold: Fold
    norm: nn.Module
    own_bias: Tensor | None
    lost_weights: Tensor
    identity: nn.Module | None = None
    bias_when_folded: nn.Parameter | None = None
    is_separate: bool = False
    input_hook: Callable[[Tensor], None] | None = field(default=None, repr=False)

    @property
    def is_active(self) -> bool:
        """Return whether the BatchNorm is in the model now, rather than folded."""
        return self.identity is not None

    # --- the layer's call -----------------------------------------------------------------------------------------

    def run(self, runtime: Runtime, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer and the BatchNorm; `forward` is the layer's own."""
        frame = runtime.frame
        if self.input_hook is not None and frame is not None:
            counts, calls = dict(frame.counts), dict(frame.calls)
            self.is_separate = True
            try:
                norm_input = forward(*args, **kwargs)
            finally:
                self.is_separate = False
                frame.counts = counts  # the ops of the second run are those of the first
                frame.calls.clear()
                frame.calls.update(calls)
            self.input_hook(tensors_of(norm_input)[0])
        result = forward(*args, **kwargs)
        if not self.norm.training:
            return result
        return map_leaves(result, lambda _, x: self._normalize(x, runtime) if isinstance(x, Tensor) else x)

    def _normalize(self, x: Tensor, runtime: Runtime) -> Tensor:
        frame = runtime.frame
        assert frame is not None
        runtime.frame = Frame(frame.path, frame.name, leaf=True)  # a leaf, so that no op in it is a site
        try:
            if not self.fold.has_own_forward:
                return self.norm.forward(x)  # type: ignore[no-any-return]  # not its call: its hooks run at its place
            norm: Any = self.norm  # what its own forward does besides, it does at its own place
            statistics = norm.running_mean, norm.running_var
            return F.batch_norm(x, *statistics, norm.weight, norm.bias, True, norm.momentum, norm.eps)
        finally:
            runtime.frame = frame

    def read_parameter(self, layer: nn.Module, name: str, path: str, runtime: Runtime) -> Tensor | None:
        """Return the weight or bias of the layer, as an op in a running forward reads it."""
        frame, runtime.frame = runtime.frame, None  # outside of any frame: this arithmetic is not an op of the model
        try:
            if self._leaves_norm_separate(frame, path):
                return self._read_unfolded(layer, name, path, runtime)
            return runtime.emit(site_name(path, name), self.folded_parameter(layer, name))
        finally:
            runtime.frame = frame

    def _leaves_norm_separate(self, frame: Frame | None, path: str) -> bool:
        """Return whether the BatchNorm runs as an op of its own.

        It does so only in the call of its layer, whichever other module reads the layer's weight.
        """
        return (self.norm.training or self.is_separate) and frame is not None and frame.path == path

    def _read_unfolded(self, layer: nn.Module, name: str, path: str, runtime: Runtime) -> Tensor | None:
        raw = layer._parameters[name]
        if name != "weight" or raw is None:
            return raw
        norm = self.norm
        gamma = self.statistics()["weight"]
        statistics = {"running_var": norm._buffers[VARIANCE], "weight": None if gamma is None else gamma.detach()}
        factor = factor_of(statistics, self.fold)
        factor = channel_view(torch.where(factor.abs() > _SMALLEST, factor, 1.0), raw, self.fold)
        # dividing the weight costs less than dividing the result, and does the same to an output channel
        return runtime.emit(site_name(path, name), (raw * factor).to(raw.dtype)) / factor.to(raw.dtype)

    def folded_parameter(self, layer: nn.Module, name: str) -> Tensor:
        """Return the weight or bias of the folded layer, on the graph of the parameters that it is computed from."""
        statistics, weight, bias = self.statistics(), held_tensor(layer, "weight"), layer._parameters.get("bias")
        if name == "weight":
            return fold_weight(full_tensor_of(weight), statistics, self.fold)
        return fold_bias(None if bias is None else full_tensor_of(bias), statistics, self.fold, weight.dtype)

    def statistics(self) -> dict[str, Tensor | None]:
        """Return the statistics, gamma and beta of the BatchNorm."""
        tensors = statistics_of(self.norm)
        return {name: None if tensor is None else full_tensor_of(tensor) for name, tensor in tensors.items()}

    def copy_variance(self) -> None:
        """Copy the running variance into the buffer that scales the layer's weight."""
        held_tensor(self.norm, VARIANCE).copy_(held_tensor(self.norm, "running_var"))

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function that moves or converts the model to what is not in the model now, as `nn.Module._apply`."""
        if not self.is_active:
            self.norm._apply(fn)  # type: ignore[no-untyped-call]
        self.own_bias = None if self.own_bias is None else fn(self.own_bias)
        self.lost_weights = fn(self.lost_weights)
        if self.bias_when_folded is not None:
            self.bias_when_folded.data = fn(self.bias_when_folded.data)

    # --- back and forth -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fold_into(self, layer: nn.Module) -> None:
        """Fold the BatchNorm into the parameters of its layer."""
        weight, bias = held_tensor(layer, "weight"), layer._parameters.get("bias")
        new_weight, new_bias = self.folded_parameter(layer, "weight"), self.folded_parameter(layer, "bias")
        self.lost_weights = _weights_with_zero_factor(full_tensor_of(weight), self.statistics(), self.fold)
        self.own_bias = None if bias is None else full_tensor_of(bias).detach().clone()
        write_full_tensor(weight, new_weight)
        if bias is None:
            bias, self.bias_when_folded = self.bias_when_folded, None
            assert bias is not None
            bias.data = new_bias.to(bias)
            layer._parameters["bias"] = bias
        else:
            write_full_tensor(bias, new_bias)

    @torch.no_grad()
    def unfold_from(self, layer: nn.Module, output_stats: FoldedNorm | None) -> None:
        """Give the layer and the BatchNorm parameters that together compute what the folded layer computes now.

        Where the folded parameters are those that folding left, nothing changes by a bit. Changes since then go into
        the weight and, for the bias, into beta; where `output_stats` is known, gamma and beta are set from it, and the
        running mean is shifted by what the bias has changed.
        """
        weight, bias, norm = held_tensor(layer, "weight"), layer._parameters["bias"], self.norm
        assert bias is not None
        norm.to(weight.device)
        if output_stats is not None:
            restore_affine(norm, output_stats)
        raw = _unfolded_weight(weight, norm, self.fold, self.lost_weights)
        folded = bias.detach().clone()
        weight.copy_(raw)
        if self.own_bias is None:
            self.bias_when_folded = bias
            layer._parameters["bias"] = None
        else:
            bias.copy_(self.own_bias)
        self._restore_bias(layer, folded, into_mean=output_stats is not None)

    def _restore_bias(self, layer: nn.Module, folded: Tensor, *, into_mean: bool) -> None:
        """Set beta or the running mean so that the layer folds to this bias again."""
        off = self.folded_parameter(layer, "bias") != folded
        if not bool(off.any()):
            return
        own, norm = layer._parameters["bias"], self.norm
        mean, beta = held_tensor(norm, "running_mean"), norm._parameters["bias"]
        factor = factor_of(statistics_of(norm), self.fold)
        before = torch.zeros_like(factor) if own is None else own.double()
        movable = factor.abs() > _SMALLEST
        if beta is None or into_mean:
            shift = folded.double() - (0.0 if beta is None else beta.double())
            new = before - shift / torch.where(movable, factor, 1.0)
            mean.copy_(torch.where(off & movable, new, mean.double()))
            off = off & ~movable
        if beta is not None:
            beta.copy_(torch.where(off, folded.double() - (before - mean.double()) * factor, beta.double()))


def trainable_norm_of(model: nn.Module, fold: Fold) -> TrainableBatchNorm:
    """Return what is needed to bring back a BatchNorm that is about to be folded into the layer before it."""
    norm, layer = model.get_submodule(fold.norm), model.get_submodule(fold.layer)
    bias = layer._parameters.get("bias")
    lost = _weights_with_zero_factor(held_tensor(layer, "weight"), statistics_of(norm), fold)
    return TrainableBatchNorm(fold, norm, None if bias is None else bias.detach().clone(), lost)


def output_statistics(trainable: TrainableBatchNorm) -> FoldedNorm:
    """Return the mean and deviation of the layer's outputs, as gamma and beta of the BatchNorm set them."""
    return output_statistics_of(trainable.statistics(), before=False)


def can_restore(norm: nn.Module, output_stats: FoldedNorm | None) -> bool:
    """Return whether a BatchNorm can have these output statistics.

    One without gamma and beta always has mean 0 and deviation 1.
    """
    affine = norm._parameters["weight"] is not None
    return output_stats is None or affine or not (output_stats.mean.any() or (output_stats.std != 1).any())


@torch.no_grad()
def read_norm_from_checkpoint(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str, trainable: TrainableBatchNorm
) -> None:
    """Copy the BatchNorm of a float checkpoint, before the checkpoint is folded on its way in."""
    norms, layers = (key_prefixes(model, prefix, path)[0] for path in (trainable.fold.norm, trainable.fold.layer))
    weight = state_dict.get(f"{layers}weight")
    there = f"{norms}running_mean" in state_dict
    if weight is None or (trainable.is_active and there):
        return
    if trainable.is_active:
        raise ModelError(
            f"{trainable.fold.norm} is folded into {trainable.fold.layer} in this checkpoint, and trained here; load "
            "it before sim.training, or one that was saved inside of it"
        )
    for name, held in statistics_of(trainable.norm).items():
        given = state_dict.get(norms + name)
        if held is not None and given is not None and given.shape == held.shape:
            held.copy_(given)
    bias = state_dict.get(f"{layers}bias")
    if there:
        trainable.lost_weights = _weights_with_zero_factor(weight, trainable.statistics(), trainable.fold)
        if trainable.own_bias is not None and bias is not None and bias.shape == trainable.own_bias.shape:
            trainable.own_bias.copy_(bias)


@torch.no_grad()
def restore_affine(norm: nn.Module, output_stats: FoldedNorm) -> None:
    """Set gamma and beta from the statistics of the layer's outputs, which may have been scaled since."""
    gamma, beta = norm._parameters["weight"], norm._parameters["bias"]
    if gamma is not None:
        gamma.copy_(torch.copysign(torch.from_numpy(output_stats.std).to(gamma), gamma))
    if beta is not None:
        beta.copy_(torch.from_numpy(output_stats.mean))


def _factor_and_zero_mask(weight: Tensor, statistics: Mapping[str, Tensor | None], fold: Fold) -> tuple[Tensor, Tensor]:
    """Return the factor with 1 in the place of 0, and the mask of these places, both shaped for the weight."""
    factor = factor_of(statistics, fold).detach()
    zero_mask = factor.abs() <= _SMALLEST
    return channel_view(torch.where(zero_mask, 1.0, factor), weight, fold), channel_view(zero_mask, weight, fold)


def _weights_with_zero_factor(weight: Tensor, statistics: Mapping[str, Tensor | None], fold: Fold) -> Tensor:
    _, zero_mask = _factor_and_zero_mask(weight, statistics, fold)
    return weight.detach()[zero_mask.expand_as(weight)].clone()


def _unfolded_weight(weight: Tensor, norm: nn.Module, fold: Fold, lost: Tensor) -> Tensor:
    """Return the weight that folding turns into this one."""
    factor, zero_mask = _factor_and_zero_mask(weight, statistics_of(norm), fold)
    raw = (weight / factor).to(weight.dtype)
    if bool(zero_mask.any()):
        where = zero_mask.expand_as(weight)
        if lost.numel() == int(where.sum()) and not bool(weight[where].any()):
            raw[where] = lost.to(raw)
        else:  # these weights were written since: a gamma of the deviation makes the factor 1
            gamma, var = held_tensor(norm, "weight"), held_tensor(norm, "running_var")
            zero = factor_of(statistics_of(norm), fold).abs() <= _SMALLEST
            gamma.copy_(torch.where(zero, (var.double() + fold.eps).sqrt(), gamma.double()))
    if weight.dtype not in (torch.float32, torch.float64):
        return raw
    # rounding may make the quotient fold to another weight: then take the neighbour that folds to this one
    statistics = statistics_of(norm)
    off = fold_weight(raw, statistics, fold) != weight
    for side in (-torch.inf, torch.inf):
        other = torch.nextafter(raw, torch.full_like(raw, side))
        raw = torch.where(off & (fold_weight(other, statistics, fold) == weight), other, raw)
    return raw
