"""What the documentation says exists, exists: commands, files, links, and the quick start as it is printed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import art

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # A command ends at two spaces, a comment, a closing backtick or the end of its line.
    commands = re.findall(r"(?:^ {4}|`)make ([a-z -]+?)(?=  |\s*#|`|$)", page.read_text(), re.MULTILINE)
    assert {word for command in commands for word in command.split()} <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_of_the_source_tree_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_quick_start_of_the_readme_is_the_example() -> None:
    example = (ROOT / "examples/quickstart/quickstart.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example.split('"""\n', 1)[1].strip() in (block.strip() for block in blocks)


@pytest.mark.parametrize("command", ["demo", "train", "tiny-model"])
def test_commands_of_the_readme_have_help(command: str) -> None:
    assert f"art {command}" in (ROOT / "README.md").read_text()
    done = subprocess.run([sys.executable, "-m", "art.cli.main", command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: art" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_use_names_that_exist(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        tree = compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "art":
                assert hasattr(art, node.attr), f"{page.name}: art.{node.attr}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "model":
                assert hasattr(art.TrainableModel, node.attr) or node.attr in art.TrainableModel.model_fields
