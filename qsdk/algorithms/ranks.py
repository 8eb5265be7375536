"""Communication between the processes that `torchrun` started: sums and objects over all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from qsdk.core.errors import DataError


def world_size() -> int:
    """Return the number of ranks; 1 where `torch.distributed` is not initialised."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def rank() -> int:
    """Return the rank of this process; 0 where there is only one."""
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


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks; any picklable object."""
    if world_size() == 1:
        return [value]
    result: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(result, value)
    return result


def require_same_layers(sites: Sequence[str], failure: str | None = None) -> None:
    """Compare the positions of all ranks, so that none waits for sums that another never adds to.

    Args:
        sites: of the layers that this rank is at; empty when it is through.
        failure: why this rank cannot go on; None if it can.

    Raises:
        DataError: a rank failed, or they are at different layers.
    """
    for rank, (other, reason) in enumerate(all_gather((list(sites), failure))):
        if reason is not None:
            raise DataError(reason if world_size() == 1 else f"rank {rank}: {reason}")
        if other != list(sites):
            raise DataError(
                f"rank {rank} is at {', '.join(other) or 'the end'} where another is at "
                f"{', '.join(sites) or 'the end'}; give every rank data that reaches the same layers"
            )
