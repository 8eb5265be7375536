"""What several processes know together, where `torchrun` started them: sums over the ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from qsdk.core.errors import DataError


def world_size() -> int:
    """Return how many ranks there are; 1 where `torch.distributed` is not initialised."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def rank() -> int:
    """Return which of the ranks this process is; 0 where there is one."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def all_reduce_sum(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor, in place, by its sum over the ranks; all ranks give tensors of the same shapes and order."""
    if world_size() == 1:
        return
    for tensor in tensors:
        whole = tensor.contiguous()
        torch.distributed.all_reduce(whole)
        if whole is not tensor:
            tensor.copy_(whole)


def all_reduce_max(tensor: Tensor) -> None:
    """Replace a contiguous tensor, in place, by its largest values over the ranks."""
    if world_size() > 1:
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)


def gathered(value: Any) -> list[Any]:
    """What each rank gives, in the order of the ranks; any picklable object."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def require_same_layers(sites: Sequence[str], failure: str | None = None) -> None:
    """Hold against each other where the ranks are, so that none waits for sums that another will never add to.

    Args:
        sites: of the layers that this rank is at; empty when it is through.
        failure: why this rank cannot go on; None if it can.

    Raises:
        DataError: a rank failed, or they are at different layers.
    """
    for rank, (other, reason) in enumerate(gathered((list(sites), failure))):
        if reason is not None:
            raise DataError(reason if world_size() == 1 else f"rank {rank}: {reason}")
        if other != list(sites):
            raise DataError(
                f"rank {rank} is at {', '.join(other) or 'the end'} where another is at "
                f"{', '.join(sites) or 'the end'}; give every rank data that reaches the same layers"
            )
