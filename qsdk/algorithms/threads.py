"""Torch's kernels on one thread, and independent work side by side, each part on a thread of its own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

#: Elements of a tensor below which a kernel is not worth being shared.
SMALL = 1 << 18

T = TypeVar("T")


@contextmanager
def one_thread_for(values: Tensor) -> Iterator[None]:
    """Run torch's kernels on one thread inside the block if a tensor on a processor is small.

    A kernel on a small tensor takes less time than to wake up other threads, which sleep between kernels where paused
    forward passes have threads of their own.
    """
    if values.device.type != "cpu" or values.numel() > SMALL:
        yield
        return
    with _threads_of(1):
        yield


def side_by_side(tasks: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """Return the results of independent tasks, in order; on a processor they run on as many threads as torch has.

    Each runs torch's kernels on one thread, also where torch has no more than one, so that the results have the same
    bits on any number of threads. If one raises, the others that have begun end first.
    """
    if device.type != "cpu":
        return [task() for task in tasks]
    threads, inference = min(torch.get_num_threads(), len(tasks)), torch.is_inference_mode_enabled()

    def run(task: Callable[[], T]) -> T:
        torch.set_num_threads(1)  # each thread has a number of its own
        with torch.inference_mode(inference), torch.no_grad():
            return task()

    with _threads_of(1):
        if threads < 2:
            return [task() for task in tasks]
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


@contextmanager
def _threads_of(count: int) -> Iterator[None]:
    """Run torch's kernels on so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
