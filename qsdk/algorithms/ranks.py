"""Communication between the processes that `torchrun` started: sums and objects over all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from qsdk.core.errors import DataError, QsdkError

T = TypeVar("T")


def world_size() -> int:
    """Return the number of ranks; 1 where `torch.distributed` is not initialised."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def rank() -> int:
    """Return the rank of this process; 0 where there is only one."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def all_reduce_sum(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor, in place, by its sum over the ranks; all ranks give tensors of the same shapes and order."""
    for tensor in tensors:
        reduce_sum(tensor, range(world_size()))


def reduce_sum(tensor: Tensor, owners: Sequence[int]) -> None:
    """Replace a tensor, in place, by its sum over the ranks; on ranks that are no owners it is of no use afterwards."""
    if world_size() == 1:
        return
    whole = tensor.contiguous()
    if len(owners) == 1:
        torch.distributed.reduce(whole, owners[0])
    else:
        torch.distributed.all_reduce(whole)
    if whole is not tensor:
        tensor.copy_(whole)


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks; any picklable object."""
    if world_size() == 1:
        return [value]
    result: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(result, value)
    return result


def gather_to(owners: Sequence[int], value: T) -> list[T] | None:
    """Return the values of all ranks, in their order, to some of them; None to the others."""
    if world_size() == 1:
        return [value]
    if len(owners) > 1:
        found = all_gather(value)
        return found if rank() in owners else None
    result: list[Any] | None = [None] * world_size() if rank() == owners[0] else None
    torch.distributed.gather_object(value, result, owners[0])
    return result


def broadcast(value: T, owner: int) -> T:
    """Return the value of one rank; any picklable object."""
    if world_size() == 1:
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, owner)
    return held[0]


def require_same_layers(sites: Sequence[str], failure: Exception | None = None) -> None:
    """Compare the positions of all ranks, so that none waits for sums that another never adds to; see `at_layers`."""
    at_layers(sites, None, failure)


def at_layers(sites: Sequence[str], value: T, failure: Exception | None = None) -> list[T]:
    """Return the values of all ranks, in their order, if all are at the same layers; no sites: this rank is through.

    A rank that cannot go on gives its failure, which all ranks raise.
    """
    found = all_gather((list(sites), value, None if failure is None else failure_of(failure)))
    for at, (_, _, failed) in enumerate(found):
        raise_failure(at, failed)
    for at, (other, _, _) in enumerate(found):
        if other != list(sites):
            raise DataError(
                f"rank {at} is at {', '.join(other) or 'the end'} where another is at "
                f"{', '.join(sites) or 'the end'}; give every rank data that reaches the same layers"
            )
    return [value for _, value, _ in found]


Failure = tuple[type[QsdkError], str]


def failure_of(error: Exception) -> Failure:
    """Return an error as other ranks can be told of it."""
    if isinstance(error, QsdkError):
        return type(error), str(error)
    return QsdkError, f"{type(error).__name__}: {error}"


def raise_failure(at: int, failure: Failure | None) -> None:
    """Raise the error of a rank, which it names where there are several."""
    if failure is not None:
        kind, reason = failure
        raise kind(reason if world_size() == 1 else f"rank {at}: {reason}")


@contextmanager
def telling_others() -> Iterator[None]:
    """Tell the other ranks of an error inside the block, which they learn when they next compare positions."""
    try:
        yield
    except Exception as error:  # of any type: the other ranks wait for this one
        if world_size() > 1:
            at_layers([], None, error)  # raises it
        raise
