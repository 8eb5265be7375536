"""BatchNorms that were folded into the layer before them and can be trained all the same, with the folding simulated.

While it is live, a BatchNorm stands at its own place again, and its layer has the weight that it has in the float
model. The layer's call does the work of both, in front of its output site (Krishnamoorthi 2018, section 3.2, with one
convolution): with batch statistics the layer multiplies with the weight that the exported model would have, divided
by the BatchNorm's factor again behind the weight's quantizer, and the BatchNorm normalises what comes; in eval mode
weight and bias are folded as `torch_bridge.folding.batch_norm` folds them for good, bit for bit, and gamma and beta
are trained through them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.layers.folded_norms import FoldedNorm
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import (
    Fold,
    channel_view,
    factor_of,
    folded_bias,
    folded_weight,
    key_prefixes,
    said_by,
    statistics_of,
)
from torch_bridge.sites.call_scopes import Frame
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.sharding import whole, write_whole

# A buffer of a live BatchNorm: the running variance that goes into its layer's weight while batch statistics are
# used. It follows the running one between optimizer steps, not within: a recomputed forward reads the same weight.
VARIANCE = "qsdk_variance"
_SMALLEST = 1e-30  # of a factor that a weight can be divided by


@dataclass(eq=False)
class KeptNorm:
    """A BatchNorm that was folded into the layer before it, and what it takes to bring it back.

    Attributes:
        fold: how it was folded.
        norm: the module, with gamma, beta and statistics as they were folded the last time.
        own_bias: the layer's bias without the BatchNorm, where it had one.
        dead: the layer's weights of the channels with a factor of 0, which folding loses.
        identity: what stands in its place while it is folded; held while it is live.
        folded_parameter: the bias that only the folded layer has; held while it is live.
        apart: whether the layer leaves the BatchNorm to its caller, as far as its input.
        meet: told of what the BatchNorm gets, in eval mode.
    """

    fold: Fold
    norm: nn.Module
    own_bias: Tensor | None
    dead: Tensor
    identity: nn.Module | None = None
    folded_parameter: nn.Parameter | None = None
    apart: bool = False
    meet: Callable[[Tensor], None] | None = field(default=None, repr=False)

    @property
    def live(self) -> bool:
        """Whether it is in the model now."""
        return self.identity is not None

    # --- the layer's call -----------------------------------------------------------------------------------------

    def run(self, runtime: Runtime, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give what the layer and the BatchNorm make of the layer's arguments; `forward` is the layer's own."""
        if self.meet is not None:
            self.apart = True
            try:
                found = forward(*args, **kwargs)
            finally:
                self.apart = False
            self.meet(found)
        result = forward(*args, **kwargs)
        return self._normalized(result, runtime) if self.norm.training else result

    def _normalized(self, x: Tensor, runtime: Runtime) -> Tensor:
        frame = runtime.frame
        assert frame is not None
        runtime.frame = Frame(frame.path, frame.name, leaf=True)  # no op in it is a site
        try:
            return self.norm.forward(x)  # type: ignore[no-any-return]  # not its call: its hooks run where it stands
        finally:
            runtime.frame = frame

    def read(self, layer: nn.Module, name: str, path: str, runtime: Runtime) -> Tensor | None:
        """The weight or bias of the layer, as an op in a running forward reads it."""
        frame, runtime.frame = runtime.frame, None  # this arithmetic is no op of the model
        try:
            if self._separate(frame, path):
                return self._unfolded_parameter(layer, name, path, runtime)
            return runtime.emit(site_name(path, name), self.parameter(layer, name))
        finally:
            runtime.frame = frame

    def _separate(self, frame: Frame | None, path: str) -> bool:
        """Whether the BatchNorm comes as an op of its own; only for the layer itself, whoever else reads its weight."""
        return (self.norm.training or self.apart) and frame is not None and frame.path == path

    def _unfolded_parameter(self, layer: nn.Module, name: str, path: str, runtime: Runtime) -> Tensor | None:
        raw = layer._parameters[name]
        if name != "weight" or raw is None:
            return raw
        norm = self.norm
        gamma = self.statistics()["weight"]
        statistics = {"running_var": norm._buffers[VARIANCE], "weight": None if gamma is None else gamma.detach()}
        factor = factor_of(statistics, self.fold)
        factor = channel_view(torch.where(factor.abs() > _SMALLEST, factor, 1.0), raw, self.fold)
        # an output channel can be divided in the weight as well as in the result, which is larger
        return runtime.emit(site_name(path, name), (raw * factor).to(raw.dtype)) / factor.to(raw.dtype)

    def parameter(self, layer: nn.Module, name: str) -> Tensor:
        """The weight or bias that the folded layer has, on the graph of the parameters that make it."""
        statistics, weight, bias = self.statistics(), layer._parameters["weight"], layer._parameters.get("bias")
        assert weight is not None
        if name == "weight":
            return folded_weight(whole(weight), statistics, self.fold)
        return folded_bias(None if bias is None else whole(bias), statistics, self.fold, weight.dtype)

    def statistics(self) -> dict[str, Tensor | None]:
        """Statistics, gamma and beta of the BatchNorm."""
        found = statistics_of(self.norm)
        return {name: None if tensor is None else whole(tensor) for name, tensor in found.items()}

    def hold_variance(self) -> None:
        """Let the weight follow the running variance."""
        held, now = self.norm._buffers[VARIANCE], self.norm._buffers["running_var"]
        assert held is not None
        assert now is not None
        held.copy_(now)

    # --- back and forth -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, layer: nn.Module) -> None:
        """Fold the BatchNorm into the parameters of its layer, for good."""
        weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
        assert weight is not None
        new_weight, new_bias = self.parameter(layer, "weight"), self.parameter(layer, "bias")
        self.dead = _dead_weights(whole(weight), self.statistics(), self.fold)
        self.own_bias = None if bias is None else whole(bias).detach().clone()
        write_whole(weight, new_weight)
        if bias is None:
            bias, self.folded_parameter = self.folded_parameter, None
            assert bias is not None
            bias.data = new_bias.to(bias)
            layer._parameters["bias"] = bias
        else:
            write_whole(bias, new_bias)

    @torch.no_grad()
    def unsettle(self, layer: nn.Module, said: FoldedNorm | None) -> None:
        """Give the layer and the BatchNorm parameters that do together what the folded layer does now.

        Nothing changes by a bit where the folded parameters are those that folding left. What was done to them since
        goes into the weight and, for the bias, into beta; where `said` is known, gamma and beta are what it says, and
        the running mean is what the layer's values have moved by.
        """
        weight, bias, norm = layer._parameters["weight"], layer._parameters["bias"], self.norm
        assert weight is not None
        assert bias is not None
        norm.to(weight.device)
        if said is not None:
            heed(norm, said)
        raw = _unfolded(weight, norm, self.fold, self.dead)
        folded = bias.detach().clone()
        weight.copy_(raw)
        if self.own_bias is None:
            self.folded_parameter = bias
            layer._parameters["bias"] = None
        else:
            bias.copy_(self.own_bias)
        self._move_shift(layer, folded, into_mean=said is not None)

    def _move_shift(self, layer: nn.Module, folded: Tensor, *, into_mean: bool) -> None:
        """Have the folded bias that the layer had."""
        off = self.parameter(layer, "bias") != folded
        if not bool(off.any()):
            return
        own, norm = layer._parameters["bias"], self.norm
        mean, beta = norm._buffers["running_mean"], norm._parameters["bias"]
        assert mean is not None
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


