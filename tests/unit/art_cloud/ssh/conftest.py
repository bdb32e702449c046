from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_ssh import FakeMachine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    yield machine
    machine.kill()
