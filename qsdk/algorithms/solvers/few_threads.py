"""Torch's kernels on one thread, where more would wait for each other longer than they work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Elements of a tensor below which a kernel is not worth being shared.
SMALL = 1 << 18


@contextmanager
def one_thread_for(values: Tensor) -> Iterator[None]:
    """Run torch's kernels on one thread inside the block if a tensor on a processor is small.

    A kernel on a small tensor takes less time than to wake up other threads, which sleep between kernels where paused
    forward passes have threads of their own.
    """
    before = torch.get_num_threads()
    if before == 1 or values.device.type != "cpu" or values.numel() > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
