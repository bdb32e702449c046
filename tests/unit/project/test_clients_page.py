"""docs/clients.md is made by `make test-clients`, which takes environments of other libraries; it names them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.clients import CLIENTS, FOLDER
from tests.clients.page import COLUMNS, INTRODUCTION

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/clients.md").read_text()
REQUIREMENTS = sorted((FOLDER / "requirements").glob("*.txt"))


def test_the_page_names_every_client() -> None:
    assert PAGE.startswith(INTRODUCTION)
    rows = re.findall(r"^\| ([\w-]+) \| [\w@/-]+ [\d.]+ \|(.*)\|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(CLIENTS)
    assert {path.stem for path in REQUIREMENTS} <= CLIENTS.keys()
    assert all(len(cells.split("|")) == len(COLUMNS) for _, cells in rows)
    numbers = {int(number) for number in re.findall(r" \((\d+)\) \|", PAGE)}
    assert numbers == set(map(int, re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)))


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_requirements_have_a_lower_bound(path: Path) -> None:
    """Without one, pip may go back to versions of years ago."""
    assert all(">=" in line for line in path.read_text().splitlines())
