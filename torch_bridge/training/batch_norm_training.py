"""BatchNorms in training: those that were folded come back for a while, and all are frozen after some steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qsdk.core.errors import ConfigError
from qsdk.core.layers.folded_norms import FoldedNorm
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import replace_module
from torch_bridge.folding.trainable_batch_norm import VARIANCE, KeptNorm, hears, heed, said_of
from torch_bridge.wrapping.wrapper import state_of


def live_in(model: nn.Module) -> list[KeptNorm]:
    """The BatchNorms of a wrapped model that were folded and are live now."""
    return [kept for kept in state_of(model).kept if kept.live]


def require_folded(model: nn.Module) -> None:
    """Refuse to change the weights of layers while they are not those of the exported model.

    Raises:
        ConfigError: BatchNorms are live.
    """
    if live_in(model):
        raise ConfigError(
            "BatchNorms are being trained (freeze_bn_after=), and the weights of their layers are not the folded ones; "
            "leave the training block before you change weights"
        )


def stays_folded(model: nn.Module) -> dict[str, str]:
    """Path -> why, for every BatchNorm that was folded and cannot be trained."""
    root = state_of(model)
    found = {fold.norm: f"it stands before {fold.layer}" for fold in root.folds if fold.before}
    for kept in root.kept:
        reason = _obstacle(model, kept)
        if reason:
            found[kept.fold.norm] = reason
    return found


def _obstacle(model: nn.Module, kept: KeptNorm) -> str:
    layer = kept.fold.layer
    quantizer = state_of(model).runtime.quantizers.get(site_name(kept.fold.op, "output"))
    inside = kept.fold.op.removeprefix(layer)
    if any(site_name(layer, name) in state_of(model).frozen_values for name in ("weight", "bias")):
        return f"the values of {layer} are frozen"
    if inside and not inside.startswith(("/conv", "/linear")):
        return f"{layer} has a forward of its own, in which more follows than its op"
    if inside and quantizer is not None and not quantizer.decision.passes_through:
        return f"{layer} has a forward of its own, in which its result is quantized"
    if not hears(kept.norm, state_of(model).norms.get(layer)):
        return f"it has no gamma, and {layer} was scaled after it was folded"
    return ""


@contextmanager
def live_norms(model: nn.Module, freeze_after: float | None) -> Iterator[list[Callable[[int], None]]]:
    """Have the BatchNorms of a wrapped model in it for a while, and give the schedule that freezes them.

    Afterwards they are folded again, with what was trained, also when the block raises.

    Args:
        model: the wrapped model.
        freeze_after: optimizer steps with batch statistics; None leaves folded BatchNorms folded, and the others alone.

    Raises:
        ConfigError: no such number of steps, or the BatchNorms are being trained already.
    """
    if live_in(model):
        raise ConfigError("the BatchNorms of this sim are being trained; leave that block before you enter another")
    if freeze_after is None:
        yield []
        return
    if isinstance(freeze_after, bool) or not isinstance(freeze_after, int | float) or not freeze_after >= 0:
        raise ConfigError(
            f"freeze_bn_after={freeze_after!r} is no number of optimizer steps; give 0 or more, math.inf for never, or "
            "None to keep BatchNorms folded"
        )
    norms: list[nn.Module] = []

    def schedule(steps: int) -> None:
        _hold(norms, model.training, frozen=steps >= freeze_after)
        for kept in live_in(model):
            kept.hold_variance()

    try:
        enter(model)
        norms += [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        yield [schedule]
    finally:
        leave(model)


def _hold(norms: list[nn.Module], training: bool, *, frozen: bool) -> None:
    for norm in norms:
        state = state_of(norm)
        if state.holds_eval is not frozen:
            state.holds_eval = frozen
            norm.train(training)


def enter(model: nn.Module) -> None:
    """Put every BatchNorm that can be trained back in front of the model's eyes, and its layer's own weight."""
    root, left = state_of(model), stays_folded(model)
    for kept in root.kept:
        if kept.fold.norm not in left:
            _place(model, kept)
            kept.unsettle(model.get_submodule(kept.fold.layer), root.norms.get(kept.fold.layer))
            kept.hold_variance()


def leave(model: nn.Module) -> None:
    """Fold the BatchNorms that are live into their layers for good, and hold none in eval mode any more."""
    for module in model.modules():
        state_of(module).holds_eval = False
    _settle(model)


def _settle(model: nn.Module) -> None:
    said: dict[str, FoldedNorm] = {}
    for kept in live_in(model):
        kept.settle(model.get_submodule(kept.fold.layer))
        _take_away(model, kept)
        said[kept.fold.layer] = said_of(kept)
    state_of(model).norms.update(said)


def remember(model: nn.Module) -> None:
    """Have what is known of the layers' values in the kept BatchNorms, before training makes it untrue."""
    root = state_of(model)
    for kept in root.kept:
        said = root.norms.get(kept.fold.layer)
        if said is not None and not kept.live:
            heed(kept.norm, said)


@contextmanager
def folded_for_now(model: nn.Module, *, changes: bool = False) -> Iterator[None]:
    """Have the live BatchNorms folded for a while.

    Afterwards everything is as it was, bit for bit; or with `changes`, if the block does not raise, what the folded
    model is by then.
    """
    root, live = state_of(model), live_in(model)
    if not live:
        yield
        return
    raw = {name: tensor.detach().clone() for name, tensor in _raw(model, live).items()}
    norms, modes = dict(root.norms), [kept.norm.training for kept in live]
    changed = False
    _settle(model)
    try:
        yield
        changed = changes
    finally:
        for kept, mode in zip(live, modes, strict=True):
            _place(model, kept)
            kept.unsettle(model.get_submodule(kept.fold.layer), root.norms.get(kept.fold.layer))
            kept.hold_variance()
            kept.norm.training = mode
        if not changed:
            root.norms = norms
            with torch.no_grad():
                for name, tensor in _raw(model, live).items():
                    tensor.copy_(raw[name])


def _raw(model: nn.Module, live: list[KeptNorm]) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = {}
    for kept in live:
        for module in (kept.norm, model.get_submodule(kept.fold.layer)):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[f"{state_of(module).path}.{name}"] = tensor
    return found


def _place(model: nn.Module, kept: KeptNorm) -> None:
    identity, layer = model.get_submodule(kept.fold.norm), model.get_submodule(kept.fold.layer)
    replace_module(model, identity, kept.norm)
    kept.identity = identity
    variance = kept.norm._buffers["running_var"]
    assert variance is not None
    kept.norm.register_buffer(VARIANCE, variance.detach().clone(), persistent=False)
    state_of(kept.norm).live = state_of(layer).live = kept


def _take_away(model: nn.Module, kept: KeptNorm) -> None:
    layer, identity = model.get_submodule(kept.fold.layer), kept.identity
    assert identity is not None
    replace_module(model, kept.norm, identity)
    del kept.norm._buffers[VARIANCE]
    kept.norm._non_persistent_buffers_set.discard(VARIANCE)
    state_of(kept.norm).live = state_of(layer).live = kept.identity = None
