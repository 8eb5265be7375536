"""Pages of the documentation: their blocks, run from the top as a reader would, and the output that they show."""

import contextlib
import io
import re
import shlex
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from qsdk.cli import main

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_VERSIONS = 0.005
_RELATIVE, _ABSOLUTE = 0.01, 0.02  # what threads and processors may move a decimal fraction by; all else is exact


@dataclass(frozen=True)
class Block:
    """A fenced block: `python` runs, `bash` holds commands of qsdk that run, `text` below either is what they print.

    `sh` is for other commands (pip, make), `json`, `c` and the like for files; neither is run.
    """

    language: str
    text: str


def pages() -> list[str]:
    """The pages by their names relative to the root, the README among them."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]


def blocks_of(page: str) -> list[Block]:
    found = _FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    return [Block(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)) for indent, language, text in found]


def run_page(page: str, *, until: str = "", write: bool = False) -> dict:
    """Run the blocks of a page in the current folder, with nothing defined beforehand, and return what they defined.

    Args:
        page: of `pages`.
        until: the language of the block to stop after; empty for the whole page.
        write: the page takes what was printed where it shows something else.
    """
    names: dict = {"__name__": "__main__"}
    printed = ""
    texts: list[str] = []
    for number, block in enumerate(blocks_of(page), 1):
        if block.language == "python":
            printed = printed_by(lambda b=block, n=number: exec(compile(b.text, f"{page}, block {n}", "exec"), names))
        elif block.language == "bash":
            printed = printed_by(lambda b=block: run_commands(b.text))
        elif block.language == "text":
            block = replace(block, text=refreshed(printed, block.text)) if write else block
            wrong = difference(printed, block.text)
            assert wrong is None, f"{page}, block {number} shows {wrong}\nprinted was:\n{printed}"
        texts.append(block.text)
        if block.language == until:
            break
    if write:
        _write(page, texts)
    return names


def refreshed(printed: str, shown: str) -> str:
    """Return `shown` with the numbers that were printed; without a `...` all of what was printed, if they differ."""
    if difference(printed, shown) is None:
        return shown
    if "..." not in shown:
        return printed
    found = [line for line in printed.splitlines() if line.strip()]
    lines, at = [], 0
    for line in shown.splitlines():
        same = [n for n in range(at, len(found)) if same_line(_NUMBER.sub("#", found[n]), _NUMBER.sub("#", line))]
        if same and line.strip() != "...":
            ends = " ..." if line.endswith(" ...") else ""
            words = re.match(rf"(?:\s*\S+){{{len(line.removesuffix(ends).split())}}}", found[same[0]])
            line, at = words[0] + ends, same[0] + 1
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _write(page: str, texts: list[str]) -> None:
    """Put the texts of the first blocks in the place of those that the page has."""
    path, given = ROOT / page, iter(texts)

    def block(found: re.Match[str]) -> str:
        text = next(given, None)
        if text is None or found[2] != "text":
            return found[0]
        begin, end = (place - found.start() for place in found.span(3))
        return found[0][:begin] + re.sub(r"^(?=.)", found[1], text, flags=re.MULTILINE) + found[0][end:]

    path.write_text(_FENCE.sub(block, path.read_text(encoding="utf-8")), encoding="utf-8")


def printed_by(action) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about itself
        action()
    return out.getvalue()


def run_commands(text: str) -> None:
    for line in text.replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line, comments=True) or ["#"]
        if program != "#":
            assert program == "qsdk", f"a bash block holds commands of qsdk alone, not {line}"
            assert exit_code(arguments) == 0, line


def exit_code(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as leaving:  # --help
        return leaving.code


def difference(printed: str, shown: str) -> str | None:
    """The first line of `shown` that `printed` does not have, in this order; `...` stands for anything left out.

    Counts, bytes and steps are exact; decimal fractions may differ by noise, and columns may be wider.
    """
    found = [line for line in printed.splitlines() if line.strip()]
    skipping, at = True, 0
    for line in filter(str.strip, shown.splitlines()):
        if line.strip() == "...":
            skipping = True
            continue
        ahead = range(at, len(found)) if skipping else range(at, min(at + 1, len(found)))
        match = next((n for n in ahead if same_line(found[n], line)), None)
        if match is None:
            return f"{line!r}, which is not printed there"
        skipping, at = False, match + 1
    return None


def same_line(printed: str, shown: str) -> bool:
    """Whether two lines have the same words; a shown line may end in `...`."""
    found, wanted = printed.split(), shown.split()
    if wanted[-1] == "...":
        wanted = wanted[:-1]
        found = found[: len(wanted)]
    return len(found) == len(wanted) and all(map(_same_word, found, wanted))


def _same_word(printed: str, shown: str) -> bool:
    if set(printed) == set(shown) == {"-"}:
        return True  # the line below the heads of a table
    if _NUMBER.sub("#", printed) != _NUMBER.sub("#", shown):
        return False
    return all(map(_same_number, _NUMBER.findall(printed), _NUMBER.findall(shown)))


def _same_number(printed: str, shown: str) -> bool:
    found, wanted = (float(number.replace(",", "")) for number in (printed, shown))
    if not ("." in printed and "." in shown):
        # bytes of files that hold the names of versions and paths
        return printed == shown or ("." not in printed + shown and abs(found - wanted) <= _VERSIONS * wanted)
    return abs(found - wanted) <= _ABSOLUTE + _RELATIVE * abs(wanted)
