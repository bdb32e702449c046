"""The labels of a run: each call replaces what it names and keeps the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art.errors import InvalidRequestError
from art.storage.labels import RunLabels, read_labels, set_labels
from art.storage.layout import DataDir, ModelPaths


@pytest.fixture
def paths(tmp_path: Path) -> ModelPaths:
    return DataDir(tmp_path).model("games", "agent-001")


def test_a_call_replaces_what_it_names(paths: ModelPaths) -> None:
    assert read_labels(paths) == RunLabels()
    set_labels(paths, tags=["baseline", " long run ", "baseline"], notes="first try")
    set_labels(paths, star=True)
    assert read_labels(paths) == RunLabels(tags=["baseline", "long run"], notes="first try", star=True)
    set_labels(paths, tags=[], notes="", archived=True)
    assert read_labels(paths) == RunLabels(star=True, archived=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"tags": ["a,b"]}, "without commas"), ({"tags": [""]}, "1 to 40"), ({"tags": list("abcdefghijklmnopqrstu")}, "20"),
     ({"notes": "x" * 10_001}, "10,000")],
)  # fmt: skip
def test_a_wrong_label_is_named(paths: ModelPaths, given: dict[str, Any], says: str) -> None:
    set_labels(paths, tags=["kept"])
    with pytest.raises(InvalidRequestError, match=says):
        set_labels(paths, **given)
    assert read_labels(paths).tags == ["kept"]


def test_damaged_and_linked_files_count_as_no_labels(paths: ModelPaths, tmp_path: Path) -> None:
    paths.root.mkdir(parents=True)
    paths.labels.write_text('{"tags": 3}')
    assert read_labels(paths) == RunLabels()
    (tmp_path / "private.json").write_text('{"notes": "secret"}')
    paths.labels.unlink()
    paths.labels.symlink_to(tmp_path / "private.json")
    assert read_labels(paths) == RunLabels()
