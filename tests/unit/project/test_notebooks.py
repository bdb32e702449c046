"""The notebooks: the `.ipynb` files are the `.py` files, and each has the parts that a reader counts on."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from art.task import list_tasks
from tests.support.notebooks import FOLDER, SOURCES, cells_of

PIP = re.compile(r"# %pip install 'agent-reinforcement-trainer\[local,notebooks(,langgraph|,mcp)?\]'")
by_name = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def stored(source: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(source.with_suffix(".ipynb").read_text())
    return read


@by_name
def test_a_notebook_is_its_source_without_outputs(source: Path) -> None:
    notebook = stored(source)
    read = [
        (cell["cell_type"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", ())), cell["id"])
        for cell in notebook["cells"]
    ]
    written = [(cell.kind, cell.text, cell.tags, f"cell-{number}") for number, cell in enumerate(cells_of(source))]
    assert read == written, "write it again with: make notebooks"
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


def test_no_notebook_is_without_a_source() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {source.stem for source in SOURCES}


@by_name
def test_a_notebook_has_its_parts(source: Path) -> None:
    cells = cells_of(source)
    assert cells[0].kind == "markdown"
    assert cells[0].text.startswith("# ")
    assert "You will see" in cells[0].text
    [install] = [cell.text for cell in cells if "pip install" in cell.text]
    assert PIP.fullmatch(install), "one cell installs, and it is commented out"
    [settings] = [cell.text for cell in cells if "parameters" in cell.tags]
    for word in ("BASE_MODEL = ", "BACKEND = art.LocalBackend(", "# BACKEND = art.RemoteBackend("):
        assert word in settings
        assert all(word not in cell.text for cell in cells if cell.kind == "code" and cell.text != settings
                   and "build_tiny_model" not in cell.text)  # fmt: skip
    assert "await BACKEND.close()" in [line for cell in cells for line in cell.text.split("\n")]
    assert cells[-1].kind == "markdown"
    assert "with a GPU" in cells[-1].text
    assert "art doctor" in cells[-1].text
    assert sum("plot_learning" in cell.text for cell in cells if cell.kind == "code") == 2, "an import, and the picture"
    assert '"before"' in source.read_text() or '"base"' in source.read_text(), "rollouts from before and after"


@by_name
def test_the_code_of_a_notebook_is_python_with_names_that_exist(source: Path) -> None:
    for cell in cells_of(source):
        if cell.kind == "markdown":
            continue
        tree = compile(cell.text, source.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("art"):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@by_name
def test_tasks_that_a_notebook_names_exist(source: Path) -> None:
    assert {*re.findall(r'get_task\("(\w+)"', source.read_text())} <= {*list_tasks()}


@by_name
def test_links_of_a_notebook_lead_somewhere(source: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", source.read_text().replace("\n# ", " "))
    assert [target for target in targets if "://" not in target and not (FOLDER / target).exists()] == []
