"""Quantization-aware training: learned scales, counted steps, schedules, frozen values, and BatchNorms put back."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from qsdk.core.errors import ConfigError, ModelError
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import (
    VARIANCE,
    TrainableBatchNorm,
    can_restore,
    output_statistics,
    replace_module,
    restore_affine,
)
from torch_bridge.quantizers.fake_quant import CompiledKernels
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.parameters import STEPS, find_stored, held_tensor, is_recurrent
from torch_bridge.torch_values.sharding import reshard_parameters, zero_if_sharded
from torch_bridge.wrapping.own_forward import drop_own_forwards, restoring_forwards
from torch_bridge.wrapping.wrapped_state import is_batch_norm, state_of

Schedule = Callable[[int], None]


def steps_of(model: nn.Module) -> int:
    """Return the optimizer steps of this training so far; those of a checkpoint that was loaded count."""
    return int(held_tensor(model, STEPS))


class _LoadHook:
    """A hook that is called when a checkpoint was loaded; in a copy of the model it does nothing."""

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        self._notify = notify

    def __call__(self, *_: Any) -> None:
        if self._notify is not None:
            self._notify()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LoadHook, ()


@contextmanager
def counting_steps(model: nn.Module, schedules: Sequence[Schedule]) -> Iterator[None]:
    """Call every schedule with 0 now, and with the number of steps after each step and after a checkpoint is loaded.

    Only the first optimizer that steps any parameter of the model is counted: neither gradient accumulation, nor a step
    that a GradScaler leaves out, nor a second optimizer for the scales changes the count.
    """
    counted_optimizer: list[ref[torch.optim.Optimizer]] = []

    def notify(*_: Any) -> None:
        if schedules:  # reading the count waits for a GPU
            steps = steps_of(model)
            for schedule in schedules:
                schedule(steps)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of the first optimizer that steps the model, and tell the schedules."""
        counted = counted_optimizer[0]() if counted_optimizer else None
        if counted is None:
            own = {id(parameter) for parameter in model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
            counted_optimizer[:] = [ref(optimizer)]
        elif counted is not optimizer:
            return
        held_tensor(model, STEPS).add_(1)
        notify()

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.register_buffer(STEPS, torch.zeros((), dtype=torch.int64, device=device))
    loaded = model.register_load_state_dict_post_hook(_LoadHook(notify))  # type: ignore[no-untyped-call]
    handles = [register_optimizer_step_post_hook(after_step), loaded]
    try:
        notify()
        yield
    finally:
        for handle in handles:
            handle.remove()
        del model._buffers[STEPS]


class ScheduleState:
    """What schedules have changed in a sim.

    `held` is schedule that holds ranges -> the sites whose scales and zero points no optimizer moves.
    """

    def __init__(self, quantizers: Sequence[Quantizer]) -> None:
        self.held: dict[Any, frozenset[str]] = {}
        self._quantizers = quantizers

    def holds(self, site: str) -> bool:
        """Return whether any schedule holds the range of a site."""
        return any(site in sites for sites in self.held.values())

    def zero_held_gradients(self, quantizer: Quantizer) -> None:
        """Make the gradients of a site's learned parameters 0 while its range is held.

        They are not None, because every rank waits for a gradient.
        """
        for name in quantizer.learned_names:
            parameter = held_tensor(quantizer.owner, name)
            parameter.register_hook(unserializable_hook(partial(self._gradient, quantizer.site)))  # type: ignore[no-untyped-call]

    def _gradient(self, site: str, gradient: Tensor) -> Tensor | None:
        return gradient.new_zeros(()).expand_as(gradient) if self.holds(site) else None

    def before_step(self, *_: Any) -> None:
        """Remove the gradients of held ranges, so that neither momentum nor weight decay moves them."""
        for quantizer in self._quantizers if self.held else ():
            if quantizer.learned_names and self.holds(quantizer.site):
                for name in quantizer.learned_names:
                    held_tensor(quantizer.owner, name).grad = None


@contextmanager
def tracking_schedules(runtime: Runtime, quantizers: Sequence[Quantizer]) -> Iterator[ScheduleState]:
    """Track what schedules change inside the block, and undo it afterwards."""
    schedule_state = runtime.schedule_state = ScheduleState(quantizers)
    handle = register_optimizer_step_pre_hook(schedule_state.before_step)
    try:
        yield schedule_state
    finally:
        handle.remove()
        runtime.schedule_state = None


@contextmanager
def holding_values(model: nn.Module, sites: Collection[str]) -> Iterator[None]:
    """Keep the stored tensors at sites of a wrapped model unchanged inside the block, after every optimizer step too.

    Parameters of which every value is kept require no gradient inside the block, so that neither weight decay nor the
    norm of all gradients counts them.
    """
    held = [(tensor, tensor.detach().clone()) for tensor in _tensors(model, sites)]
    whole = {id(tensor) for tensor, _ in held}
    untrained = [parameter for parameter in model.parameters() if id(parameter) in whole and parameter.requires_grad]

    @torch.no_grad()
    def restore_values(*_: Any) -> None:
        for tensor, value in held:
            tensor.detach().copy_(value)

    handle = register_optimizer_step_post_hook(restore_values) if held else None
    for parameter in untrained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        restore_values()
        for parameter in untrained:
            parameter.requires_grad_(True)


def guard_values(model: nn.Module, sites: Collection[str], frozen: Callable[[], Collection[str]]) -> None:
    """Let a gradient that reaches a stored tensor at one of these sites raise an error, as long as it is frozen.

    Inside of `holding_values` none does; outside, nothing would hold the tensor against an optimizer.
    """
    for site in sites:
        for tensor in _tensors(model, [site]):
            if tensor.requires_grad and tensor.is_leaf:
                guard: Any = tensor.register_post_accumulate_grad_hook
                guard(partial(_refuse_gradient, site=site, frozen=frozen))


def _refuse_gradient(parameter: Tensor, *, site: str, frozen: Callable[[], Collection[str]]) -> None:
    if site in frozen():
        parameter.grad = None
        raise ConfigError(
            f"a gradient has reached {site}, whose values are frozen, outside of sim.training(), where nothing holds "
            f"them: train inside `with sim.training():`, or call sim.unfreeze({site!r})"
        )


def _tensors(model: nn.Module, sites: Collection[str]) -> list[Tensor]:
    """Return the stored tensors at sites; of a recurrent layer all its parameters, since sites read them rearranged."""
    result: dict[int, Tensor] = {}
    for site in sorted(sites):
        owner = site.rpartition(":")[0]
        module = model if owner == "self" else _module_at(model, owner)
        stored = find_stored(model, site)
        tensors = module.parameters(recurse=False) if module is not None and is_recurrent(module) else [stored]
        result |= {id(tensor): tensor for tensor in tensors if tensor is not None}
    return list(result.values())


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model in eval mode inside the block; afterwards every module has the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield model
    finally:
        restore_modes(modes)


@contextmanager
def fixed_parameters(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model ask for a gradient inside the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set the mode of each module, without touching its children."""
    for module, mode in modes.items():
        module.training = mode


@contextmanager
def training(
    model: nn.Module,
    quantizers: Sequence[Quantizer],
    *,
    scales: bool,
    zero_points: bool,
    clipped_only: bool,
    kernels: CompiledKernels | None,
    schedules: Sequence[Schedule],
) -> Iterator[nn.Module]:
    """Put a wrapped model in train mode inside the block; learned scales and zero points have a parameter each.

    The parameters start at 0, where nothing changes by a bit. Afterwards the model is in eval mode and the encodings
    are fixed, also when the block raises.
    """
    scaled = [q for q in quantizers if scales and q.can_learn_scale]
    shifted = [q for q in quantizers if zero_points and q.can_learn_zero_point]
    learned = list(dict.fromkeys([*scaled, *shifted]))
    runtime = state_of(model).runtime
    runtime.ddp = None
    with restoring_forwards(model), tracking_schedules(runtime, quantizers) as schedule_state:
        model.train()
        try:
            with counting_steps(model, schedules):
                encodings = {q: q.scale_and_zero_point() for q in learned}  # raises where a site has no encoding
                for quantizer in scaled:
                    quantizer.owner.register_parameter(
                        quantizer.log_scale_name, nn.Parameter(torch.zeros_like(encodings[quantizer][0]))
                    )
                for quantizer in shifted:
                    quantizer.owner.register_parameter(
                        quantizer.shift_name, nn.Parameter(torch.zeros_like(encodings[quantizer][1]))
                    )
                for quantizer in learned:
                    quantizer.clipped_only = clipped_only
                    schedule_state.zero_held_gradients(quantizer)
                for quantizer in quantizers:
                    quantizer.kernels = kernels
                yield model
        finally:
            reshard_parameters(model)
            for quantizer in quantizers:
                _end_learning(quantizer)
            model.eval()


def require_weights_unwritten(runtime: Runtime) -> None:
    """Refuse to train a model whose forward pass in train mode writes over a weight that it reads on its grid."""
    for name, line in runtime.written_in_training.items():
        path, _, own = name.rpartition(".")
        if runtime.quantizers.get(site_name(path, own)) is not None:
            raise ModelError(
                f"in train mode the forward pass writes over {name} ({line}), which a sim reads on its grid, so that "
                "the change would be lost; let both modes read the same weight: take the switch out of forward, with "
                "the weight as eval mode has it, and call qsdk.quantize again"
            )


def leave_training(model: nn.Module, quantizers: Sequence[Quantizer]) -> None:
    """End the training of a copy that was made inside a training block."""
    runtime = state_of(model).runtime
    if isinstance(runtime.schedule_state, ScheduleState):
        for quantizer in quantizers:
            _end_learning(quantizer)
        runtime.schedule_state = None
        model._buffers.pop(STEPS, None)
        drop_own_forwards(model)
        model.eval()


def _end_learning(quantizer: Quantizer) -> None:
    """Write what was learned into the encoding."""
    if quantizer.learned_names:
        encoding = quantizer.scale_and_zero_point()
        for name, value in zip(quantizer.buffer_names, encoding, strict=True):
            quantizer.owner._buffers[name] = value.detach().clone()
    for name in quantizer.learned_names:
        zero_if_sharded(held_tensor(quantizer.owner, name))
        del quantizer.owner._parameters[name]
    quantizer.clipped_only, quantizer.kernels = False, None


def parameter_groups(
    model: nn.Module, quantizers: Sequence[Quantizer], *, lr: float, scale_lr: float | None
) -> list[dict[str, Any]]:
    """Return optimizer groups: weights at `lr`; learned scales and zero points at `scale_lr`, without decay.

    `scale_lr` is `lr` where it is None.
    """
    learned = [q.owner._parameters[name] for q in quantizers for name in q.learned_names]
    identities = {id(parameter) for parameter in learned}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in identities]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr}]
    if learned:
        groups.append({"params": learned, "lr": lr if scale_lr is None else scale_lr, "weight_decay": 0.0})
    return groups


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
