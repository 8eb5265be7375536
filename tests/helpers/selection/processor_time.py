"""What the tests of each folder cost, in seconds of the processor: `pytest -n0 --processor-time`.

Wall time on a busy machine says little. The time of the processes that tests start counts too; importing and
collecting have their own line. A fixture counts for the test that needs it first.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest


def seconds() -> float:
    """Seconds of the processor so far, of this process and of the finished ones that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTime:
    """Adds up by folder, and prints the table at the end of the session."""

    def __init__(self) -> None:
        self.cost: Counter[str] = Counter()
        self.number: Counter[str] = Counter()
        self.collected = 0.0

    def pytest_collection_finish(self) -> None:
        self.collected = seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = seconds()
        result = yield
        folder = str(PurePosixPath(item.nodeid.split("::")[0]).parent)
        self.cost[folder] += seconds() - begin
        self.number[folder] += 1
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of the processor")
        terminalreporter.write_line(f"{self.collected:8.1f}          importing and collecting")
        for folder, cost in self.cost.most_common():
            terminalreporter.write_line(f"{cost:8.1f} {self.number[folder]:6} tests {folder}")
        total = self.collected + sum(self.cost.values())
        terminalreporter.write_line(f"{total:8.1f} {sum(self.number.values()):6} tests in all")
