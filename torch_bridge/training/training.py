"""Quantization-aware training: scales and zero points that are learned become parameters inside a block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsdk.core.errors import ModelError
from qsdk.core.site import site_name
from torch_bridge.quantizers.compiled_kernels import CompiledKernels
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.parameters import STEPS
from torch_bridge.torch_values.sharding import reshard_parameters, zero_if_sharded
from torch_bridge.training.schedule_state import ScheduleState, tracking_schedules
from torch_bridge.training.step_counter import Schedule, counting_steps
from torch_bridge.wrapping.own_forward import drop_own_forwards, restoring_forwards
from torch_bridge.wrapping.wrapped_state import state_of


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model in eval mode inside the block; afterwards every module has the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield model
    finally:
        restore_modes(modes)


def restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set the mode of each module, without touching its children."""
    for module, mode in modes.items():
        module.training = mode


@dataclass(frozen=True)
class Learning:
    """What is learned besides the weights.

    Attributes:
        scales: whether every scale that may move is learned.
        zero_points: whether zero points of asymmetric ranges are learned.
        clipped_only: whether gradients come from clipped elements alone, as in PACT.
        kernels: compiled kernels of the quantizers; None for eager operations.
    """

    scales: bool = False
    zero_points: bool = False
    clipped_only: bool = False
    kernels: CompiledKernels | None = None


@contextmanager
def training(
    model: nn.Module, quantizers: Sequence[Quantizer], learning: Learning, *, schedules: Sequence[Schedule] = ()
) -> Iterator[nn.Module]:
    """Put a wrapped model in train mode inside the block; learned scales and zero points have a parameter each.

    The parameters start at 0, where nothing changes by a bit. Afterwards the model is in eval mode and the encodings
    are fixed, also when the block raises.
    """
    scales = [q for q in quantizers if learning.scales and q.can_learn_scale]
    shifted = [q for q in quantizers if learning.zero_points and q.can_learn_zero_point]
    learned = list(dict.fromkeys([*scales, *shifted]))
    runtime = state_of(model).runtime
    runtime.ddp = None
    with restoring_forwards(model), tracking_schedules(runtime, quantizers) as schedule_state:
        model.train()
        try:
            with counting_steps(model, schedules):
                encodings = {q: q.scale_and_zero_point() for q in learned}  # raises where a site has no encoding
                for quantizer in scales:
                    quantizer.owner.register_parameter(
                        quantizer.log_scale_name, nn.Parameter(torch.zeros_like(encodings[quantizer][0]))
                    )
                for quantizer in shifted:
                    quantizer.owner.register_parameter(
                        quantizer.shift_name, nn.Parameter(torch.zeros_like(encodings[quantizer][1]))
                    )
                for quantizer in learned:
                    quantizer.clipped_only = learning.clipped_only
                    schedule_state.zero_held_gradients(quantizer)
                for quantizer in quantizers:
                    quantizer.kernels = learning.kernels
                yield model
        finally:
            reshard_parameters(model)
            for quantizer in quantizers:
                _end_learning(quantizer)
            model.eval()


def require_weights_unwritten(runtime: Runtime) -> None:
    """Refuse to train a model whose forward pass in train mode writes over a weight that it reads on its grid.

    Raises:
        ModelError: names the weight, and the line that writes it.
    """
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
        parameter = quantizer.owner._parameters.pop(name)
        assert parameter is not None
        zero_if_sharded(parameter)
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
