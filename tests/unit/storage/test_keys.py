"""The store of API keys, and the command that manages them."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art.cli.main import main
from art.errors import AuthenticationError, InvalidRequestError, KeysUnavailableError, NotFoundError, StorageError
from art.storage.keys import KEY_PATTERN, KeyStore


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[KeyStore]:
    store = KeyStore(tmp_path / "data" / "keys.db", now=clock)
    yield store
    store.close()


def test_a_key_is_found_by_its_text_only(store: KeyStore) -> None:
    key, text = store.create("ci", project="games", scopes=["train", "infer"])
    assert store.find(text) == key
    other, _ = store.create("ci", project="games", scopes=["infer"])
    swapped = text.replace(key.id, other.id)
    for wrong in ("", key.id, text[:-1], text + "x", swapped, f"art_{key.id}_{'A' * 43}"):
        with pytest.raises(AuthenticationError, match="wrong"):
            store.find(wrong)


def test_no_file_contains_the_text_of_a_key(store: KeyStore, tmp_path: Path) -> None:
    _, text = store.create("ci", project=None, scopes=["infer"])
    secret = text.split("_", 2)[2]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert all(secret.encode() not in path.read_bytes() for path in files)
    assert stat.S_IMODE((tmp_path / "data/keys.db").stat().st_mode) == 0o600


def test_a_key_expires(store: KeyStore, clock: Clock) -> None:
    _, text = store.create("ci", project=None, scopes=["infer"], expires_at=clock.now + 10)
    assert store.find(text)
    clock.now += 10
    with pytest.raises(AuthenticationError, match="expired"):
        store.find(text)
    with pytest.raises(InvalidRequestError, match="in the future"):
        store.create("ci", project=None, scopes=["infer"], expires_at=clock.now)


def test_a_revoked_key_is_refused(store: KeyStore) -> None:
    key, text = store.create("ci", project=None, scopes=["infer"])
    revoked = store.revoke(key.id)
    assert store.revoke(key.id) == revoked
    with pytest.raises(AuthenticationError):
        store.find(text)
    with pytest.raises(NotFoundError, match="art keys list"):
        store.revoke("nobody")


def refused(store: KeyStore, text: str) -> bool:
    with contextlib.suppress(AuthenticationError):
        store.find(text)
        return False
    return True


def test_a_revoked_key_stays_revoked_when_the_clock_is_set_back(store: KeyStore, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "data" / "keys.db"
    key, text = store.create("ci", project=None, scopes=["infer"])
    store.revoke(key.id)
    clock.now -= 3600
    other = KeyStore(path, now=clock)  # a server that is started then
    assert refused(store, text)
    assert refused(other, text)
    other.close()


def test_a_key_that_an_older_version_had_given_a_grace_period_is_revoked(clock: Clock, tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.db", now=clock)
    key, text = store.create("ci", project=None, scopes=["infer"])
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.db")) as db, db:
        db.execute("UPDATE keys SET revoked_at = ? WHERE id = ?", (clock.now + 60, key.id))
    assert refused(store, text)
    store.close()


def test_invalid_keys_are_not_made(store: KeyStore) -> None:
    with pytest.raises(InvalidRequestError, match="scope"):
        store.create("ci", project=None, scopes=[])
    with pytest.raises(InvalidRequestError, match="project"):
        store.create("ci", project="../x", scopes=["infer"])
    assert store.list() == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--data-dir", str(tmp_path)]

    def art(*arguments: str) -> list[str]:
        assert main(["keys", *arguments, *folder]) == 0
        return capsys.readouterr().out.splitlines()

    assert main(["keys", "create", "--name", "ci", "--project", "games", "--expires", "90d", *folder]) == 0
    printed = capsys.readouterr()
    (text,) = printed.out.splitlines()
    assert KEY_PATTERN.fullmatch(text), "KEY=$(art keys create ...) is the key and nothing else"
    key_id = text.split("_")[1]
    assert key_id in printed.err
    assert text not in printed.err
    assert "no art-server has run" in printed.err
    _, row = art("list")
    assert row.split()[:4] == [key_id, "ci", "games", "infer,train"]
    assert text.split("_", 2)[2] not in row
    (other,) = art("create", "--name", "ci")
    art("revoke", other.split("_")[1])
    rows = art("list")
    assert "active until" in rows[1]
    assert "revoked at" in rows[2]
    store = KeyStore(tmp_path / "keys.db")
    assert store.find(text).scopes == {"infer", "train"}
    store.close()


@pytest.mark.parametrize(
    "arguments", [["create", "--name", "x", "--expires", "90"], ["create", "--name", "x", "--scope", "all"]]
)
def test_wrong_options_of_the_command_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", *arguments, "--data-dir", str(tmp_path)])
    assert main(["keys", "revoke", "nobody", "--data-dir", str(tmp_path)]) == 1


def damage_bytes(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * path.stat().st_size)


def damage_row(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE keys SET scopes = 7")
    db.close()


def damage_table(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE keys")
    db.close()


@pytest.mark.parametrize("damage", [damage_bytes, damage_row, damage_table, Path.unlink])
def test_a_damaged_file_is_an_error_without_its_path(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.db"
    store = KeyStore(path)
    _, text = store.create("ci", project=None, scopes=["infer"])
    store.check()
    store._database.run_blocking(lambda db: None)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    damage(path)
    for _ in range(3):
        with pytest.raises(KeysUnavailableError) as caught:
            store.find(text)
        assert str(tmp_path) not in caught.value.message
        with pytest.raises(KeysUnavailableError):
            store.check()
    assert caplog.text.count("cannot be checked") == 1
    assert str(path) in caplog.text
    store.close()


@pytest.mark.parametrize("damage", [damage_bytes, damage_row])
def test_a_file_that_is_damaged_already_is_named_to_the_operator(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "keys.db"
    store = KeyStore(path)
    store.create("ci", project=None, scopes=["infer"])
    store.close()
    damage(path)
    with pytest.raises(StorageError, match=r"art keys create") as caught:
        KeyStore(path)
    assert str(path) in caught.value.message
    assert "None" not in caught.value.message


def test_keys_are_checked_again_once_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    store = KeyStore(path)
    _, text = store.create("ci", project=None, scopes=["infer"])
    damage_row(path)
    with pytest.raises(KeysUnavailableError):
        store.find(text)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE keys SET scopes = 'infer'")
    db.close()
    assert store.find(text).name == "ci"
    store.close()
