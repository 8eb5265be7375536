"""Frozen values in training: no optimizer changes them, whatever it does besides following gradients."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsdk.core.errors import ConfigError
from torch_bridge.torch_values.gate_order import is_recurrent
from torch_bridge.torch_values.parameters import find_stored


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
