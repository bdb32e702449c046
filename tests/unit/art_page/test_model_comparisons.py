"""Comparisons of models on the page: the list, one of them, and files that cannot be read."""

from __future__ import annotations

import pytest

from art.errors import NotFoundError
from art.storage.layout import DataDir
from art_page.viewer import Viewer
from art_recipes.comparing.model_comparison import JSON_FILE, write_comparison
from tests.support.comparisons import make_comparison


def test_they_are_listed_with_the_newest_first(viewer: Viewer, data_dir: DataDir) -> None:
    assert viewer.comparisons().comparisons == []
    for name, time in (("old", 10.0), ("new", 20.0)):
        write_comparison(data_dir.comparisons / name, make_comparison(name, time))
    (data_dir.comparisons / "broken").mkdir()
    (data_dir.comparisons / "broken" / JSON_FILE).write_text('{"version": 9}')
    answer = viewer.comparisons()
    assert [line.id for line in answer.comparisons] == ["new", "old"]
    assert answer.unreadable == ["broken"]
    line = answer.comparisons[0]
    assert (line.best, line.reference) == ("strong", "weak")
    assert [row.label for row in line.models] == ["weak", "strong", "down"]


def test_one_has_its_numbers_and_remarks(viewer: Viewer, data_dir: DataDir) -> None:
    made = make_comparison("one", 5.0)
    write_comparison(data_dir.comparisons / "one", made)
    answer = viewer.comparison("one")
    assert answer.comparison == made
    assert any("wrong key" in remark for remark in answer.remarks)


@pytest.mark.parametrize("name", ["none", "broken"])
def test_what_is_not_there_is_not_found(viewer: Viewer, data_dir: DataDir, name: str) -> None:
    (data_dir.comparisons / "broken").mkdir(parents=True)
    (data_dir.comparisons / "broken" / JSON_FILE).write_text("{")
    with pytest.raises(NotFoundError, match=name):
        viewer.comparison(name)


def test_the_version_of_answers_changes_with_a_comparison(viewer: Viewer, data_dir: DataDir) -> None:
    before = viewer.version()
    write_comparison(data_dir.comparisons / "one", make_comparison("one", 5.0))
    between = viewer.version()
    assert between != before
    write_comparison(data_dir.comparisons / "one", make_comparison("one", 6.0, is_complete=False))
    assert viewer.version() != between
