"""Copies of a data directory: whole at every moment, only what is missing is sent, and a server may be writing."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import sqlite3
import tarfile
from pathlib import Path

import pytest

from art.backends.skypilot import copying
from art.backends.skypilot.copying import copy, held, pack, unpack
from art.errors import StorageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    files = {
        "shop/models/agent/checkpoints/0001/adapter.safetensors": "one", "shop/models/agent/history.jsonl": "{}\n",
        "shop/models/agent/exports/0001-merged/model.safetensors": "large", "logs/server.log": "log", "server.lock": "",
        ".merged/x/model.safetensors": "large", ".viewer.db": "index",
    }  # fmt: skip
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    record(root, 1)
    return root


def record(root: Path, step: int) -> None:
    """Write into the database as a server does, in WAL mode."""
    with contextlib.closing(sqlite3.connect(root / "art.db")) as db, db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE IF NOT EXISTS published (step)")
        db.execute("INSERT INTO published VALUES (?)", [step])


def steps(root: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(root / "art.db")) as db:
        return [step for (step,) in db.execute("SELECT step FROM published ORDER BY step")]


def names(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_what_can_be_made_again_is_left_out(root: Path, tmp_path: Path) -> None:
    assert copy(root, tmp_path / "copy") == 3
    assert names(tmp_path / "copy") == {
        "art.db", "shop/models/agent/checkpoints/0001/adapter.safetensors", "shop/models/agent/history.jsonl",
        copying.MANIFEST,
    }  # fmt: skip
    assert steps(tmp_path / "copy") == [1]


def test_only_what_changed_is_sent_and_what_was_deleted_goes(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy(root, target)
    assert copy(root, target) == 0
    (root / "shop/models/agent/checkpoints/0002").mkdir()
    (root / "shop/models/agent/checkpoints/0002/adapter.safetensors").write_text("two")
    (root / "shop/models/agent/checkpoints/0001/adapter.safetensors").unlink()
    record(root, 2)
    assert copy(root, target) == 2
    assert "shop/models/agent/checkpoints/0001/adapter.safetensors" not in names(target)
    assert steps(target) == [1, 2]


def test_a_server_that_holds_its_database_open_is_no_obstacle(root: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(root / "art.db")) as db:
        db.execute("PRAGMA wal_autocheckpoint=0")
        with db:
            db.execute("INSERT INTO published VALUES (7)")
        copy(root, tmp_path / "copy")
    assert steps(tmp_path / "copy") == [1, 7]


def test_databases_arrive_after_the_files_that_they_name(root: Path) -> None:
    out = io.BytesIO()
    pack(root, {}, out)
    out.seek(0)
    with tarfile.open(fileobj=out, mode="r|") as tar:
        order = tar.getnames()
    assert order[0] == ".list"
    assert order[-2:] == ["art.db", ".end"]


@pytest.mark.parametrize("part", [0.3, 0.7, 0.95])
def test_a_copy_that_breaks_off_leaves_the_one_before(root: Path, tmp_path: Path, part: float) -> None:
    target = tmp_path / "copy"
    copy(root, target)
    before = held(target)
    (root / "shop/models/agent/checkpoints/0002").mkdir()
    (root / "shop/models/agent/checkpoints/0002/adapter.safetensors").write_bytes(b"x" * 200_000)
    (root / "shop/models/agent/checkpoints/0001/adapter.safetensors").unlink()
    record(root, 2)
    out = io.BytesIO()
    pack(root, before, out)
    content = out.getvalue()
    with pytest.raises(StorageError, match="interrupted"):
        unpack(io.BytesIO(content[: int(len(content) * part)]), target)
    assert held(target) == before
    assert (target / "shop/models/agent/checkpoints/0001/adapter.safetensors").read_text() == "one"
    assert unpack(io.BytesIO(content), target) == 2
    assert steps(target) == [1, 2]


def test_what_the_manifest_names_is_on_the_disk_before_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut forgets what was not synced."""
    done: list[tuple[str, str]] = []
    sync, replace = copying.sync, Path.replace

    def note_sync(path: Path) -> None:
        sync(path)
        done.append(("synced", path.name))

    def note_replace(source: Path, target: Path) -> Path:
        done.append(("replaced", target.name))
        return replace(source, target)

    monkeypatch.setattr(copying, "sync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    copy(root, tmp_path / "copy")
    files = ["history.jsonl", "adapter.safetensors", "art.db", copying.MANIFEST]
    folders = ["agent", "0001", "copy", "copy"]
    assert done == [
        step
        for file, folder in zip(files, folders, strict=True)
        for step in (("synced", f".{file}.part"), ("replaced", file), ("synced", folder))
    ]


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_bucket_that_cannot_sync_gets_a_copy_and_a_failing_disk_does_not(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, is_refused: bool
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, "from the file system")

    monkeypatch.setattr(copying, "sync", fail)
    with pytest.raises(StorageError, match="from the file system") if is_refused else contextlib.nullcontext():
        copy(root, tmp_path / "copy")
    assert bool(held(tmp_path / "copy")) is not is_refused


def test_a_copy_becomes_a_data_directory_again(root: Path, tmp_path: Path) -> None:
    copy(root, tmp_path / "copy")
    new = tmp_path / "new"
    assert copy(tmp_path / "copy", new, is_copy=False) == 3
    assert names(new) == names(tmp_path / "copy") - {copying.MANIFEST}
    record(new, 2)  # it is no copy: changes are seen by the next copy of it
    assert copy(new, tmp_path / "copy") >= 1
    assert steps(tmp_path / "copy") == [1, 2]


def test_files_that_vanish_meanwhile_are_no_failure(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = copying.list_files

    def list_and_delete(folder: Path) -> copying.Files:
        files = listed(folder)
        (root / "shop/models/agent/history.jsonl").unlink()
        return files

    monkeypatch.setattr(copying, "list_files", list_and_delete)
    assert copy(root, tmp_path / "copy") == 2


def stream_of(files: dict[str, bytes]) -> io.BytesIO:
    """What another machine sends: a tar stream of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w|") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return io.BytesIO(out.getvalue())


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="outside of its folder"):
        unpack(stream_of({".list": b'{"../evil": [4, 1]}', "../evil": b"evil"}), tmp_path / "copy")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("place", ["../authorized_keys", "below/../../authorized_keys", "{outside}/authorized_keys"])
def test_another_machine_cannot_have_files_outside_of_the_copy_removed(place: str, tmp_path: Path) -> None:
    """It names a file in one list and leaves it out of the next one, as if the file had been deleted there."""
    mine, target = tmp_path / "authorized_keys", tmp_path / "copy"
    mine.write_text("mine")
    listed = json.dumps({place.format(outside=tmp_path): [1, 1]}).encode()
    with pytest.raises(StorageError, match=r"outside of its folder: .*authorized_keys"):
        unpack(stream_of({".list": listed, ".end": b""}), target)
    unpack(stream_of({".list": b"{}", ".end": b""}), target)
    (target / copying.MANIFEST).write_bytes(listed)  # the list in a bucket may have been written by others
    with pytest.raises(StorageError, match="outside of its folder"):
        unpack(stream_of({".list": b"{}", ".end": b""}), target)
    assert mine.read_text() == "mine"


def test_a_folder_may_be_named_by_a_relative_path(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert copy(Path("../data"), Path("../copy")) == 3


def test_a_folder_that_cannot_be_written_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="copying to"):
        copy(root, tmp_path / "file" / "copy")


def test_a_database_that_cannot_be_read_is_named(root: Path, tmp_path: Path) -> None:
    (root / "art.db").unlink()
    (root / "art.db").mkdir()
    with pytest.raises(StorageError, match=r"copying .*art.db failed"):
        copy(root, tmp_path / "copy")
