"""Plant single faults in the package, run the tests that call the faulty function, and print which faults none sees.

    make faults                                # notes the calls of all default tests, then plants 300 faults
    python scripts/plant_faults.py --calls build/calls --faults 300 --seed 0 --jobs 2

The faults: another comparison, operator, constant, branch, reduction, or a term, a statement left out (mutation
analysis after DeMillo, Lipton, Sayward 1978, "Hints on test data selection"). A fault is killed if a test fails, or
takes much more of the processor's time than it did. Prints one JSON line of the counts; `--out` has a line for each
fault. A run that was stopped goes on where it was: what is in `--out` is not planted again, but for faults whose file
has changed since (the test that killed them goes first) and survivors that more tests can judge now (`--seconds`, more
notes of calls).

The faults are drawn from the sources of one commit (`--drawn-at`) and found again in today's: the count says what
became of them as tests and code changed. Tests are written for those that survive, so the share that is killed of
another draw is lower; `--drawn-at HEAD --seed 1` says how much.

Left out is what only judges the program itself (assertions, `zip(strict=)`), the text of errors and warnings'
`stacklevel=`. A fault in a function that no test calls, such as one that makes a table when its module is imported, is
judged in a new process by the tests that call the others of its file.

The tests are collected once. A process forked for each fault gives the live functions of its file the faulty code, and
runs tests until one fails; the file is changed as well, for the processes that tests start.
"""

import argparse
import ast
import gc
import io
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")
MEMORY = 8 * 2**30  # bytes that the tests of one fault may take
DRAWN_AT = "4fef0dae"  # a draw that stays the same lets counts of different days be compared
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

    def planted(self, source: bytes) -> bytes:
        """Return a file's text with the fault, every other line where it was."""
        lines = "\n" * (self.old.count("\n") - self.new.count("\n"))
        new = f"{self.new[:-1]}{lines})" if self.new.endswith(")") else self.new + lines
        return source[: self.start] + new.encode() + source[self.end :]


class Test(NamedTuple):
    """A default test: its name, its seconds, and how many functions it calls."""

    name: str
    seconds: float
    calls: int


def faults_of(file: str, source: bytes, *, also_unfair: bool = False) -> Iterator[Fault]:
    """Yield every fault that can be planted in the functions of a file; `also_unfair` those that no test need see."""
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
        if not also_unfair and isinstance(node, ast.keyword) and node.arg == "stacklevel":
            return
        if not also_unfair and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            for argument in node.args:
                yield from visit(argument, function)
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


