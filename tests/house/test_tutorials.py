"""The notebooks of the tutorials are those of their sources, small, and show what they print when they are run."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from pages import difference

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
LARGEST = 200_000  # bytes


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_notebooks, show_notebooks = script("make_notebooks"), script("show_notebooks")


def stored(name: str) -> Any:
    return nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)


def text_of(cell: Any) -> str:
    """What a cell of code prints."""
    return "\n".join(output.get("text") or output["data"].get("text/plain", "") for output in cell.outputs)


def pictures_of(notebook: Any) -> list[int]:
    """How many pictures each cell of code draws."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code]


def test_every_source_has_its_notebook_and_its_page():
    assert [path.stem for path in make_notebooks.sources()] == NAMES
    nav = (ROOT / "mkdocs.yml").read_text()
    index = (TUTORIALS / "index.md").read_text()
    assert [name for name in NAMES if f"tutorials/{name}.md" not in nav or f"({name}.md)" not in index] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_that_of_its_source(name: str):
    notebook, made = stored(name), make_notebooks.notebook_of(TUTORIALS / f"{name}.py")
    assert nbformat.validate(notebook) is None
    found, wanted = ([(cell.cell_type, cell.source) for cell in one.cells] for one in (notebook, made))
    assert found == wanted, f"run `python scripts/make_notebooks.py {name}` after a change of {name}.py"
    assert (TUTORIALS / f"{name}.ipynb").stat().st_size < LARGEST
    assert sum(pictures_of(notebook)) > 0
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    assert str(ROOT) not in (TUTORIALS / f"{name}.ipynb").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_what_it_prints(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It runs in five minutes in an empty folder; numbers are compared as on the pages of the documentation."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = stored(name)
    again = make_notebooks.run(make_notebooks.notebook_of(TUTORIALS / f"{name}.py"), tmp_path)
    assert pictures_of(again) == pictures_of(notebook)
    for cell, shown in zip(again.cells, notebook.cells, strict=True):
        if cell.cell_type == "code":
            wrong = difference(text_of(cell), text_of(shown))
            assert wrong is None, f"{name} shows {wrong}\nprinted was:\n{text_of(cell)}"
            assert bool(cell.outputs) == bool(shown.outputs)


def test_changed_text_keeps_the_outputs_and_changed_code_does_not():
    stored, text, code = (
        nbformat.v4.new_notebook(cells=make_notebooks.cells_of(f"# %% [markdown]\n# {said}\n\n# %%\n{done}\n"))
        for said, done in (("Old.", "x = 1"), ("New.", "x = 1"), ("New.", "x = 2"))
    )
    stored.cells[1].outputs = [nbformat.v4.new_output("stream", text="printed\n")]
    made = make_notebooks.with_outputs(text, stored)
    assert (made.cells[0].source, made.cells[1].outputs) == ("New.", stored.cells[1].outputs)
    with pytest.raises(ValueError, match="run it, without --text"):
        make_notebooks.with_outputs(code, stored)


def test_a_source_becomes_cells():
    made = make_notebooks.cells_of("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\n\nx  # a comment\n")
    assert [(cell.cell_type, cell.source) for cell in made] == [
        ("markdown", "# Title\n\nText."),
        ("code", "x = 1\n\nx  # a comment"),
    ]


def test_a_page_has_the_pictures_and_the_text_of_its_notebook():
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Title\n\nText, and [more](other.ipynb)."),
            nbformat.v4.new_code_cell(
                "draw()",
                outputs=[
                    nbformat.v4.new_output("stream", text="printed\n"),
                    nbformat.v4.new_output("display_data", {"image/png": "QUJD"}),
                ],
            ),
        ]
    )
    text, pictures = show_notebooks.as_markdown(notebook, "name")
    assert pictures == {"name-1.png": b"ABC"}
    assert text.startswith("# Title\n\n[Open this page as a notebook](name.ipynb)")
    assert "[more](other.md)" in text
    assert text.index("Text,") < text.index("```python\ndraw()\n```") < text.index("```text\nprinted\n```")
    assert text.index("printed") < text.index("(name-1.png)")


def test_progress_bars_are_left_out():
    bars = nbformat.v4.new_output("stream", name="stderr", text="calibrate:  50%|#  | 1/2 [00:01<00:01]\r\n")
    said = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("one\n", "two\n")]
    kept = make_notebooks._kept([said[0], bars, said[1]])
    assert [output.text for output in kept] == ["one\ntwo\n"]
    warning = nbformat.v4.new_output("stream", name="stderr", text="UserWarning: beware\n")
    assert make_notebooks._kept([warning])[0].text == "UserWarning: beware\n"