def keep(model: nn.Module, fold: Fold) -> KeptNorm:
    """What to keep of a BatchNorm that is about to be folded into the layer before it."""
    norm, layer = model.get_submodule(fold.norm), model.get_submodule(fold.layer)
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    dead = _dead_weights(weight.detach(), statistics_of(norm), fold)
    return KeptNorm(fold, norm, None if bias is None else bias.detach().clone(), dead)


def said_of(kept: KeptNorm) -> FoldedNorm:
    """What the BatchNorm says of its layer's outputs."""
    return said_by(kept.statistics(), before=False)


def hears(norm: nn.Module, said: FoldedNorm | None) -> bool:
    """Whether a BatchNorm can say this of its values: one without gamma and beta only what it always says."""
    affine = norm._parameters["weight"] is not None
    return said is None or affine or not (said.mean.any() or (said.std != 1).any())


@torch.no_grad()
def meet_checkpoint(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, kept: KeptNorm) -> None:
    """Take the BatchNorm that a float checkpoint has, before the checkpoint is folded on its way in.

    Raises:
        ModelError: it is folded, and says nothing of a BatchNorm that is live.
    """
    norms, layers = (key_prefixes(model, prefix, path)[0] for path in (kept.fold.norm, kept.fold.layer))
    weight = state_dict.get(f"{layers}weight")
    there = f"{norms}running_mean" in state_dict
    if weight is None or (kept.live and there):
        return
    if kept.live:
        raise ModelError(
            f"{kept.fold.norm} is folded into {kept.fold.layer} in this checkpoint, and trained here; load it before "
            "sim.training, or one that was saved inside of it"
        )
    for name, held in statistics_of(kept.norm).items():
        given = state_dict.get(norms + name)
        if held is not None and given is not None and given.shape == held.shape:
            held.copy_(given)
    bias = state_dict.get(f"{layers}bias")
    if there:
        kept.dead = _dead_weights(weight, kept.statistics(), kept.fold)
        if kept.own_bias is not None and bias is not None and bias.shape == kept.own_bias.shape:
            kept.own_bias.copy_(bias)


