"""Records of launched servers: what they hold, who can read them, and which one is meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from art.errors import ConfigError, NotFoundError, StorageError
from art_cloud.launch import Launched, LaunchRecord

KEY = "art-secret-key-of-a-server"


def record(name: str = "box") -> LaunchRecord:
    return LaunchRecord(name=name, host="alice@gpu-box", folder="~/.art/servers/box", local_port=4321)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    monkeypatch.setenv("ART_LAUNCHED_DIR", str(tmp_path / "launched"))
    return Launched()


def test_a_record_comes_back_and_its_key_is_in_a_file_of_its_own(launched: Launched, tmp_path: Path) -> None:
    launched.save(record(), KEY)
    found = launched.find("box")
    assert found == record().model_copy(update={"launched_at": found.launched_at})
    assert found.url == "http://127.0.0.1:4321"
    assert launched.key_path("box").read_text() == KEY
    for path in (tmp_path / "launched").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert KEY not in (tmp_path / "launched" / "box.json").read_text()
    launched.forget("box")
    launched.forget("box")
    assert list((tmp_path / "launched").iterdir()) == []


def test_without_a_name_the_only_record_is_meant(launched: Launched) -> None:
    with pytest.raises(NotFoundError, match="has no record of a server; start one with `art launch`"):
        launched.find()
    launched.save(record("one"), KEY)
    assert launched.find().name == "one"
    launched.save(record("two"), KEY)
    with pytest.raises(ConfigError, match="name one of them: one, two"):
        launched.find()
    with pytest.raises(NotFoundError, match=r"no server 'three' is launched; in .* there are: one, two"):
        launched.find("three")


def test_a_damaged_record_is_named(launched: Launched, tmp_path: Path) -> None:
    launched.save(record(), KEY)
    (tmp_path / "launched" / "box.json").write_text('{"name": "box"}')
    with pytest.raises(StorageError, match=r"box\.json is damaged"):
        launched.find("box")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    launched = Launched(tmp_path / "file" / "launched")
    with pytest.raises(StorageError, match=r"making .*launched failed: Not a directory"):
        launched.save(record(), KEY)
    with pytest.raises(NotFoundError):
        launched.find("box")


def test_without_a_home_directory_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that the system does not know
    monkeypatch.delenv("ART_LAUNCHED_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"no home directory .* ART_LAUNCHED_DIR"):
        Launched()


def test_a_name_cannot_leave_the_folder(launched: Launched) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        launched.find("../../etc/passwd")
