"""Work on several items of a stream at once, with the results and the errors of a plain loop."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prefetch(work: Callable[[Item], Result], items: Iterable[Item], most: int) -> Generator[Result]:
    """Yield `work(item)` of each item, in their order, computed in threads of their own.

    Items are read in the caller's thread, as late as possible. What reading or working raises comes where a loop over
    the items would raise it. Close the iterator if you leave it early: that waits for what is under way.

    Args:
        work: is called for several items at once.
        items: to work on.
        most: items that are read and whose result is not yielded yet; 1 for a plain loop in the caller's thread.

    Example:
        >>> list(prefetch(abs, [-1, 2, -3], 2))
        [1, 2, 3]
    """
    if most == 1:
        yield from map(work, items)
        return
    source = iter(items)
    failure: Exception | None = None
    running: deque[Future[Result]] = deque()
    more = True
    with ThreadPoolExecutor(most) as pool:
        while more or running:
            while more and len(running) < most:
                try:
                    running.append(pool.submit(work, next(source)))
                except StopIteration:
                    more = False
                except Exception as error:  # raised once the results before it are out
                    more, failure = False, error
            if running:
                yield running.popleft().result()
    if failure is not None:
        raise failure
