"""docs/promises.md names tests that exist, and every promise of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/promises.md").read_text()
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
NAMED = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", PAGE)


def test_names_of_test_files_are_unique_so_that_the_page_needs_no_folders() -> None:
    assert len(FILES) == len(list((ROOT / "tests").rglob("test_*.py")))


@pytest.mark.parametrize(("file", "name"), NAMED, ids="::".join)
def test_a_named_test_exists(file: str, name: str) -> None:
    assert file in FILES
    assert re.search(rf"^(async )?def {name or 'test_'}", FILES[file].read_text(), re.MULTILINE)


def test_every_promise_of_the_readme_has_its_tests() -> None:
    promises = re.findall(r"^- \*\*(.+?)\.\*\*", (ROOT / "README.md").read_text(), re.MULTILINE)
    sections = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE))
    assert len(promises) >= 5
    assert [promise for promise in promises if promise not in sections] == []
    assert [title for title, text in sections.items() if "`test_" not in text] == []
    assert len(NAMED) > 30
