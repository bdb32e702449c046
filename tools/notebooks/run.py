"""Run a notebook from top to bottom in a kernel of its own, and keep its pictures, text and times."""

from __future__ import annotations

import base64
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.notebooks.write import read_notebook

CELL_TIMEOUT_S = 1800
"""Longest time of one cell. On a quiet laptop a whole notebook takes less than five minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookRun:
    """What a run of a notebook has shown and taken."""

    notebook: Any
    """The notebook with its outputs."""
    wall_s: float
    cpu_s: float
    """CPU time of the kernel and of all processes that it has started and waited for."""

    def pictures(self) -> list[bytes]:
        """The pictures as PNG, in order."""
        return [
            base64.b64decode(output["data"]["image/png"])
            for cell in self.notebook.cells
            for output in cell.get("outputs", ())
            if "image/png" in output.get("data", {})
        ]

    def text(self) -> str:
        """Everything that was printed."""
        outputs = [output for cell in self.notebook.cells for output in cell.get("outputs", ())]
        return "".join(
            output["text"] if output["output_type"] == "stream" else output.get("data", {}).get("text/plain", "") + "\n"
            for output in outputs
        )


def run_notebook(source: Path, folder: Path, *, last_cell: str | None = None) -> NotebookRun:
    """Run a notebook in `folder`, where it leaves its files.

    Args:
        last_cell: code that runs after the notebook's own cells.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = read_notebook(source)
    if last_cell is not None:
        notebook.cells.append(nbformat.v4.new_code_cell(last_cell))
    started, spent = time.perf_counter(), _cpu_of_children()
    NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return NotebookRun(notebook=notebook, wall_s=time.perf_counter() - started, cpu_s=_cpu_of_children() - spent)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
