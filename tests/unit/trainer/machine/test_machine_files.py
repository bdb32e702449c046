"""Machines that share no file system get the files that a call reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from art.config import DppoConfig, KlConfig, TrainConfig
from art.config.nodes import RECEIVED_VARIABLE
from art.errors import ConfigError, DiskFullError, StorageError
from art.protocol.calls import SampleFile
from art.storage import checkpoints
from art.storage.lock import take_lock
from art.trainer.machine.received import Received
from tests.support.trainer_pair import Member, Pair, init, train, trial
from tests.support.trainer_samples import random_samples, sample_file
from tests.support.two_machines import (
    copy,
    count_sent,
    fail_within,
    read,
    two_machines,
    with_free_bytes,
    with_full_disk,
    with_smaller_file,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@pytest.fixture(scope="module")
def pair(root: Path) -> Iterator[Pair]:
    with two_machines(root) as pair:
        yield pair


def fill(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(1, 1_600_000_000_123_456_789))
    return folder


def received(root: Path, number: int = 1) -> list[str]:
    """Names of the folders of received files on a machine."""
    return sorted(entry.name for entry in (root / f"received-{number}").glob("*/*") if entry.is_dir())


def both_fail(results: list[Any], kind: type[Exception]) -> str:
    assert [type(result) for result in results] == [kind, kind], results
    return str(results[1])


def test_a_folder_and_a_file_arrive_as_they_are_and_go_when_they_were_read(root: Path, pair: Pair) -> None:
    big = os.urandom(33 * 2**20)  # three pieces, the last one small
    fill(root / "0/arriving", big=big, small=b"1", empty=b"")
    (here, expected), (there, found) = pair.run(read, Path("arriving"))
    assert here == "arriving"
    assert Path(there).is_relative_to(root / "received-1")
    assert {name: content for name, (_, content) in found.items()} == {"big": big, "small": b"1", "empty": b""}
    assert found == expected
    (_, expected), (there, found) = pair.run(read, Path("arriving/small"))
    assert Path(there).name == "small"
    assert found == expected
    assert received(root) == []
    assert received(root, 0) == []
    assert not (root / "1/arriving").exists()


def test_files_that_machines_share_are_read_where_they_are(root: Path, pair: Pair) -> None:
    shared = fill(root / "shared", a=b"1", b=b"2")
    for results in (pair.run(read, shared), pair.run(read, shared / "a")):
        assert results[0] == results[1]
    assert sorted(path.name for path in shared.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(("places", "local_size"), [((0, 0, 1), 1), ((0, 0, 1, 1), 2)])
def test_only_a_machine_that_lacks_files_receives_them_and_once(
    places: tuple[int, ...], local_size: int, tmp_path: Path
) -> None:
    """Three machines, two of which share a folder; and two machines with two processes each."""
    folder = fill(tmp_path / "0/partly", a=b"1", b=b"2")

    def untouched() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_ctime_ns) for path in folder.iterdir()}

    before = untouched()
    with two_machines(tmp_path, places, local_size=local_size) as pair:
        found = pair.run(count_sent, read, Path("partly"))
    assert sum(sent for _, sent in found) == 2
    assert len({str(content) for (_, content), _ in found}) == 1
    copies = {where for (where, _), _ in found[2:]}
    assert [where for (where, _), _ in found[:2]] == ["partly", "partly"]
    assert [Path(copy).is_relative_to(tmp_path / "received-1") for copy in copies] == [True]
    assert received(tmp_path) == []
    assert not (tmp_path / "received-0").exists()
    assert untouched() == before


@pytest.mark.parametrize("content", [b"same", b"Same"])
def test_files_of_another_time_are_compared_by_content(root: Path, pair: Pair, content: bytes) -> None:
    for number in (0, 1):
        fill(root / f"{number}/twice", a=b"a", b=b"same" if number == 0 else content)
    os.utime(root / "1/twice/b")
    _, (there, found) = pair.run(read, Path("twice"))
    assert (there == "twice") == (content == b"same")
    assert [content for _, content in found.values()] == [b"a", b"same"]
    assert (root / "1/twice/b").read_bytes() == content, "files that did not come this way are never changed"


def test_a_base_model_stays_and_is_found_by_the_next_process(tmp_path: Path) -> None:
    model = fill(tmp_path / "0/model", weights=b"w", changed=b"old", gone=b"x")
    (model / "weights.pth").write_bytes(b"of another program")
    (model / ".git").mkdir()
    with two_machines(tmp_path) as pair:
        here, there = pair.run(copy, "model")
        assert here is None
        assert sorted(path.name for path in Path(there).iterdir()) == ["changed", "gone", "weights"]
        assert pair.run(copy, "owner/hub-id") == [None, None]
    first = (Path(there) / "weights").stat().st_ino
    (model / "gone").unlink()
    (model / "changed").write_bytes(b"new")
    with two_machines(tmp_path) as pair:
        assert pair.run(copy, "model") == [None, there]
        assert {path.name: path.read_bytes() for path in Path(there).iterdir()} == {"changed": b"new", "weights": b"w"}
        assert (Path(there) / "weights").stat().st_ino == first, "it was sent a second time"


def test_what_nobody_uses_is_deleted_with_the_next_file_and_nothing_else(root: Path, pair: Pair) -> None:
    fill(root / "0/next", a=b"1")
    _, (there, _) = pair.run(read, Path("next"))
    folder = Path(there).parent
    fill(folder / "call-0", leftover=b"of a process that was killed")
    fill(folder / "old-model-0", leftover=b"")
    fill(folder / "used-model-0", weights=b"")
    lock = take_lock(folder / "used-model-0.lock")
    assert lock is not None
    _, (there, found) = pair.run(read, Path("next"))
    assert (Path(there).name, list(found)) == ("call-0", ["a"])
    assert received(root) == ["used-model-0"]
    os.close(lock)
    _, (there, _) = pair.run(read, Path("next"))
    assert received(root) == []


def test_two_processes_of_a_machine_receive_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECEIVED_VARIABLE, str(tmp_path))
    one, other = Received("call"), Received("call")
    assert (one.folder.name, other.folder.name) == ("call-0", "call-1")
    one.delete()
    assert Received("call").folder == one.folder
    assert other.folder.is_dir()


# -- failures --


def test_a_failure_while_reading_leaves_nothing_locked(root: Path, pair: Pair) -> None:
    fill(root / "0/failing", a=b"1")
    for _ in range(2):
        assert both_fail(pair.run(fail_within, Path("failing")), StorageError) == "the disk of machine 1 is broken"
    assert received(root) == ["call-0"]
    pair.run(read, Path("failing"))
    assert received(root) == []


def test_a_path_that_is_nowhere(pair: Pair) -> None:
    assert "No such file" in both_fail(pair.run(read, Path("nowhere")), StorageError)


def test_a_disk_that_is_too_small(root: Path, pair: Pair) -> None:
    fill(root / "0/large", a=bytes(3000))
    results = pair.run(with_free_bytes, 2999, Path("large"))
    assert "needs 0.0 GB there: free space, or set `received`" in both_fail(results, DiskFullError)
    assert not isinstance(pair.run(with_free_bytes, 3000, Path("large"))[1], Exception)


def test_a_file_that_changes_while_it_is_sent_fails_the_call_and_not_the_next_one(root: Path, pair: Pair) -> None:
    fill(root / "0/shrinking", a=b"12345", b=b"1")
    results = pair.run(with_smaller_file, Path("shrinking/a"))
    assert "became shorter while it was sent" in both_fail(results, StorageError)
    assert pair.run(read, Path("shrinking"))[1][1].keys() == {"a", "b"}


def test_a_disk_that_fills_up_fails_the_call_and_not_the_next_one(root: Path, pair: Pair) -> None:
    fill(root / "0/refused", a=bytes(40 * 2**20), b=b"1")
    text = both_fail(pair.run(with_full_disk, Path("refused")), DiskFullError)
    assert "in process 1 of the trainer, on " in text
    assert "the disk is full: writing " in text
    assert pair.run(read, Path("refused"))[1][1].keys() == {"a", "b"}


def test_a_machine_without_a_folder_for_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "received-1").write_text("a file in the way")
    fill(tmp_path / "0/sent", a=b"1")
    with two_machines(tmp_path) as pair:
        text = both_fail(pair.run(read, Path("sent")), ConfigError)
        assert "process 1 of the trainer, on " in text
        assert f"{tmp_path / 'received-1'}" in text
        assert "Set `received` of this machine" in text
        (tmp_path / "received-1").unlink()
        pair.run(read, Path("sent"))


# -- training --


def weights(checkpoint: Path) -> dict[str, np.ndarray]:
    return load_file(checkpoint / checkpoints.ADAPTER_WEIGHTS) | load_file(checkpoint / checkpoints.OPTIMIZER)


def test_a_training_whose_files_are_on_one_machine(
    root: Path, pair: Pair, model_path: Callable[[str], str], tmp_path: Path
) -> None:
    """The last step is made twice, so it needs an older checkpoint than the one in memory."""
    model = model_path("Qwen3")
    shutil.copytree(model, root / "0/base")
    file = sample_file(root / "0", random_samples(3, 8))
    anchored = TrainConfig(learning_rate=1e-2, mismatch=None, loss=(DppoConfig(), KlConfig(weight=0.1, reference=0)))

    def run(make: Callable[..., Any], model: str, folder: Path, samples: SampleFile) -> None:
        make(init, model, folder)
        job: dict[str, Any] = {"samples": samples, "config": anchored, "references": {0: folder / "0000"}}
        for number in (1, 2):
            make(train, model, folder, number, **job)
        make(train, model, folder, 2, to=folder / "again", **job)
        took = make(trial, model, samples)
        assert took["num_tree_tokens"] > 0

    def together(*args: Any, **kwargs: Any) -> Any:
        results = pair.run(*args, **kwargs)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results[0]

    alone = Member()
    run(lambda work, *args, **kwargs: work(alone, *args, **kwargs), model, tmp_path, file)
    run(together, "base", Path("checkpoints"), SampleFile(Path(file.path.name)))
    for name in ("0001", "0002", "again"):
        expected, found = weights(tmp_path / name), weights(root / "0/checkpoints" / name)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert np.linalg.norm(found[key] - value) <= 1e-4 * np.linalg.norm(value), (name, key)
    assert not (root / "1/checkpoints").exists()
    assert len(received(root)) == 1, "the base model stays"


def test_a_checkpoint_in_memory_is_not_sent(root: Path, pair: Pair, model_path: Callable[[str], str]) -> None:
    model, job = model_path("Qwen3"), {"samples": random_samples(3, 8), "config": TrainConfig(mismatch=None)}
    pair.run(init, model, Path("resident"))
    pair.run(train, model, Path("resident"), 1, **job)
    (step, sent), (_, got) = pair.run(count_sent, train, model, Path("resident"), 2, **job)
    assert (step.step, sent, got) == (2, 0, 0)
    (step, sent), _ = pair.run(count_sent, train, model, Path("resident"), 1, to=Path("resident/again"), **job)
    folder = root / "0/resident/0000"
    assert (step.step, sent) == (1, sum(file.stat().st_size for file in folder.iterdir()))
