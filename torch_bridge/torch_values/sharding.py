"""Training on several ranks: sharded parameters (FSDP2), hooks that are not part of the model, and DDP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsdk.core.errors import ModelError


def full_tensor_of(parameter: Tensor) -> Tensor:
    """Return a parameter as an ordinary tensor, gathered from the ranks where it is sharded.

    A tied site or a bias reads the scale of another module, which FSDP may have sharded again by then. The gradient is
    the mean over the ranks, as for everything that FSDP shards.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    result: Tensor = _GatherShards.apply(parameter)  # type: ignore[no-untyped-call]
    return result


def write_full_tensor(parameter: Tensor, value: Tensor) -> None:
    """Copy an ordinary tensor into a parameter, of which each rank may hold a part."""
    sharded: Any = parameter
    if hasattr(sharded, "full_tensor"):
        everywhere = type(sharded).from_local(value, sharded.device_mesh, run_check=False)
        value = everywhere.redistribute(placements=sharded.placements)
    parameter.copy_(value)


def reshard_parameters(model: nn.Module) -> None:
    """Shard parameters that FSDP has gathered again, so that modules hold the sharded ones."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None and hasattr(module, "unshard"):
            reshard()


def require_not_sharded(model: nn.Module, what: str) -> None:
    """Refuse a model of which each rank holds a part."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise ModelError(
                f"{what} needs whole weights, and FSDP has sharded {name} over ranks; inside the training block call "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), and load what it returns "
                "into sim.model of a sim of the model before fully_shard"
            )


def zero_if_sharded(parameter: Tensor) -> None:
    """Set a learned parameter that is being removed to 0 if it is sharded: FSDP restores it when it gathers next."""
    if hasattr(parameter, "full_tensor"):
        with torch.no_grad():
            parameter.zero_()


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: Any) -> Tensor:
        ctx.kind, ctx.mesh, ctx.placements = type(sharded), sharded.device_mesh, sharded.placements
        result: Tensor = sharded.full_tensor()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0] / ctx.mesh.size()
        for group in ctx.mesh.get_all_groups():
            torch.distributed.all_reduce(total, group=group)
        result: Tensor = ctx.kind.from_local(total, ctx.mesh, run_check=False).redistribute(placements=ctx.placements)
        return result


def is_fsdp_hook(hook: Callable[..., Any]) -> bool:
    """Return whether a hook of a module is FSDP's, which gathers parameters and computes nothing of the model."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")


def require_synchronized(model: nn.Module, accepted: int | None) -> int | None:
    """Refuse the DistributedDataParallel that is calling a model if it does not know all trained parameters.

    `accepted` is the id of one that was found to know them; return the id of the one that is accepted now.
    """
    active = DistributedDataParallel._active_ddp_module
    if active is None or id(active) == accepted:
        return accepted
    named = active.module.named_parameters()
    known = {id(parameter) for parameter in active._module_parameters}
    known |= {id(parameter) for name, parameter in named if name in active.parameters_to_ignore}
    lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if lost:
        raise ModelError(
            f"DistributedDataParallel was made before sim.training and does not know {lost[0]} (and {len(lost) - 1} "
            "others), which would differ from rank to rank; make it inside the block"
        )
    return id(active)
