"""Quantization-aware training: scales become parameters for a while, positive by construction."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_bridge.clock import Schedule, counting
from torch_bridge.quantizer import Quantizer


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


@contextmanager
def training(
    model: nn.Module, quantizers: Sequence[Quantizer], *, learn_scales: bool, schedules: Sequence[Schedule] = ()
) -> Iterator[nn.Module]:
    """Put a wrapped model in train mode; with `learn_scales` each scale of its own gets a factor 2**p inside.

    The parameters p start at 0. Their gradients are those of LSQ (Esser et al. 2020) through log2, so that no step can
    make a scale negative, and a scale that is not trained stays bit for bit. Scales that are
    confined (`scale_bits`, narrow types of block scales) are not trained.
    Afterwards the model is in eval mode and the scales are fixed, also when the block raises.
    """
    learned = [q for q in quantizers if learn_scales and q.owns_encoding and not q.frozen and q.scales_are_free]
    scales = [q.scale_and_zero_point()[0] for q in learned]  # names the site that has none, before anything changes
    for quantizer, scale in zip(learned, scales, strict=True):
        quantizer.owner.register_parameter(quantizer.log_scale_name, nn.Parameter(torch.zeros_like(scale)))
    model.train()
    try:
        with counting(model, schedules):
            yield model
    finally:
        for quantizer in learned:
            scale, _ = quantizer.scale_and_zero_point()
            quantizer.owner._buffers[quantizer.buffer_names[0]] = scale.detach().clone()
            del quantizer.owner._parameters[quantizer.log_scale_name]
        model.eval()


def parameter_groups(
    model: nn.Module, quantizers: Sequence[Quantizer], *, lr: float, scale_lr: float | None
) -> list[dict[str, Any]]:
    """Optimizer groups: weights at `lr`, learned scales at `scale_lr` (default `lr`) without weight decay."""
    named = [(q.owner._parameters.get(q.log_scale_name)) for q in quantizers]
    scales = [parameter for parameter in named if parameter is not None]
    identities = {id(parameter) for parameter in scales}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in identities]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr}]
    if scales:
        groups.append({"params": scales, "lr": lr if scale_lr is None else scale_lr, "weight_decay": 0.0})
    return groups
