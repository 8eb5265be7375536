"""Plant single faults in the package, run the tests that call the faulty function, and print which faults none sees.

    make faults                                # notes the calls of all default tests, then plants 300 faults
    python scripts/plant_faults.py --calls build/calls --faults 300 --seed 0 --jobs 2

The faults: another comparison, operator, constant, branch, reduction, or a term, a statement left out (mutation
analysis after DeMillo, Lipton, Sayward 1978, "Hints on test data selection"). A fault is killed if a test fails, or
takes much longer than it did. Prints one JSON line of the counts; `--out` has a line for each fault.
"""

import argparse
import ast
import importlib
import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")
SECONDS = 60.0  # of the selected tests together, as they took when their calls were noted
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "+",
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "floor": "ceil",
    "ceil": "floor", "minimum": "maximum", "maximum": "minimum", "argmin": "argmax", "argmax": "argmin",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A change of a file's text from `start` to `end` (bytes), in the function whose first line is `function`."""

    file: str
    line: int
    function: int
    name: str
    start: int
    end: int
    new: str
    old: str


class Test(NamedTuple):
    """A default test: its name, its seconds, and how many functions it calls."""

    name: str
    seconds: float
    calls: int


def faults_of(file: str) -> Iterator[Fault]:
    """Yield every fault that can be planted in the functions of a file."""
    source = ROOT.joinpath(file).read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def text(node: ast.expr | ast.stmt) -> tuple[int, int, str]:
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return start, end, source[start:end].decode()

    def visit(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[Fault]:
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from visit(statement, node)
            return
        if isinstance(node, ast.AnnAssign):
            yield from visit(node.value, function) if node.value is not None else ()
            return
        if isinstance(node, ast.Raise | ast.Assert) or (isinstance(node, ast.Expr) and is_text(node.value)):
            return
        if function is not None and isinstance(node, ast.expr | ast.stmt):
            start, end, old = text(node)
            first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
            for new in changes(node, lambda part: text(part)[2]):
                yield Fault(file, node.lineno, first, function.name, start, end, new, old)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(source), None)


