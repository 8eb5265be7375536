"""Forwards that are set on an object in place of its class's: found when it is wrapped, removed after training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

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

    Mixed precision concerns training; the exported file computes in the dtypes of the parameters.

    Args:
        model: of any kind.
        undo_steps: gains the functions that put the autocast back.
    """
    result = []
    for path, module in model.named_modules():
        own = vars(module)
        if _FORWARD in own and _BEFORE_AUTOCAST in own:
            undo_steps.append(partial(own.update, {name: own.pop(name) for name in (_FORWARD, _BEFORE_AUTOCAST)}))
            result.append(path)
    return result


def require_copied_forwards(copied: nn.Module) -> None:
    """Refuse a copy with a forward that still calls the original.

    Raises:
        ModelError: names the module.
    """
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
