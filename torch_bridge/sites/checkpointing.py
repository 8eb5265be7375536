"""Activation checkpointing: errors for sites that a recomputation in the backward pass could not name.

A recomputation runs the checkpointed function again, without its caller. A module of the sim then finds its sites,
because its own forward enters the function mode. Ops of any other function do not, since nothing calls the module they
belong to.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from qsdk.core.errors import ModelError

_REENTRANT = CheckpointFunction.forward.__code__


def is_recording_gradients() -> bool:
    """Return whether gradients are recorded call by call; torch.compile sees recomputation as part of its graph."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def saved_tensors_hook() -> Any:
    """Return the hook that now saves tensors for the backward pass; each checkpoint has its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_recomputing() -> bool:
    """Return whether a backward pass is running, which calls checkpointed modules again."""
    return torch._C._current_graph_task_id() != -1


def refuse_unreachable_site(path: str, hook: Any, site: str) -> None:
    """Refuse a site in a checkpoint that began after the call of its module and calls no module of the sim.

    Args:
        path: of the module.
        hook: the saved-tensors hook when the module was called, with gradients recorded.
        site: the site that was reached.

    Raises:
        ModelError: the recomputation would not find the site.
    """
    if torch.is_grad_enabled():
        now = saved_tensors_hook()
        inside = now is not hook and getattr(now, "__qualname__", "").startswith("_checkpoint_hook.")
    else:
        inside = _is_called_by(_REENTRANT, sys._getframe(1))  # or the model's own no_grad
    if inside:
        raise ModelError(
            f"the site {site} is in an activation checkpoint of a function that is no module, and its recomputation "
            f"would not find it; make the function an nn.Module that {path or 'the model'} owns, and checkpoint that"
        )


def _is_called_by(code: Any, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def refuse_reused(path: str) -> None:
    """Refuse a module that is called several times, when the backward pass calls it again.

    Raises:
        ModelError: its recomputation cannot know which of the calls it repeats.
    """
    if torch._C._current_graph_task_id() != -1:
        raise ModelError(
            f"{path} is called several times in one forward pass, so its recomputation cannot tell its sites apart; "
            "checkpoint the module that calls it instead"
        )
