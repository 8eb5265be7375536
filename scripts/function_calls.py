"""A pytest plugin that notes which functions each test calls: `-p scripts.function_calls --note-calls FOLDER`."""

import json
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("qsdk", "torch_bridge", "onnx_backend"))


class CallNotes:
    """Writes a line for each test: its name, its seconds, and the functions that it and its fixtures call."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.file = folder.joinpath(f"{worker}.jsonl").open("w", encoding="utf-8")
        self.called: set[CodeType] = set()
        self.numbers: dict[CodeType, int] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        """Note the call of a Python function; its lines are not followed."""
        self.called.add(frame.f_code)

    def numbers_of_called(self) -> list[int]:
        """Return the numbers of the package's functions called since the last time, each named in the file once."""
        result = []
        called, self.called = self.called, set()
        for code in list(called):  # threads that a test has left behind still call
            if not code.co_filename.startswith(PACKAGES):
                continue
            if code not in self.numbers:
                self.numbers[code] = len(self.numbers)
                place = Path(code.co_filename).relative_to(ROOT).as_posix()
                self.write({"function": self.numbers[code], "file": place, "line": code.co_firstlineno})
            result.append(self.numbers[code])
        return sorted(result)

    def write(self, row: dict[str, object]) -> None:
        """Append a line, at once: a killed run keeps what it has."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what a test calls, its own fixtures' end included."""
        start = sum(os.times()[:4])  # of the processor, ended children included: loaded machines are slow
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = round(sum(os.times()[:4]) - start, 3)
            self.write({"test": item.nodeid, "seconds": seconds, "part": "call", "calls": self.numbers_of_called()})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what fixtures call apart: those of a whole file run for its first test alone."""
        try:
            return (yield)
        finally:
            self.write({"test": item.nodeid, "seconds": 0.0, "part": "setup", "calls": self.numbers_of_called()})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-calls", type=Path, help="folder for the functions that each test calls")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--note-calls")
    if folder is not None and (os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(CallNotes(folder.absolute()))
