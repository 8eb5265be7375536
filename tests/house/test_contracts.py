"""The import contracts of pyproject.toml hold, and each of them bites."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")
HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sysconfig.get_path("scripts")) / "lint-imports"
    return subprocess.run([command, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the packages that a test may spoil."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_importing_qsdk_loads_no_framework():
    code = f"import sys, qsdk; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("files", "contract"),
    [
        pytest.param(
            {"qsdk/core/one.py": "import qsdk.core.two", "qsdk/core/two.py": "import qsdk.core.one"},
            "no circles",
            id="circle",
        ),
        pytest.param(
            {
                "torch_bridge/one.py": "import torch_bridge.two",
                "torch_bridge/two.py": "def f():\n import torch_bridge.one",
            },
            "no circles",
            id="circle hidden in a function",
        ),
        pytest.param(
            {"qsdk/one.py": "import qsdk.algorithms.two", "qsdk/algorithms/two.py": "import qsdk.one"},
            "no circles",
            id="circle across packages",
        ),
        pytest.param(
            {"torch_bridge/one.py": "import onnx_backend"},
            "torch_bridge, algorithms and onnx_backend never import each other",
            id="door to door",
        ),
        pytest.param(
            {"onnx_backend/one.py": "def f():\n import qsdk.algorithms"},
            "torch_bridge, algorithms and onnx_backend never import each other",
            id="door to algorithms",
        ),
        pytest.param(
            {"torch_bridge/one.py": "import onnx"}, "torch_bridge knows torch, never onnx", id="onnx in torch"
        ),
        pytest.param(
            {"onnx_backend/one.py": "import torch"}, "onnx_backend knows onnx, never torch", id="torch in onnx"
        ),
        pytest.param(
            {"qsdk/core/one.py": "import torch"},
            "the core knows numpy, ml_dtypes and the standard library",
            id="torch in the core",
        ),
        pytest.param(
            {"onnx_backend/one.py": "import qsdk.verbs.quantize"},
            "the doors see only the core of qsdk",
            id="door to verbs",
        ),
        pytest.param(
            {"torch_bridge/sites/one.py": "import qsdk.verbs.training"},
            "the doors see only the core of qsdk",
            id="a room of a door to verbs",
        ),
        pytest.param(
            {"onnx_backend/proto/one.py": "import qsdk.commands.page"},
            "the doors see only the core of qsdk",
            id="door to commands",
        ),
        pytest.param(
            {"qsdk/verbs/one.py": "def f():\n import qsdk.commands.page"}, "the floors of qsdk", id="verbs to commands"
        ),
        pytest.param(
            {"qsdk/core/numerics/one.py": "import qsdk.core.sims.stateful"}, "the floors of the core", id="core"
        ),
        pytest.param(
            {"qsdk/algorithms/ranks_of.py": "x = 1"}, "the floors of the algorithms", id="a file without a floor"
        ),
        pytest.param(
            {"torch_bridge/sites/one.py": "import torch_bridge.wrapping.wrapper"},
            "the floors of torch_bridge",
            id="torch_bridge",
        ),
        pytest.param(
            {"onnx_backend/qdq/one.py": "import onnx_backend.validation.rules"},
            "the floors of onnx_backend",
            id="onnx_backend",
        ),
        pytest.param(
            {"onnx_backend/integer/ir/one.py": "import onnx_backend.integer.codegen.expand"},
            "the floors of the integer lowering",
            id="integer lowering",
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(house: Path, files: dict[str, str], contract: str):
    for name, line in files.items():
        (house / name).write_text(f"{line}\n", encoding="utf-8")
    result = lint_imports(house)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract} BROKEN" in result.stdout
