"""The process group of a test: made, used, and destroyed only after all that holds it is gone."""

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed

T = TypeVar("T")


def in_process_group(work: Callable[[], T], *, rank: int = -1, size: int = -1, store: str | None = None) -> T:
    """Return what `work` returns inside a gloo group of `size` ranks (by default `torchrun` tells rank and size).

    A DistributedDataParallel that is alive when its group is destroyed aborts the process at exit, about one time in
    five ("terminate called without an active exception"): its reducer waits on threads of the group. So the objects
    of `work` are local to it, and collected before the group goes.
    """
    torch.set_num_threads(1)
    init = None if store is None else f"file://{store}"
    torch.distributed.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        found = work()
        gc.collect()
        torch.distributed.barrier()
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()
    return found
