"""Modules that accelerate's `device_map` has dispatched: weights wait on the host or on disk, and hooks bring them."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError

#: what accelerate puts on objects: its hook, the forward from before, and warnings around moving the model
_HOOK, _BEFORE, _FORWARD = "_hf_hook", "_old_forward", "forward"
_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "musa", "sdaa")


def is_dispatched(model: nn.Module) -> bool:
    """Return whether accelerate's hooks are on a model's modules."""
    return any(_HOOK in vars(module) for module in model.modules())


def undispatched(model: nn.Module) -> nn.Module:
    """Return a copy of a dispatched model that holds all its weights and has no hooks.

    The weights that wait on the host or on disk are read. The model stays as it is.

    Raises:
        ModelError: nobody knows where a weight is, or the weights are on several devices.
    """
    memo = dict(_stand_ins(model))
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        own = vars(module)
        if _HOOK in own:
            forward = own.pop(_BEFORE, None)
            own.pop(_FORWARD, None)
            own.pop(_HOOK)
            # a forward that the class does not have, from before accelerate
            if forward is not None and getattr(forward, "__func__", None) is not getattr(type(module), _FORWARD):
                own[_FORWARD] = forward
        for name in _MOVES:
            own.pop(name, None)
    devices: set[str] = set()
    for name, tensor in chain(copied.named_parameters(), copied.named_buffers()):
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device, and no hook of accelerate knows its values")
        devices.add(str(tensor.device))
    if len(devices) > 1:
        raise ModelError(
            f"the device_map spreads the model over {', '.join(sorted(devices))}; load it on one device, without "
            "device_map, or give qsdk.quantize the folder of its checkpoint, whose weights stay on disk"
        )
    return copied


def _stand_ins(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield what takes the place of objects in a copy, by id: values of the weights that are elsewhere, no hooks."""
    nothing = object()
    for module in model.modules():
        hook = vars(module).get(_HOOK)
        if hook is None:
            continue
        yield id(hook), nothing
        yield id(vars(module).get(_FORWARD, nothing)), nothing
        for each in getattr(hook, "hooks", (hook,)):
            stored = getattr(each, "weights_map", None)
            if stored is None:
                continue
            tensors = chain(module.named_parameters(), module.named_buffers())
            for name, tensor in tensors:
                if tensor.is_meta:
                    with suppress(KeyError):  # another module's hook may know it
                        yield id(tensor), _whole(stored[name], tensor)


def _whole(value: Tensor, like: Tensor) -> Tensor:
    values = torch.as_tensor(value).detach().to("cpu", like.dtype).clone()
    return nn.Parameter(values, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else values
