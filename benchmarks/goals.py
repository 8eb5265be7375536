"""Goals beside what is measured: runs the benchmarks that the goals name, writes the table of `docs/results/speed.md`.

`python benchmarks/goals.py` measures every row of `goals_rows.py`; `python benchmarks/goals.py tracing qat_step` those
of some benchmarks, and leaves the other rows of the page as they were measured before. `--others` prints the
benchmarks that no row names, one path a line. Exits with 1 where a benchmark failed or lacks a row's key.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goals_rows import GROUPS

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "results" / "speed.md"
START, END = "<!-- goals -->\n", "<!-- end of goals -->"
HEAD = ("work", "goal", "measured", "met", "when, on what", "note")
Measured = tuple[str, str]


def looked_up(lines: Sequence[Any], key: Sequence[str]) -> float | None:
    """Return the number under a path of keys in the last of some JSON lines that has it."""
    for found in reversed(lines):
        for part in key:
            if isinstance(found, list):  # the rows of a table
                found = next((row for row in found if row.get("method") == part), None)
            else:
                found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, (int, float)):
            return found
    return None


def run(command: str) -> list[Any]:
    """Return the JSON lines that a benchmark prints; they are shown as well."""
    name, *options = shlex.split(command)
    script = [sys.executable, str(HERE / f"{name}.py"), *options]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(f"{command}: exit {done.returncode}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def machine() -> str:
    """Return the kind of this machine: its processor and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    with_vnni = " with VNNI" if "vnni" in text else ""
    return f"{len(os.sched_getaffinity(0))} cores, {(names or [platform.processor()])[0].strip()}{with_vnni}"


def measured(benchmarks: Sequence[str]) -> tuple[dict[str, Measured], bool]:
    """Run the benchmarks of these names, or all; return work -> value and when, and whether all were found."""
    rows = [row for group in GROUPS.values() for row in group if not benchmarks or row.benchmark in benchmarks]
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {machine()}"
    found, complete = {}, True
    for command in dict.fromkeys(row.command for row in rows):
        lines = run(command)
        for row in (row for row in rows if row.command == command):
            value = looked_up(lines, row.key)
            if value is None:
                print(f"{command}: nothing under {list(row.key)} for '{row.work}'", file=sys.stderr)
                complete = False
            else:
                found[row.work] = (f"{value:g}", now)
    return found, complete


def kept(text: str) -> dict[str, Measured]:
    """Return work -> value and when, as the page has them."""
    lines = text.partition(START)[2].partition(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {row[0]: (row[2], row[4]) for row in rows if row[2] and row[1].partition(" ")[0] in ("<=", ">=")}


def tables(values: Mapping[str, Measured]) -> str:
    """Return the rows as Markdown, a table for each group."""
    parts = []
    for title, group in GROUPS.items():
        lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
        for row in group:
            value, when = values.get(row.work, ("", ""))
            met = ("yes" if row.is_met(float(value)) else "no") if value else ""
            lines.append((row.work, row.goal, value, met, when, row.note))
        parts.append(f"### {title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts)


def rewritten(text: str, fresh: Mapping[str, Measured]) -> str:
    """Return the page with new values in place of old ones, and all rows as `goals_rows.py` lists them."""
    before, start, rest = text.partition(START)
    return f"{before}{start}\n{tables({**kept(text), **fresh})}\n\n{END}{rest.partition(END)[2]}"


def others() -> list[str]:
    """Return the benchmarks without a row, and not these two files."""
    named = {row.benchmark for group in GROUPS.values() for row in group} | {"goals", "goals_rows"}
    return [f"benchmarks/{path.name}" for path in sorted(HERE.glob("*.py")) if path.stem not in named]


def main(*given: str) -> int:
    """Measure, write the page, print the table."""
    if "--others" in given:
        print("\n".join(others()))
        return 0
    known = {row.benchmark for group in GROUPS.values() for row in group}
    if unknown := {*given} - known:
        raise SystemExit(
            f"no goal is measured by {', '.join(sorted(unknown))}; name some of {', '.join(sorted(known))}"
        )
    fresh, complete = measured(given)
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text(), fresh))
    print(tables(kept(DOCUMENT.read_text())))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
