"""A hook of mkdocs: every notebook of docs/tutorials becomes a page, from which it can be downloaded."""

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

_TO_NOTEBOOK = re.compile(r"\((\w+)\.ipynb\)")  # a link to another notebook, here to its page


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page, and its pictures, for each notebook."""
    for path in sorted(Path(config["docs_dir"], "tutorials").glob("*.ipynb")):
        text, pictures = as_markdown(nbformat.read(path, as_version=4), path.stem)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def as_markdown(notebook: Any, stem: str) -> tuple[str, dict[str, bytes]]:
    """Return the text of the page, and its pictures by name; the link to the notebook stands below the title."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(_TO_NOTEBOOK.sub(r"(\1.md)", cell.source))
            continue
        parts.append(_fenced("python", cell.source))
        for output in cell.outputs:
            picture = output.get("data", {}).get("image/png")
            if picture is not None:
                name = f"{stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(picture)
                parts.append(f"![What the cell above draws]({name})")
            else:
                parts.append(_fenced("text", output.get("text") or output["data"]["text/plain"]))
    title, _, rest = parts[0].partition("\n")
    parts[0] = f"{title}\n\n[Open this page as a notebook]({stem}.ipynb){{ download }}\n{rest}"
    return "\n\n".join(parts) + "\n", pictures


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