def sources_at(commit: str) -> dict[str, bytes]:
    """Return the packages' files as they were at a commit; SystemExit if this clone has no such commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, *PACKAGES]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr.decode().strip()}: name a commit that this clone has with --drawn-at")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        members = [(member.name, archive.extractfile(member)) for member in archive if member.name.endswith(".py")]
        return {name: content.read() for name, content in sorted(members) if content is not None}


def by_text(sources: dict[str, bytes], *, also_unfair: bool = False) -> dict[tuple[object, ...], Fault]:
    """Return the faults of some files by what does not change when the lines around them do."""
    result: dict[tuple[object, ...], Fault] = {}
    for file, source in sources.items():
        lines = source.decode().splitlines()
        for fault in faults_of(file, source, also_unfair=also_unfair):
            key = (file, fault.name, lines[fault.line - 1].strip(), fault.old, fault.new)
            nth = 0
            while (*key, nth) in result:
                nth += 1
            result[*key, nth] = fault
    return result


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
    """Return the tests that call each function (file, first line), those that call the fewest others first.

    Of a test with many parametrizations the first comes before the second of any other.
    """
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
    return {function: _spread(tests) for function, tests in found.items()}


def _spread(tests: list[Test]) -> list[Test]:
    parametrizations: dict[str, int] = defaultdict(int)
    ranked = []
    for test in sorted(tests, key=lambda test: test.calls):
        function = test.name.split("[")[0]
        ranked.append((parametrizations[function], test.calls, test))
        parametrizations[function] += 1
    return [test for _, _, test in sorted(ranked, key=lambda row: row[:2])]


def selected(tests: list[Test], limit: float, first: str | None = None) -> list[Test]:
    """Return as many of the tests as take no longer than `limit` seconds together, at least one; `first` leads."""
    result: list[Test] = []
    spent = 0.0
    for test in sorted(tests, key=lambda test: test.name != first):
        if not result or spent + test.seconds <= limit:
            result.append(test)
            spent += test.seconds
        if len(result) == 400:
            break
    return result


def live_functions() -> dict[str, list[FunctionType]]:
    """Return the functions of all loaded modules by file."""
    gc.unfreeze()  # what is frozen is not listed
    result: dict[str, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType:  # isinstance asks objects that warn
            result[thing.__code__.co_filename].append(thing)
    gc.freeze()
    return result


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects that a module's code holds, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_of(constant)


def changed_codes(before: bytes, after: bytes, file: str) -> dict[tuple[str, int], CodeType]:
    """Return the functions that differ in two texts of a file, by qualified name and first line."""
    old, new = (list(codes_of(compile(text, file, "exec"))) for text in (before, after))
    known = set(old)
    return {(code.co_qualname, code.co_firstlineno): code for code in new if code not in known}


class Job(NamedTuple):
    """A fault of a draw, the tests that judge it, and whether they do so in a process that imports the faulty file."""

    number: int
    fault: Fault
    tests: list[Test]
    afresh: bool


class Planting:
    """A pytest plugin that plants faults where pytest would run the collected tests."""

    def __init__(self, numbered: list[Job], out: Path) -> None:
        self.numbered, self.out = numbered, out
        self.sound: dict[str, bool] = {}  # tests that have failed once: whether they pass without a fault
        self.failed: str | None = None  # in a forked process: the first failed test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of the first failed test."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge the faults one after the other, a line of `out` for each."""
        items = {item.nodeid: item for item in session.items}
        functions = live_functions()
        for number, fault, tests, afresh in self.numbered:
            path = Path(fault.file)
            sound = path.read_bytes()
            faulty = fault.planted(sound)
            codes = changed_codes(sound, faulty, str(path.absolute()))
            start = time.monotonic()
            while True:
                chosen = [test for test in tests if test.name in items and self.sound.get(test.name, True)]
                seconds = sum(test.seconds for test in chosen)
                path.write_bytes(faulty)
                try:
                    if afresh:
                        killer = in_new_process([test.name for test in chosen], seconds)
                    else:
                        live = functions[str(path.absolute())]
                        killer = self.forked([items[test.name] for test in chosen], seconds, live, codes)
                finally:
                    path.write_bytes(sound)
                if killer not in items or self.is_sound(killer, items[killer]):
                    break
            took = round(time.monotonic() - start, 1)
            row = {"number": number, **asdict(fault), "tests": len(tests), "killer": killer, "seconds": took}
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return True

    def is_sound(self, name: str, item: pytest.Item) -> bool:
        """Return whether a test passes without a fault."""
        if name not in self.sound:
            self.sound[name] = self.forked([item], 60.0, [], {}) is None
        return self.sound[name]

    def forked(
        self,
        items: list[pytest.Item],
        seconds: float,
        functions: list[FunctionType],
        codes: dict[tuple[str, int], CodeType],
    ) -> str | None:
        """Run tests in a process of its own and return the first that fails, why the process ended, or None."""
        reader, writer = multiprocessing.Pipe(duplex=False)

        def run() -> None:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            for function in functions:
                code = function.__code__
                function.__code__ = codes.get((code.co_qualname, code.co_firstlineno), code)
            for item, following in zip_longest(items, items[1:]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failed is not None:
                    break
            writer.send(self.failed)

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        writer.close()
        try:
            return "time limit" if overruns(process.pid or 0, 20 + 3 * seconds, reader.poll) else reader.recv()
        except EOFError:
            return "the process ended"
        finally:
            process.kill()
            process.join()


def in_new_process(names: list[str], seconds: float) -> str | None:
    """Run tests in a new interpreter and return the first that fails, why there was none, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *names]
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.DEVNULL, start_new_session=True)

        def ended(wait: float) -> bool:
            time.sleep(wait if process.poll() is None else 0)
            return process.poll() is not None

        try:
            if overruns(process.pid, 60 + 3 * seconds, ended):  # the first minute: what it imports
                return "time limit"
        finally:
            process.kill()
            process.wait()
        printed.seek(0)
        failed = [line.split(" - ")[0].split()[-1] for line in printed if line.startswith(("FAILED", "ERROR"))]
    return None if not process.returncode or not names else (*failed, "the process ended")[0]


def overruns(session: int, limit: float, ended: Callable[[float], bool]) -> bool:
    """Wait for the processes of a session; True if they take more seconds of the processor, or none for two minutes.

    A loaded machine is slow, not wrong.
    """
    used, since = 0.0, time.monotonic()
    while not ended(1.0):
        now = seconds_of(session)
        if now > used:
            used, since = now, time.monotonic()
        if now > limit or time.monotonic() - since > 120:
            return True
    return False


def seconds_of(session: int) -> float:
    """Return what the living processes of a session, and their ended children, took of the processor."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15]) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def work(numbered: list[Job], commit: str, out: Path) -> None:
    """Judge faults one after the other in a copy of the tree at a commit, a line of `out` for each."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "qsdk"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        subprocess.run(["git", "-C", str(tree), "checkout", "-q", commit], check=True)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        arguments = ["-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
            code = pytest.main(arguments, plugins=[Planting(numbered, out)])
        if code:
            print(printed.getvalue()[-4000:], file=sys.stderr)


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Return what has been judged so far."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def judged(rows: list[dict[str, Any]], planted: dict[int, Fault]) -> dict[int, dict[str, Any]]:
    """Return the last row of each fault of these very sources."""
    return {row["number"]: row for row in rows if as_in(row, planted.get(row["number"]))}


def as_in(row: dict[str, Any], fault: Fault | None) -> bool:
    """Return whether a row is of this fault in this text of its file."""
    return fault is not None and asdict(fault).items() <= row.items()


def drawn(count: int, seed: int, under: str, drawn_at: str, now: dict[tuple[object, ...], Fault]) -> dict[int, Fault]:
    """Draw faults of the sources at a commit and return, by their numbers in the draw, those that are still possible.

    A fault that is unfair, or whose line is gone or another today, gives its place to the next of the draw.
    """
    sources = {file: text for file, text in sources_at(drawn_at).items() if file.startswith(under)}
    then = list(by_text(sources, also_unfair=True))  # so that the draw stays when more is found unfair
    keys = random.Random(seed).sample(then, min(2 * count, len(then)))
    still = [(number, now[key]) for number, key in enumerate(keys) if key in now]
    return dict(still[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=Path, default=ROOT / "build" / "calls")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn-at", default=DRAWN_AT, help="the commit whose faults are drawn; HEAD for a fresh draw")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--under", default="", help="plant in files below this folder alone")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults.jsonl")
    options = parser.parse_args()
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True).strip()
    now = by_text(sources_at(commit))
    planted = drawn(options.faults, options.seed, options.under, options.drawn_at, now)
    tests = tests_by_function(options.calls)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.touch()
    rows = rows_of(options.out)
    killers = {row["number"]: row["killer"] for row in rows}
    of_file: dict[str, list[Test]] = defaultdict(list)
    for (file, _), some in tests.items():
        of_file[file] += some[:20]
    callers = {
        number: selected(
            tests.get((fault.file, fault.function))
            or sorted(set(of_file[fault.file]), key=lambda test: test.calls)[:20],
            options.seconds,
            killers.get(number),
        )
        for number, fault in planted.items()
    }
    earlier = judged(rows, planted)
    jobs = [
        Job(number, fault, callers[number], (fault.file, fault.function) not in tests)
        for number, fault in planted.items()
        if number not in earlier
        or (earlier[number]["killer"] is None and earlier[number]["tests"] < len(callers[number]))
    ]
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CI"] = "1"  # hypothesis draws the same examples every time
    fork = multiprocessing.get_context("fork")
    shares = [jobs[k :: options.jobs] for k in range(options.jobs)]
    workers = [fork.Process(target=work, args=(share, commit, options.out)) for share in shares if share]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    result = judged(rows_of(options.out), planted)
    for _, row in sorted(result.items()):
        if row["killer"] is None:
            change = f"`{row['old']}` -> `{row['new']}`"
            print(f"{row['file']}:{row['line']} {row['name']}: {change} ({row['tests']} tests)", file=sys.stderr)
    uncalled = sum((fault.file, fault.function) not in tests for fault in planted.values())
    killed = sum(row["killer"] is not None for row in result.values())
    counts = {"faults": len(result), "killed": killed, "called_by_no_test": uncalled, "candidates": len(now)}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
