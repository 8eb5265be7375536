"""What users install: the wheel holds everything, and works outside of the checkout in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("qsdk", "torch_bridge", "onnx_backend")
VARIANTS = ("float", "sim_w8a8", "sim_w4a8", "onnx_w8a8", "integer_w8a8")
COMMANDS = ("demo", "inspect", "parity", "quantize", "report", "to-integer", "validate")
MAX_DEMO_BYTES = 5_000_000


def run(*command: str | Path, cwd: Path) -> str:
    """Returns what a command prints; it sees nothing of the checkout, and must succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: in the checkout, leftovers of an older build would get into it."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel, and sees this one's dependencies."""
    home = tmp_path_factory.mktemp("home")
    venv.create(home, symlinks=os.name != "nt")
    interpreter = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", interpreter)
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=home)
    # A path in a .pth file comes after the environment's own packages, and .pth files found there are not followed:
    # neither an editable nor a plain install of qsdk beside the dependencies can stand in for the wheel.
    own = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(own, "dependencies.pth").write_text("\n".join(sorted(dependencies)), encoding="utf-8")
    return interpreter


@pytest.mark.slow
def test_the_wheel_holds_all_packages_data_and_licences(wheel: Path):
    with zipfile.ZipFile(wheel) as opened:
        sizes = {info.filename: info.file_size for info in opened.infolist()}
    wanted = {str(path.relative_to(ROOT).as_posix()) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    wanted |= {f"{name}/py.typed" for name in PACKAGES}
    wanted |= {"qsdk/verbs/analysis/page/page.html"}
    wanted |= {"qsdk/demo/fashion_mnist.npz", "qsdk/demo/checkpoint.npz", "qsdk/demo/LICENSE.fashion-mnist"}
    assert wanted - set(sizes) == set()
    assert [name for name in sizes if name.endswith(".dist-info/licenses/LICENSE")]
    foreign = {name.split("/")[0] for name in sizes if ".dist-info/" not in name} - set(PACKAGES)
    assert foreign == set()
    assert sum(size for name, size in sizes.items() if name.startswith("qsdk/demo/")) <= MAX_DEMO_BYTES


@pytest.mark.slow
def test_the_installed_packages_are_those_of_the_wheel(python: Path, tmp_path: Path):
    code = f"import {', '.join(PACKAGES)}\nfor p in ({', '.join(PACKAGES)}): print(p.__file__)"
    found = [Path(line) for line in run(python, "-c", code, cwd=tmp_path).splitlines()]
    home = python.parent.parent
    assert [home in path.parents for path in found] == [True] * len(PACKAGES), found


@pytest.mark.spread(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_installed_command_explains_itself(python: Path, tmp_path: Path, command: str):
    qsdk = python.with_name("qsdk")
    assert command in run(qsdk, "--help", cwd=tmp_path)
    assert f"qsdk {command}" in run(qsdk, command, "--help", cwd=tmp_path)


@pytest.mark.slow
def test_the_installed_demo_network_knows_the_installed_images(python: Path, tmp_path: Path):
    code = """
import torch
from qsdk.demo import data, network
held = data()
assert held.calibration_images.shape == (1024, 1, 28, 28) and held.test_images.shape == (10000, 1, 28, 28)
with torch.inference_mode():
    picked = network()(torch.from_numpy(held.test_images[:1000])).argmax(1).numpy()
print((picked == held.test_labels[:1000]).mean())
"""
    assert float(run(python, "-c", code, cwd=tmp_path)) > 0.9


@pytest.mark.nightly
def test_the_installed_demo_runs(python: Path, tmp_path: Path):
    run(python.with_name("qsdk"), "demo", "--out", tmp_path / "out", cwd=tmp_path)
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    for variant in VARIANTS:
        row = results[variant]
        assert 0.8 < row["accuracy"] <= 1, variant
        assert row["bytes"] > 0, variant
        assert row["seconds"] > 0, variant
    assert results["parity"]["weights_max_lsb"] == 0
    assert 0 <= results["parity"]["activations_max_lsb"] <= 1
