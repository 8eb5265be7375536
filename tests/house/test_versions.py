"""The versions that `pyproject.toml` allows: what is installed to try them, and what the documentation says of them."""

import re
import subprocess
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
UNREACHABLE = "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError'"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`scripts/try_versions.py`, in a folder with this pyproject.toml alone, none of whose commands is run."""
    spec = spec_from_file_location("try_versions", ROOT / "scripts" / "try_versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"), "utf-8")
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    return module


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def runs(script: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: str = "", says: str = "") -> list[list[str]]:
    """The commands that the script runs, of which those that hold a word fail."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        seen.append(command)
        if says == "" and fails and fails in " ".join(command) and "pip" in command:
            raise subprocess.TimeoutExpired(command, 900)
        failed = bool(fails) and fails in " ".join(command)
        return SimpleNamespace(returncode=int(failed), stdout=says if failed else "")

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    return seen


def test_the_oldest_versions_are_the_first_that_each_package_may_have(script: ModuleType):
    given = {
        "dependencies": ["torch>=2.13", "numpy>=2.0.1; python_version > '3'", "unbounded"],
        "optional-dependencies": {"images": ["pillow>=11"], "dev": ["ruff>=0.9"], "docs": ["mkdocs>=1.6"]},
    }
    assert script.oldest_allowed(given) == ["torch==2.13.*", "numpy==2.0.*", "pillow==11.0.*"]


def test_each_set_is_installed_without_the_constraints_of_the_others_and_runs_whatever_the_first_says(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen = runs(script, monkeypatch, fails=".venv-newest/bin/python -m pytest")
    assert script.main(["newest", "oldest"]) == 1
    assert ["pytest" in command for command in seen] == [False, False, True, False, False, True]
    assert "eager" in seen[1]
    assert "eager" not in seen[4]
    assert not (tmp_path / ".venv-newest" / "constraints.txt").read_text("utf-8")
    assert "torch==" in (tmp_path / ".venv-oldest" / "constraints.txt").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "pip_says", "status", "told"),
    [
        (["--if-reachable"], UNREACHABLE, 0, "the package registry cannot be reached"),
        ([], UNREACHABLE, 1, "the package registry cannot be reached"),
        (["--if-reachable"], "ResolutionImpossible", 1, "they do not install"),
        (["--if-reachable"], "", 0, "the package registry takes more than 15 minutes"),
    ],
)
def test_what_does_not_install_is_said_and_a_silent_registry_fails_only_where_it_was_asked_for(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    options: list[str],
    pip_says: str,
    status: int,
    told: str,
):
    seen = runs(script, monkeypatch, fails="pip install", says=pip_says)
    assert script.main([*options, "newest"]) == status
    assert not any("pytest" in command for command in seen)
    out = capsys.readouterr().out
    assert pip_says in out
    assert f"NOT TESTED on the newest versions: {told}" in out


def test_the_documentation_declares_the_versions_that_install():
    declared = project()
    lines = [*declared["dependencies"], *(line for of in declared["optional-dependencies"].values() for line in of)]
    allowed = {found[1].lower(): found[2] for line in lines if (found := re.match(r"([\w-]+)>=([\d.]+)", line))}
    rows = re.findall(
        r"^\| ([\w-]+)[^|]*\| ([\d.]+) and newer", (ROOT / "docs" / "versioning.md").read_text("utf-8"), re.M
    )
    assert len(rows) > 6
    assert {name: at for name, at in rows if name != "Python"} == {
        name: allowed[name.lower()] for name, _ in rows if name != "Python"
    }
