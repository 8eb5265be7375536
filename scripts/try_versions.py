"""Run the default tests on the newest versions of all packages, and on the oldest that pyproject.toml allows.

`python scripts/try_versions.py newest oldest`. Each set has an environment of its own, `.venv-newest` and
`.venv-oldest`, without constraints.txt; one that is there is brought up to date.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TOOLS = ("dev", "docs")  # what checks and documents qsdk may be as new as it likes
_PATIENCE = 900  # seconds that an install may take with --if-reachable
_UNREACHABLE = re.compile(r"Retrying \(|ConnectionError|ProxyError|SSLError|timed out|\b(403|407|429|50[0-4]) ")


def oldest_allowed(project: dict[str, object]) -> list[str]:
    """Return a constraint for each package that qsdk runs with: the oldest series that a project's table allows."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in extras if name not in _TOOLS for line in extras[name])]
    found = (re.match(r"([\w-]+)>=(\d+)(?:\.(\d+))?", line) for line in wanted)
    return [f"{one[1]}=={one[2]}.{one[3] or 0}.*" for one in found if one is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", choices=["newest", "oldest"])
    parser.add_argument(
        "--if-reachable", action="store_true", help="no failure where no package registry answers in time"
    )
    given = parser.parse_args(arguments)
    results = [_tested(versions, if_reachable=given.if_reachable) for versions in given.versions]  # whatever one says
    return 0 if all(results) else 1


def _tested(versions: str, *, if_reachable: bool) -> bool:
    """Make an environment and run the tests in it."""
    folder = _ROOT / f".venv-{versions}"
    python, constraints = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python"), folder / "constraints.txt"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    folder.mkdir(exist_ok=True)
    constraints.write_text("\n".join(oldest_allowed(project) if versions == "oldest" else []), "utf-8")
    newer = ["-U", "--upgrade-strategy", "eager"] if versions == "newest" else []
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints), *newer]
    print(f"installing the {versions} versions into {folder.name} (minutes; torch is the largest part)", flush=True)
    try:
        pip = subprocess.run(
            [*install, "-e", ".[dev]"],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE if if_reachable else None,
        )
    except subprocess.TimeoutExpired:
        print(f"NOT TESTED on the {versions} versions: the package registry takes more than {_PATIENCE // 60} minutes")
        return True
    if pip.returncode != 0:
        print(pip.stdout)
        if reached := not _UNREACHABLE.search(pip.stdout):
            print(f"NOT TESTED on the {versions} versions: they do not install")
        else:
            print(f"NOT TESTED on the {versions} versions: the package registry cannot be reached")
        return if_reachable and not reached
    tests = ["-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "-m", "not slow and not gpu"]
    return subprocess.run([python, *tests], cwd=_ROOT).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
