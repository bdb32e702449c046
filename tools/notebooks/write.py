"""Write the notebooks from the `.py` files that people review, always with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources() -> list[Path]:
    """The `.py` files of all notebooks."""
    return sorted(FOLDER.glob("*.py"))


def read_notebook(source: Path) -> Any:
    """Read a `.py` file in the percent format as a notebook without outputs. Ids of cells are their numbers."""
    import jupytext

    # Without `comment_magics`, a commented line that begins with % would become a command that runs.
    notebook = jupytext.read(source, fmt={"extension": ".py", "format_name": "percent", "comment_magics": False})
    notebook.metadata = dict(_METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def notebook_text(source: Path) -> str:
    """The text of the `.ipynb` file of a `.py` file."""
    import nbformat

    return str(nbformat.writes(read_notebook(source))) + "\n"


def write_notebook(source: Path) -> bool:
    """Write the `.ipynb` file beside a `.py` file, and return whether it has changed."""
    path, text = source.with_suffix(".ipynb"), notebook_text(source)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True
