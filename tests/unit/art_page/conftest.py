from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from art.storage.layout import DataDir
from art_page.viewer import Viewer


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path / "data")


@pytest.fixture
def viewer(data_dir: DataDir) -> Iterator[Viewer]:
    data_dir.root.mkdir()
    viewer = Viewer(data_dir)
    viewer.indexer.survey_s = 0.0
    yield viewer
    viewer.close()
