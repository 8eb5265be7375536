"""Activation checkpointing: refusing what a recomputation in the backward pass could not tell apart.

A recomputation calls again what was checkpointed, alone: a module of the sim finds its sites by itself, the ops of any
other function do not, since nobody calls the module that they belong to.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from qsdk.core.errors import ModelError

_REENTRANT = CheckpointFunction.forward.__code__


def records_gradients() -> bool:
    """Whether gradients are recorded call by call: a compiler sees recomputation as part of its graph."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def saving_hook() -> Any:
    """What now decides how tensors are saved for the backward pass; each checkpoint has one of its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_recomputed() -> bool:
    """Return whether a backward pass calls again what was checkpointed."""
    return torch._C._current_graph_task_id() != -1


def refuse_lost_sites(path: str, hook: Any, site: str) -> None:
    """Refuse a site of a module in a checkpoint that began after the module's call and calls no module there.

    Args:
        path: of the module.
        hook: what decided when it was called, with gradients recorded.
        site: that was reached.

    Raises:
        ModelError: says what to checkpoint instead.
    """
    if torch.is_grad_enabled():
        now = saving_hook()
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
    """Refuse a module that is called again in the backward pass, where nothing says which of its calls is repeated.

    Raises:
        ModelError: says what to checkpoint instead.
    """
    if torch._C._current_graph_task_id() != -1:
        raise ModelError(
            f"{path} is called several times in one forward pass, so its recomputation cannot tell its sites apart; "
            "checkpoint the module that calls it instead"
        )
