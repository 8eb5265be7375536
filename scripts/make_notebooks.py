"""Make the notebooks of docs/tutorials from the plain sources beside them, run them, and keep what they show.

    python scripts/make_notebooks.py              # all of them: `make tutorials`
    python scripts/make_notebooks.py integers     # one
    python scripts/make_notebooks.py --text       # where only the text has changed: nothing is run

A source is Python in the percent format, which Jupytext and editors know: `# %% [markdown]` begins a cell of text,
`# %%` one of code. A notebook holds the same cells and what they printed and drew.
"""

import argparse
import ast
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
_BAR = re.compile(r"\[\d\d:\d\d[<,]")  # of tqdm
_CELL = re.compile(r"^# %%(?: \[(markdown)\])?\n", re.MULTILINE)


def sources() -> list[Path]:
    """The plain sources, by name."""
    return sorted(TUTORIALS.glob("*.py"))


def cells_of(source: str) -> list[NotebookNode]:
    """Return the cells of a source, with names that do not depend on chance."""
    _, *parts = _CELL.split(source)
    cells = []
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        if kind == "markdown":
            made = nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE))
        else:
            made = nbformat.v4.new_code_cell(text.strip())
        made.id = f"cell-{number}"
        cells.append(made)
    return cells


def notebook_of(path: Path) -> NotebookNode:
    """Return the notebook of a source, not yet run."""
    notebook = nbformat.v4.new_notebook(cells=cells_of(path.read_text(encoding="utf-8")))
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def run(notebook: NotebookNode, folder: Path, *, timeout: int = 900) -> NotebookNode:
    """Run the cells in order in `folder`, laid out as the repository is, and return the notebook with what they show.

    Raises:
        CellExecutionError: a cell raised an error, or took longer than `timeout` seconds.
    """
    place = folder / "docs" / "tutorials"
    place.mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples")
    where = {"metadata": {"path": str(place)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _kept(cell.outputs)
    return notebook


def _kept(outputs: list[Any]) -> list[Any]:
    """Return what a reader wants to see: no progress bars, and the text of one cell in one piece."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and "TqdmWarning" not in output.text:  # transformers wishes for ipywidgets
            lines = [line for line in re.split(r"[\r\n]", output.text) if line.strip() and not _BAR.search(line)]
            output.text = "".join(f"{line}\n" for line in lines)
            if not lines:
                continue
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += output.text
                continue
        elif output.output_type == "stream":
            continue
        else:
            output.data.pop("text/html", None)  # the same as the text, and longer
            if "image/png" in output.data:
                output.data.pop("text/plain", None)
        kept.append(output)
    return kept


def with_outputs(notebook: NotebookNode, stored: NotebookNode) -> NotebookNode:
    """Return a notebook with the outputs of the stored one, which has the same code, perhaps laid out otherwise.

    Raises:
        ValueError: the code differs, so that it must be run.
    """
    new, old = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (notebook, stored))
    if [ast.dump(ast.parse(cell.source)) for cell in new] != [ast.dump(ast.parse(cell.source)) for cell in old]:
        raise ValueError("the code has changed as well as the text: run it, without --text")
    for cell, same in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = same.outputs, same.execution_count
    return notebook


def main() -> None:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description="make and run the notebooks of docs/tutorials")
    parser.add_argument("names", nargs="*", help="which, without .py; all without a name")
    parser.add_argument("--text", action="store_true", help="take over changed text, and run nothing")
    given = parser.parse_args()
    for path in sources():
        if given.names and path.stem not in given.names:
            continue
        began, out = time.monotonic(), path.with_suffix(".ipynb")
        if given.text:
            made = with_outputs(notebook_of(path), nbformat.read(out, as_version=4))
        else:
            with TemporaryDirectory() as folder:
                made = run(notebook_of(path), Path(folder))
        nbformat.write(made, out)
        print(f"{out.relative_to(ROOT)}: {time.monotonic() - began:.0f} s, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
