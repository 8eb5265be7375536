"""A pytest plugin that notes which functions each test calls: `-p scripts.function_calls --note-calls FOLDER`.

The package's functions note their own calls: they are imported with one more statement. A tracer would be called for
every function of every library, and double the processor time of the tests.
"""

import ast
import json
import os
import sys
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")


class Calls(MetaPathFinder):
    """Finds the package's modules, and holds the numbers of their functions that were called."""

    def __init__(self) -> None:
        self.called: set[int] = set()
        self.functions: list[tuple[str, int]] = []  # by number: file, first line

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the package's modules, to be loaded with functions that note their calls."""
        spec = PathFinder.find_spec(name, path, target) if name.split(".")[0] in PACKAGES else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(self, spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads a file whose functions add their numbers to those called; their lines stay."""

    def __init__(self, calls: Calls, name: str, path: str) -> None:
        super().__init__(name, path)
        self.calls = calls

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file, whatever Python has cached of it."""
        tree = ast.parse(self.get_data(self.path))
        place = Path(self.path).relative_to(ROOT).as_posix()
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            note = ast.parse(f"__called__.add({len(self.calls.functions)})").body[0]
            for node in ast.walk(note):
                ast.copy_location(node, function.body[0])
            function.body.insert(ast.get_docstring(function) is not None, note)
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            self.calls.functions.append((place, first))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run the file with the set of numbers among its globals."""
        vars(module)["__called__"] = self.calls.called
        super().exec_module(module)


class CallNotes:
    """Writes a line for each test: its name, its seconds, and the functions that it and its fixtures call."""

    def __init__(self, calls: Calls, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.file = folder.joinpath(f"{worker}.jsonl").open("w", encoding="utf-8")
        self.calls = calls
        self.named = 0  # so many functions have their line in the file

    def numbers_of_called(self) -> list[int]:
        """Return the numbers of the package's functions called since the last time, each named in the file once."""
        called = sorted(self.calls.called)
        self.calls.called.clear()
        for number, (place, line) in list(enumerate(self.calls.functions))[self.named :]:
            self.write({"function": number, "file": place, "line": line})
            self.named += 1
        return called

    def write(self, row: dict[str, object]) -> None:
        """Append a line, at once: a killed run keeps what it has."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what a test calls, its own fixtures' end included; what imports call is no test's."""
        self.calls.called.clear()
        start = sum(os.times()[:4])  # of the processor, ended children included: loaded machines are slow
        try:
            return (yield)
        finally:
            seconds = round(sum(os.times()[:4]) - start, 3)
            self.write({"test": item.nodeid, "seconds": seconds, "part": "call", "calls": self.numbers_of_called()})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what fixtures call apart: those of a whole file run for its first test alone."""
        try:
            return (yield)
        finally:
            self.write({"test": item.nodeid, "seconds": 0.0, "part": "setup", "calls": self.numbers_of_called()})


CALLS = Calls()  # before the tests' helpers, which import some of the package, are loaded
sys.meta_path.insert(0, CALLS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-calls", type=Path, help="folder for the functions that each test calls")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--note-calls")
    if folder is not None and (os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(CallNotes(CALLS, folder.absolute()))
