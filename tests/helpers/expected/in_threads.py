"""Calls from several threads at once."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(runs: list[Callable[[], Any]]) -> list[Any]:
    """What functions give or raise, all at once."""
    found: list[Any] = [None] * len(runs)
    together = threading.Barrier(len(runs))

    def run(number: int) -> None:
        together.wait()
        try:
            found[number] = runs[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
