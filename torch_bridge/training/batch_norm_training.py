"""BatchNorms in training: folded ones are put back for a while, and all can be frozen after some steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qsdk.core.errors import ConfigError
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import replace_module
from torch_bridge.folding.trainable_batch_norm import (
    VARIANCE,
    TrainableBatchNorm,
    can_restore,
    output_statistics,
    restore_affine,
)
from torch_bridge.torch_values.parameters import held_tensor
from torch_bridge.wrapping.wrapped_state import is_batch_norm, state_of


def active_norms(model: nn.Module) -> list[TrainableBatchNorm]:
    """Return the folded BatchNorms of a wrapped model that are in the model again."""
    return [trainable for trainable in state_of(model).trainable_norms if trainable.is_active]


def require_folded(model: nn.Module) -> None:
    """Refuse to change weights of layers while these are not the weights of the exported model."""
    if active_norms(model):
        raise ConfigError(
            "BatchNorms are being trained (freeze_bn_after=), and the weights of their layers are not the folded ones; "
            "leave the training block before you change weights"
        )


def reasons_to_stay_folded(model: nn.Module) -> dict[str, str]:
    """Return path -> reason, for every folded BatchNorm that cannot be trained."""
    root = state_of(model)
    result = {fold.norm: f"it stands before {fold.layer}" for fold in root.folds if fold.before}
    trainable_paths = {trainable.fold.norm for trainable in root.trainable_norms}
    fixed = [fold.norm for fold in root.folds if fold.norm not in {*result, *trainable_paths}]
    result |= dict.fromkeys(fixed, "it is no BatchNorm of torch, and its statistics are fixed")
    for trainable in root.trainable_norms:
        reason = _reason_to_stay_folded(model, trainable)
        if reason:
            result[trainable.fold.norm] = reason
    return result


def _reason_to_stay_folded(model: nn.Module, trainable: TrainableBatchNorm) -> str:
    layer = trainable.fold.layer
    quantizer = state_of(model).runtime.quantizers.get(site_name(trainable.fold.op, "output"))
    inside = trainable.fold.op.removeprefix(layer)
    if any(site_name(layer, name) in state_of(model).frozen_values for name in ("weight", "bias")):
        return f"the values of {layer} are frozen"
    if inside and not inside.startswith(("/conv", "/linear")):
        return f"{layer} has a forward of its own, in which more follows than its op"
    if inside and quantizer is not None and not quantizer.decision.passes_through:
        return f"{layer} has a forward of its own, in which its result is quantized"
    if trainable.fold.has_own_forward and trainable.fold.norm not in state_of(model).runtime.batch_norms:
        return "its own forward does not use the statistics of the batch in train mode"
    if trainable.fold.has_own_forward and trainable.norm.momentum is None:
        return "it has a forward of its own and no momentum"
    if not can_restore(trainable.norm, state_of(model).norms.get(layer)):
        return f"it has no gamma, and {layer} was scaled after it was folded"
    return ""


@contextmanager
def unfolded_norms(model: nn.Module, freeze_after: float | None) -> Iterator[list[Callable[[int], None]]]:
    """Put the folded BatchNorms back inside the block, and return the schedule that freezes their statistics.

    After the block they are folded again, as they were trained, also when the block raises. `freeze_after` counts
    optimizer steps with batch statistics; None leaves folded BatchNorms folded, and the others alone.
    """
    if active_norms(model):
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
        _set_frozen(norms, model.training, frozen=steps >= freeze_after)
        for trainable in active_norms(model):
            trainable.copy_variance()

    try:
        unfold_norms(model)
        norms += [module for module in model.modules() if is_batch_norm(module)]
        yield [schedule]
    finally:
        fold_norms(model)


def _set_frozen(norms: list[nn.Module], training: bool, *, frozen: bool) -> None:
    for norm in norms:
        state = state_of(norm)
        if state.stays_in_eval is not frozen:
            state.stays_in_eval = frozen
            norm.train(training)


def unfold_norms(model: nn.Module) -> None:
    """Put every BatchNorm that can be trained back into the model, and its own weight into its layer."""
    root, left = state_of(model), reasons_to_stay_folded(model)
    for trainable in root.trainable_norms:
        if trainable.fold.norm not in left:
            _insert_norm(model, trainable)
            trainable.unfold_from(model.get_submodule(trainable.fold.layer), root.norms.get(trainable.fold.layer))
            trainable.copy_variance()


def fold_norms(model: nn.Module) -> None:
    """Fold the active BatchNorms into their layers, and end the freezing of all statistics."""
    for module in model.modules():
        state_of(module).stays_in_eval = False
    _fold_active(model)


def _fold_active(model: nn.Module) -> None:
    output_stats: dict[str, FoldedNorm] = {}
    for trainable in active_norms(model):
        trainable.fold_into(model.get_submodule(trainable.fold.layer))
        _remove_norm(model, trainable)
        output_stats[trainable.fold.layer] = output_statistics(trainable)
    state_of(model).norms.update(output_stats)


def restore_affine_of_folded(model: nn.Module) -> None:
    """Write what is known of the layers' outputs into the folded BatchNorms, before training makes it untrue."""
    root = state_of(model)
    for trainable in root.trainable_norms:
        output_stats = root.norms.get(trainable.fold.layer)
        if output_stats is not None and not trainable.is_active:
            restore_affine(trainable.norm, output_stats)


