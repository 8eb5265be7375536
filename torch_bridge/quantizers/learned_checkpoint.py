"""Learned scales and zero points in checkpoints, which load into trained and untrained sims alike."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.quantizers.learned_scales import learned_scale, learned_zero_point
from torch_bridge.quantizers.quantizer import Quantizer


def adapt_learned_state(quantizer: Quantizer, state_dict: dict[str, Any], prefix: str) -> None:
    """Adapt a checkpoint to the keys that a module has for a site.

    Where nothing is learned now, learned values are merged into the encoding; where something is, a checkpoint without
    learned values gets zeros.
    """
    if not quantizer.owns_encoding:
        return
    spec = quantizer.decision.spec
    assert spec is not None
    scale, zero_point = (prefix + name for name in quantizer.buffer_names)
    log2, shift = prefix + quantizer.log_scale_name, prefix + quantizer.shift_name
    now = [prefix + name for name in quantizer.learned_names]
    with torch.no_grad():
        if log2 in state_dict and log2 not in now and scale in state_dict:
            state_dict[scale] = learned_scale(state_dict[scale], state_dict.pop(log2), spec)
        if shift in state_dict and shift not in now and zero_point in state_dict:
            lo, hi = spec.dtype.lo, spec.dtype.hi
            state_dict[zero_point] = learned_zero_point(state_dict[zero_point], state_dict.pop(shift), lo, hi)
    for key, base in ((log2, scale), (shift, zero_point)):
        if key in now and key not in state_dict and isinstance(state_dict.get(base), Tensor):
            state_dict[key] = torch.zeros_like(state_dict[base])


@contextmanager
def keeping_float32(owner: nn.Module, quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Keep the dtype and the digits of a module's encodings and learned values inside the block.

    The block may move them to another device. Learned values keep their gradients too, so that an optimizer goes on
    with them.
    """
    names = [name for quantizer in quantizers for name in (*quantizer.buffer_names, *quantizer.learned_names)]
    before = {}
    for name in names:
        tensor = owner._buffers.get(name, owner._parameters.get(name))
        if tensor is not None:
            before[name] = tensor.detach(), None if tensor.grad is None else tensor.grad.detach()
    yield
    for name, (value, gradient) in before.items():
        moved = owner._buffers.get(name, owner._parameters.get(name))
        assert moved is not None
        if moved.dtype != value.dtype:
            moved.grad = None  # torch checks a gradient against the dtype that its tensor has
            moved.data = value.to(moved.device)
            moved.grad = None if gradient is None else gradient.to(moved.device)


def prepare_buffers(
    module: nn.Module, quantizer: Quantizer, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Make buffers for the encodings of a state_dict; half an encoding, or one that does not fit, is an error."""
    if not quantizer.owns_encoding:
        return
    present = [name for name in quantizer.buffer_names if prefix + name in state_dict]
    if len(present) == 1:
        absent = next(name for name in quantizer.buffer_names if name not in present)
        error_msgs.append(f"the encoding of {quantizer.site} is uninitialised: {prefix}{absent} is missing")
        state_dict.pop(prefix + present[0])
        return
    misfit = next((m for name in present if (m := quantizer.shape_error(state_dict[prefix + name]))), None)
    if misfit is not None:
        error_msgs.append(f"the encoding of {quantizer.site} does not fit: {misfit}")
        for name in present:
            state_dict.pop(prefix + name)
        return
    for name in present:
        module._buffers[name] = torch.empty_like(state_dict[prefix + name], dtype=torch.float32)
