"""Print constraints that pin what qsdk runs with to the oldest versions that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

_TOOLS = ("dev", "docs")  # what checks and documents qsdk may be as new as it likes


def main() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(line for name, lines in extras.items() if name not in _TOOLS for line in lines),
    ]
    for line in wanted:
        found = re.match(r"([\w-]+)>=(\d+)\.(\d+)", line)
        if found is not None:
            print(f"{found[1]}=={found[2]}.{found[3]}.*")


if __name__ == "__main__":
    main()
