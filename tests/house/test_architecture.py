"""The house rules that no linter knows, held by reading the source."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsdk.core.graph import op_facts

ROOT = Path(__file__).parents[2]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")
OP_FACTS = "qsdk/core/graph/op_facts.py"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_FOLDER = 20
# The face resolves its verbs on first use, so that `import qsdk` stays light.
MAY_IMPORT_LATE = {"qsdk/__init__.py", "qsdk/cli.py"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def is_user(name: str) -> bool:
    """The command line and the demo use qsdk as everybody does, so they may import its face."""
    return name == "qsdk/cli.py" or name.startswith("qsdk/demo/")


def exists(module: str, *, package: bool) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py").exists() if package else path.with_suffix(".py").exists() or path.is_dir()


def faces(name: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Names the packages whose face, rather than whose modules, an import reads."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.split(".")[0] in PACKAGES and exists(a.name, package=True))
        return
    here = name.split("/")
    above = here[: len(here) - node.level] if node.level else []
    module = ".".join([*above, *([node.module] if node.module else [])])
    if module.split(".")[0] in PACKAGES and exists(module, package=True):
        yield from (f"{module}.{a.name}" for a in node.names if not exists(f"{module}.{a.name}", package=False))


def violations(name: str, source: str) -> Iterator[str]:
    """Yields each broken rule of a file as `path:line: what is wrong`; `name` is relative to the root, with slashes."""
    lines = source.splitlines()
    tree = ast.parse(source)
    if len(lines) > MAX_FILE_LINES:
        yield f"{name}:1: {len(lines)} lines, more than {MAX_FILE_LINES}: split the file"
    for number, line in enumerate(lines, 1):
        if "TODO" in line or "FIXME" in line:
            yield f"{name}:{number}: unfinished work belongs in an issue, not in the source"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                yield f"{name}:{node.lineno}: star import"
            elif not is_user(name):
                yield from (f"{name}:{node.lineno}: imports the face {face}" for face in faces(name, node))
        elif isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: global statement"
        elif isinstance(node, Function):
            yield from function_violations(name, node)
        elif isinstance(node, ast.Set | ast.Tuple | ast.List) and name != OP_FACTS:
            yield from (f"{name}:{node.lineno}: write {fact} of {OP_FACTS}" for fact in facts_spelled_out(node))
    yield from docstring_violations(name, tree)


def facts_spelled_out(node: ast.Set | ast.Tuple | ast.List) -> Iterator[str]:
    """Yields the fact about ops that a collection of names repeats."""
    names = {element.value for element in node.elts if isinstance(element, ast.Constant)}
    yield from (fact for fact, ops in vars(op_facts).items() if isinstance(ops, frozenset) and ops == names)


def function_violations(name: str, node: Function) -> Iterator[str]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MAX_FUNCTION_LINES:
        yield f"{name}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
    if name not in MAY_IMPORT_LATE and any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(node)):
        yield f"{name}:{node.lineno}: {node.name} imports inside a function"


def docstring_violations(name: str, tree: ast.Module) -> Iterator[str]:
    stem = Path(name).stem
    if (stem == "__init__" or not stem.startswith("_")) and not ast.get_docstring(tree):
        yield f"{name}:1: module without docstring"
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_") or ast.get_docstring(node):
            continue
        # an overload is documented by its implementation
        if not any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
            yield f"{name}:{node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize("name", sources())
def test_house_rules(name: str):
    assert list(violations(name, (ROOT / name).read_text(encoding="utf-8"))) == []


def test_no_folder_is_crowded():
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    counts = Counter(str(Path(name).parent) for name in (*sources(), *tests) if Path(name).name != "__init__.py")
    assert {folder: files for folder, files in counts.items() if files > MAX_FILES_IN_FOLDER} == {}


def test_no_test_imports_another_test():
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py")}
    imports = [
        (name, node.module or "")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    ]
    assert [found for found in imports if found[1].startswith("test_")] == []


def packages_read(source: str) -> set[str]:
    """The packages of the house that a file imports from."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names} & set(PACKAGES)


def test_only_the_verbs_know_both_doors():
    both = {name for name in sources() if {"torch_bridge", "onnx_backend"} <= packages_read((ROOT / name).read_text())}
    assert {str(Path(name).parent) for name in both} <= {"qsdk/verbs", "qsdk/verbs/analysis", "qsdk/verbs/doors"}
    assert {"qsdk/verbs/quantize.py", "qsdk/verbs/doors/choose.py"} <= both


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import qsdk", "imports the face qsdk"),
        ("from qsdk import quantize", "imports the face qsdk.quantize"),
        ("from torch_bridge import Wrapper", "imports the face torch_bridge.Wrapper"),
        ("from . import missing", "imports the face qsdk.core.missing"),
        ("from qsdk.core.errors import *", "star import"),
        ("def f():\n    '''Does.'''\n    def g():\n        import math\n    g()", "imports inside a function"),
        ("class A:\n    '''Is.'''\n    def f(self):\n        from math import pi", "f imports inside a function"),
        ("def f():\n    '''Does.'''\n    global x\n    x = 1", "global statement"),
        ("x = 1  # TO" + "DO later", "unfinished work"),
        ("SIZES = ('Size', 'Shape')", "write SHAPE_OPS of qsdk/core/graph/op_facts.py"),
        ("def f():\n    pass", "f has no docstring"),
        ("class C:\n    pass", "C has no docstring"),
        ("def f():\n    '''Does.'''\n" + "    x = 1\n" * MAX_FUNCTION_LINES, f"more than {MAX_FUNCTION_LINES}"),
        ("x = 1\n" * MAX_FILE_LINES, f"more than {MAX_FILE_LINES}"),
    ],
)
def test_a_planted_violation_is_found(body: str, expected: str):
    found = list(violations("qsdk/core/planted.py", f"'''A module.'''\n{body}\n"))
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    "body", ["from qsdk.core import errors", "from . import errors", "from qsdk.core.errors import QsdkError"]
)
def test_importing_the_defining_file_is_allowed(body: str):
    assert list(violations("qsdk/core/planted.py", f"'''A module.'''\n{body}\n")) == []


def test_users_may_import_the_face_but_modules_need_a_docstring():
    assert list(violations("qsdk/demo/planted.py", "'''A module.'''\nimport qsdk\n")) == []
    assert list(violations("qsdk/core/planted.py", "x = 1\n")) == ["qsdk/core/planted.py:1: module without docstring"]