@torch.no_grad()
def heed(norm: nn.Module, said: FoldedNorm) -> None:
    """Take over gamma and beta: the layer's outputs may have been scaled since."""
    gamma, beta = norm._parameters["weight"], norm._parameters["bias"]
    if gamma is not None:
        gamma.copy_(torch.copysign(torch.from_numpy(said.std).to(gamma), gamma))
    if beta is not None:
        beta.copy_(torch.from_numpy(said.mean))


def _dead(weight: Tensor, statistics: Mapping[str, Tensor | None], fold: Fold) -> tuple[Tensor, Tensor]:
    """The factor shaped for the weight, 1 where it is 0, and where that is."""
    factor = factor_of(statistics, fold).detach()
    dead = factor.abs() <= _SMALLEST
    return channel_view(torch.where(dead, 1.0, factor), weight, fold), channel_view(dead, weight, fold)


def _dead_weights(weight: Tensor, statistics: Mapping[str, Tensor | None], fold: Fold) -> Tensor:
    _, dead = _dead(weight, statistics, fold)
    return weight.detach()[dead.expand_as(weight)].clone()


def _unfolded(weight: Tensor, norm: nn.Module, fold: Fold, lost: Tensor) -> Tensor:
    """The weight that folding makes this one of."""
    factor, dead = _dead(weight, statistics_of(norm), fold)
    raw = (weight / factor).to(weight.dtype)
    if bool(dead.any()):
        where = dead.expand_as(weight)
        if lost.numel() == int(where.sum()) and not bool(weight[where].any()):
            raw[where] = lost.to(raw)
        else:  # they are weights again: their BatchNorm multiplies with 1
            gamma, var = norm._parameters["weight"], norm._buffers["running_var"]
            assert gamma is not None
            assert var is not None
            zero = factor_of(statistics_of(norm), fold).abs() <= _SMALLEST
            gamma.copy_(torch.where(zero, (var.double() + fold.eps).sqrt(), gamma.double()))
    if weight.dtype not in (torch.float32, torch.float64):
        return raw
    # the quotient's neighbours, where one of them was folded to this weight
    statistics = statistics_of(norm)
    off = folded_weight(raw, statistics, fold) != weight
    for side in (-torch.inf, torch.inf):
        other = torch.nextafter(raw, torch.full_like(raw, side))
        raw = torch.where(off & (folded_weight(other, statistics, fold) == weight), other, raw)
    return raw