@contextmanager
def temporarily_folded(model: nn.Module, *, changes: bool = False) -> Iterator[None]:
    """Fold the active BatchNorms inside the block.

    Afterwards everything is as before, bit for bit; or with `changes`, if the block does not raise, the unfolded model
    computes what the folded one computed at the end.
    """
    root, live = state_of(model), active_norms(model)
    if not live:
        yield
        return
    raw = {name: tensor.detach().clone() for name, tensor in _stored_tensors(model, live).items()}
    norms, modes = dict(root.norms), [trainable.norm.training for trainable in live]
    changed = False
    _fold_active(model)
    try:
        yield
        changed = changes
    finally:
        for trainable, mode in zip(live, modes, strict=True):
            _insert_norm(model, trainable)
            trainable.unfold_from(model.get_submodule(trainable.fold.layer), root.norms.get(trainable.fold.layer))
            trainable.copy_variance()
            trainable.norm.training = mode
        if not changed:
            root.norms = norms
            with torch.no_grad():
                for name, tensor in _stored_tensors(model, live).items():
                    tensor.copy_(raw[name])


def _stored_tensors(model: nn.Module, live: list[TrainableBatchNorm]) -> Mapping[str, Tensor]:
    result: dict[str, Tensor] = {}
    for trainable in live:
        for module in (trainable.norm, model.get_submodule(trainable.fold.layer)):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    result[f"{state_of(module).path}.{name}"] = tensor
    return result


def _insert_norm(model: nn.Module, trainable: TrainableBatchNorm) -> None:
    identity, layer = model.get_submodule(trainable.fold.norm), model.get_submodule(trainable.fold.layer)
    replace_module(model, identity, trainable.norm)
    trainable.identity = identity
    variance = held_tensor(trainable.norm, "running_var")
    trainable.norm.register_buffer(VARIANCE, variance.detach().clone(), persistent=False)
    state_of(trainable.norm).active_norm = state_of(layer).active_norm = trainable


def _remove_norm(model: nn.Module, trainable: TrainableBatchNorm) -> None:
    layer, identity = model.get_submodule(trainable.fold.layer), trainable.identity
    assert identity is not None
    replace_module(model, trainable.norm, identity)
    del trainable.norm._buffers[VARIANCE]
    trainable.norm._non_persistent_buffers_set.discard(VARIANCE)
    state_of(trainable.norm).active_norm = state_of(layer).active_norm = trainable.identity = None
