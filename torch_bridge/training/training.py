"""Quantization-aware training: what is learned becomes a parameter for a while."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_bridge.quantizers.compiled_kernels import Kernels
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.torch_values.parameters import STEPS
from torch_bridge.torch_values.sharding import shard_again, without_effect
from torch_bridge.training.schedule_state import Course, on_course
from torch_bridge.training.step_counter import Schedule, counting
from torch_bridge.wrapping.own_forward import drop_own_forwards, same_forwards
from torch_bridge.wrapping.wrapper import state_of


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model in eval mode for a while; afterwards every module has the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield model
    finally:
        restore_modes(modes)


def restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Give modules the modes that were noted, those of their children untouched."""
    for module, mode in modes.items():
        module.training = mode


@dataclass(frozen=True)
class Learning:
    """What is learned besides the weights.

    Attributes:
        scales: every scale that may move.
        zero_points: the zero points of asymmetric ranges.
        clipped_only: from clipped elements alone, as PACT does.
        kernels: what quantizers compute with; None for eager operations.
    """

    scales: bool = False
    zero_points: bool = False
    clipped_only: bool = False
    kernels: Kernels | None = None


@contextmanager
def training(
    model: nn.Module, quantizers: Sequence[Quantizer], learning: Learning, *, schedules: Sequence[Schedule] = ()
) -> Iterator[nn.Module]:
    """Put a wrapped model in train mode; scales and zero points that are learned have a parameter each inside.

    The parameters start at 0, where nothing has moved by a bit. Afterwards the model is in eval mode and the encodings
    are fixed, also when the block raises.
    """
    scales = [q for q in quantizers if learning.scales and q.can_learn_scale]
    shifted = [q for q in quantizers if learning.zero_points and q.can_learn_zero_point]
    learned = list(dict.fromkeys([*scales, *shifted]))
    runtime = state_of(model).runtime
    runtime.ddp = None
    with same_forwards(model), on_course(runtime, quantizers) as course:
        model.train()
        try:
            with counting(model, schedules):
                found = {q: q.scale_and_zero_point() for q in learned}  # names the site that has none
                for quantizer in scales:
                    quantizer.owner.register_parameter(
                        quantizer.log_scale_name, nn.Parameter(torch.zeros_like(found[quantizer][0]))
                    )
                for quantizer in shifted:
                    quantizer.owner.register_parameter(
                        quantizer.shift_name, nn.Parameter(torch.zeros_like(found[quantizer][1]))
                    )
                for quantizer in learned:
                    quantizer.clipped_only = learning.clipped_only
                    course.guard(quantizer)
                for quantizer in quantizers:
                    quantizer.kernels = learning.kernels
                yield model
        finally:
            shard_again(model)
            for quantizer in quantizers:
                _fix(quantizer)
            model.eval()


def leave_training(model: nn.Module, quantizers: Sequence[Quantizer]) -> None:
    """Have a copy that was made inside of a training block be as if that had ended."""
    runtime = state_of(model).runtime
    if isinstance(runtime.course, Course):
        for quantizer in quantizers:
            _fix(quantizer)
        runtime.course.close()
        runtime.course = None
        model._buffers.pop(STEPS, None)
        drop_own_forwards(model)
        model.eval()


def _fix(quantizer: Quantizer) -> None:
    """Write what was learned into the encoding."""
    if quantizer.learned_names:
        encoding = quantizer.scale_and_zero_point()
        for name, value in zip(quantizer.buffer_names, encoding, strict=True):
            quantizer.owner._buffers[name] = value.detach().clone()
    for name in quantizer.learned_names:
        parameter = quantizer.owner._parameters.pop(name)
        assert parameter is not None
        without_effect(parameter)
    quantizer.clipped_only, quantizer.kernels = False, None


def parameter_groups(
    model: nn.Module, quantizers: Sequence[Quantizer], *, lr: float, scale_lr: float | None
) -> list[dict[str, Any]]:
    """Optimizer groups: weights at `lr`; learned scales and zero points at `scale_lr` (default `lr`) without decay."""
    learned = [q.owner._parameters[name] for q in quantizers for name in q.learned_names]
    identities = {id(parameter) for parameter in learned}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in identities]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr}]
    if learned:
        groups.append({"params": learned, "lr": lr if scale_lr is None else scale_lr, "weight_decay": 0.0})
    return groups
