"""Forwards set on objects in place of their class's, by users and by accelerate: found on wrapping, then removed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError

_FORWARD = "forward"
_BEFORE_AUTOCAST = "_original_forward"  # accelerate's name for the forward that it put autocast around


def remove_own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Remove a forward that is set on the object itself and return it; None where the class's is called."""
    result: Callable[..., Any] | None = vars(module).pop(_FORWARD, None)
    return result


def set_own_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Set a forward on an object, in place of any that is set there; None leaves the class's."""
    vars(module).pop(_FORWARD, None)
    if forward is not None:
        vars(module)[_FORWARD] = forward


def drop_autocast(model: nn.Module, undo_steps: list[Callable[[], None]]) -> list[str]:
    """Remove the autocast that accelerate put around forwards, and return the paths of these modules.

    Mixed precision concerns training; the exported file computes in the dtypes of the parameters. `undo_steps` gains
    the functions that put the autocast back.
    """
    result = []
    for path, module in model.named_modules():
        own = vars(module)
        if _FORWARD in own and _BEFORE_AUTOCAST in own:
            undo_steps.append(partial(own.update, {name: own.pop(name) for name in (_FORWARD, _BEFORE_AUTOCAST)}))
            result.append(path)
    return result


def require_copied_forwards(copied: nn.Module) -> None:
    """Refuse a copy with a forward that still calls the original."""
    for path, module in copied.named_modules():
        forward = vars(module).get(_FORWARD)
        if forward is not None and getattr(forward, "__self__", None) is not module:
            raise ModelError(
                f"the forward of {path or 'the model'} ({type(module).__name__}) was replaced on the object by "
                f"{getattr(forward, '__qualname__', type(forward).__name__)}, and a copy of the object would call the "
                "original through it; replace it by types.MethodType(function, module), write it in a subclass, or "
                "pass in_place=True"
            )


@contextmanager
def restoring_forwards(model: nn.Module) -> Iterator[None]:
    """Restore every module's forward after the block, because trainers leave autocast around a forward."""
    before = {module: vars(module).get(_FORWARD) for module in model.modules()}
    try:
        yield
    finally:
        for module, forward in before.items():
            if vars(module).get(_FORWARD) is not forward:
                set_own_forward(module, forward)
                vars(module).pop(_BEFORE_AUTOCAST, None)


def drop_own_forwards(model: nn.Module) -> None:
    """Remove forwards set on objects, so that every module of a wrapped model calls its class's."""
    for module in model.modules():
        if remove_own_forward(module) is not None:
            vars(module).pop(_BEFORE_AUTOCAST, None)


#: what accelerate puts on objects: its hook, the forward from before, and warnings around moving the model
_HOOK, _BEFORE, _CALLED = "_hf_hook", "_old_forward", "forward"
_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "musa", "sdaa")


def is_dispatched(model: nn.Module) -> bool:
    """Return whether accelerate's hooks are on a model's modules."""
    return any(_HOOK in vars(module) for module in model.modules())


def undispatched(model: nn.Module) -> nn.Module:
    """Return a copy of a dispatched model that holds all its weights and has no hooks.

    The weights that wait on the host or on disk are read. The model stays as it is.
    """
    memo = dict(_stand_ins(model))
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        own = vars(module)
        if _HOOK in own:
            forward = own.pop(_BEFORE, None)
            own.pop(_CALLED, None)
            own.pop(_HOOK)
            # a forward that the class does not have, from before accelerate
            if forward is not None and getattr(forward, "__func__", None) is not getattr(type(module), _CALLED):
                own[_CALLED] = forward
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
        yield id(vars(module).get(_CALLED, nothing)), nothing
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
