"""Print how large the house is, beside the most that it may be: `python scripts/house_size.py`.

The ceilings stand in `tests/house/size_ceilings.json`, and a test holds them; they only go down.
"""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import qsdk

ROOT = Path(__file__).parents[1]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")
CEILINGS = ROOT / "tests" / "house" / "size_ceilings.json"
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Return the number of lines of a source that are neither blank, nor comments, nor docstrings."""
    text = source.splitlines()
    lines = {number for number, line in enumerate(text, 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def imported_files(module: str) -> int:
    """Return how many files of the package an import loads, in a process of its own."""
    text = f"import {module}, sys; print(sum(m.split('.')[0] in {PACKAGES} for m in sys.modules))"
    return int(subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, capture_output=True).stdout)


def sizes() -> dict[str, int]:
    """Return every figure that has a ceiling."""
    package = [path.read_text("utf-8") for name in PACKAGES for path in ROOT.joinpath(name).rglob("*.py")]
    tests = [path.read_text("utf-8") for path in ROOT.joinpath("tests").rglob("*.py")]
    verbs = [value for name in qsdk.__all__ if inspect.isfunction(value := getattr(qsdk, name))]
    return {
        "package_code_lines": sum(map(code_lines, package)),
        "package_lines": sum(source.count("\n") for source in package),
        "package_files": len(package),
        "tests_code_lines": sum(map(code_lines, tests)),
        "public_names": len(qsdk.__all__),
        "parameters_of_a_verb": max(len(inspect.signature(verb).parameters) for verb in verbs),
        "files_loaded_by_quantize": imported_files("qsdk.verbs.quantize"),
    }


def main() -> None:
    ceilings = json.loads(CEILINGS.read_text("utf-8"))
    print(json.dumps({name: {"today": size, "ceiling": ceilings[name]} for name, size in sizes().items()}, indent=1))


if __name__ == "__main__":
    main()