def changes(node: ast.expr | ast.stmt, text: Callable[[ast.expr], str]) -> Iterator[str]:
    """Yield the texts that a fault can put in the place of a node."""
    match node:
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield f"({text(node.left)} {COMPARISONS[type(op)]} {text(right)})"
        case ast.BinOp(op=op) if type(op) in OPERATORS and not is_text(node.left) and not is_text(node.right):
            yield f"({text(node.left)} {OPERATORS[type(op)]} {text(node.right)})"
            yield f"({text(node.left)})"
        case ast.BoolOp(op=op, values=values):
            yield f"({(' or ' if isinstance(op, ast.And) else ' and ').join(text(value) for value in values)})"
            yield f"({text(values[0])})"
            yield f"({text(values[-1])})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield f"({text(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Constant(value=float(value)):
            yield repr(2 * value if value else 1.0)
        case ast.IfExp():
            yield f"({text(node.body)})"
            yield f"({text(node.orelse)})"
        case ast.Name(id=name) if name in NAMES:
            yield NAMES[name]
        case ast.Attribute(attr=name) if name in NAMES:
            yield f"{text(node.value)}.{NAMES[name]}"
        case ast.Expr(value=ast.Call()) | ast.Continue() | ast.AugAssign():
            yield "pass"


def is_text(node: ast.expr) -> bool:
    """Return True for literal strings and lists, whose sums are no arithmetic."""
    literal = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return literal or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def tests_by_function(folder: Path) -> dict[tuple[str, int], list[Test]]:
    """Return the tests that call each function (file, first line): those that call the fewest others first."""
    calls: dict[str, set[tuple[str, int]]] = defaultdict(set)
    set_up: dict[str, set[tuple[str, int]]] = defaultdict(set)  # of a file: what its fixtures call
    seconds: dict[str, float] = {}
    for path in sorted(folder.glob("*.jsonl")):
        functions: dict[int, tuple[str, int]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "function" in row:
                functions[row["function"]] = (row["file"], row["line"])
                continue
            called = {functions[number] for number in row["calls"]}
            seconds[row["test"]] = max(seconds.get(row["test"], 0.0), row["seconds"])
            if row["part"] == "setup":
                set_up[row["test"].split("::")[0]] |= called
            else:
                calls[row["test"]] |= called
    found: dict[tuple[str, int], list[Test]] = defaultdict(list)
    for name, called in calls.items():
        for function in called | set_up[name.split("::")[0]]:
            found[function].append(Test(name, seconds[name], len(called)))
    return {function: sorted(tests, key=lambda test: test.calls) for function, tests in found.items()}


def selected(tests: list[Test], limit: float) -> list[Test]:
    """Return as many of the tests as take no longer than `limit` seconds together, at least one."""
    result: list[Test] = []
    for test in tests:
        if not result or sum(t.seconds for t in result) + test.seconds <= limit:
            result.append(test)
        if len(result) == 400:
            break
    return result


def run_tests(tree: Path, names: list[str], seconds: float) -> str | None:
    """Run tests in a process of its own and return the first that fails, "time limit", or None."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(tree, names, writer))
    process.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(60 + 5 * seconds) else "time limit"
    except EOFError:
        return "the process ended"
    finally:
        process.kill()
        process.join()


class _Failures:
    """A pytest plugin that keeps the name of the first failed test."""

    def __init__(self) -> None:
        self.first: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a failed test."""
        if report.failed and self.first is None:
            self.first = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the name of a file that cannot be collected."""
        if report.failed and self.first is None:
            self.first = f"collecting {report.nodeid}"


def _run(tree: Path, names: list[str], writer: Connection) -> None:
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    failures = _Failures()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        code = pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *names], plugins=[failures])
    writer.send(failures.first or (None if code == 0 else f"pytest ends with {code}"))


def judge(fault: Fault, tests: list[Test], tree: Path) -> dict[str, object]:
    """Plant a fault in a copy of the project, run tests, take it back, and return its row."""
    path = tree / fault.file
    original = path.read_bytes()
    path.write_bytes(original[: fault.start] + fault.new.encode() + original[fault.end :])
    start = time.monotonic()
    try:
        killer = run_tests(tree, [t.name for t in tests], sum(t.seconds for t in tests)) if tests else None
    finally:
        path.write_bytes(original)
    return {**asdict(fault), "tests": len(tests), "killer": killer, "seconds": round(time.monotonic() - start, 1)}


def work(numbered: list[tuple[int, Fault, list[Test]]], out: Path) -> None:
    """Judge faults one after the other in a copy of the tree, a line of `out` for each."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "qsdk"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        sound: set[str] = set()
        for number, fault, tests in numbered:
            if tests and tests[0].name not in sound and run_tests(tree, [tests[0].name], tests[0].seconds) is not None:
                raise SystemExit(f"{tests[0].name} fails without a fault; note the calls of the tests again")
            sound.update(test.name for test in tests[:1])
            row = {"number": number, **judge(fault, tests, tree)}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=Path, default=ROOT / "build" / "calls")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--under", default="", help="plant in files below this folder alone")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults.jsonl")
    options = parser.parse_args()
    files = sorted(p.relative_to(ROOT).as_posix() for name in PACKAGES for p in (ROOT / name).rglob("*.py"))
    all_faults = [fault for file in files if file.startswith(options.under) for fault in faults_of(file)]
    planted = random.Random(options.seed).sample(all_faults, min(options.faults, len(all_faults)))
    tests = tests_by_function(options.calls)
    callers = [selected(tests.get((fault.file, fault.function), []), options.seconds) for fault in planted]
    jobs = list(zip(range(len(planted)), planted, callers, strict=True))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    for name in ("onnx", "onnxruntime", "onnxscript"):
        importlib.import_module(name)  # once, before the forks
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CI"] = "1"  # hypothesis draws the same examples every time
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(jobs[k :: options.jobs], options.out)) for k in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    for row in sorted(rows, key=lambda row: row["number"]):
        if row["killer"] is None:
            change = f"`{row['old']}` -> `{row['new']}`"
            print(f"{row['file']}:{row['line']} {row['name']}: {change} ({row['tests']} tests)", file=sys.stderr)
    uncalled = sum(row["tests"] == 0 for row in rows)
    killed = sum(row["killer"] is not None for row in rows)
    counts = {"faults": len(rows), "killed": killed, "called_by_no_test": uncalled, "candidates": len(all_faults)}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
