from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.errors import CorruptCheckpointError, DiskFullError, NotFoundError, StorageError
from art.storage import atomic, checkpoints
from art.storage.checkpoints import CheckpointState, Probe

STATE = CheckpointState(
    step=3,
    job_id="job-00000001",
    base_model="m",
    lora={"rank": 4},
    config={},
    num_updates=3,
    rng="",
    metrics={"a/b": 1.5},
)
FILES = (*checkpoints.ADAPTER_FILES, *checkpoints.COMMON_FILES)
PROBE = Probe(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0], base_logprobs=[-1.5, -2.5])


def contents(**changes: bytes) -> dict[str, bytes]:
    files = {
        checkpoints.ADAPTER_WEIGHTS: b"weights" * 1000,
        checkpoints.ADAPTER_CONFIG: b"{}",
        checkpoints.OPTIMIZER: b"moments" * 2000,
        checkpoints.STATE: STATE.model_dump_json().encode(),
        checkpoints.PROBE: PROBE.model_dump_json().encode(),
    }
    return files | changes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoint(directory: Path) -> Path:
    checkpoints.write_checkpoint(directory / "0003", contents())
    return directory / "0003"


def test_a_checkpoint_is_read_back_as_it_was_written(checkpoint: Path) -> None:
    checkpoints.verify(checkpoint)
    assert checkpoints.read_state(checkpoint) == STATE
    assert checkpoints.read_probe(checkpoint) == PROBE
    assert checkpoints.read_file(checkpoint, checkpoints.OPTIMIZER) == b"moments" * 2000
    assert sorted(entry.name for entry in checkpoint.iterdir()) == sorted([*FILES, checkpoints.MANIFEST])


def test_the_identity_depends_on_the_content(directory: Path, checkpoint: Path) -> None:
    same = checkpoints.write_checkpoint(directory / "0004", contents())
    other = checkpoints.write_checkpoint(directory / "0005", contents(**{checkpoints.ADAPTER_WEIGHTS: b"x"}))
    assert same == checkpoints.identify(checkpoint) == checkpoints.identify(directory / "0004")
    assert other == checkpoints.identify(directory / "0005") != same


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(checkpoint: Path, name: str, damage: str) -> None:
    file = checkpoint / name
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=name):
        checkpoints.verify(checkpoint)


@pytest.mark.parametrize("manifest", [b"", b"{", b'{"files": {}}', b'{"files": {}, "more": 1}'])
def test_a_damaged_manifest_is_reported(checkpoint: Path, manifest: bytes) -> None:
    (checkpoint / checkpoints.MANIFEST).write_bytes(manifest)
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        checkpoints.verify(checkpoint)


def test_a_missing_checkpoint_is_not_found(directory: Path) -> None:
    with pytest.raises(NotFoundError, match="0009"):
        checkpoints.verify(directory / "0009")


def test_unknown_and_missing_files_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="pickle"):
        checkpoints.write_checkpoint(directory / "0001", contents(pickle=b""))
    with pytest.raises(ValueError, match=checkpoints.PROBE):
        checkpoints.write_checkpoint(
            directory / "0001", {k: v for k, v in contents().items() if k != checkpoints.PROBE}
        )


def test_a_full_checkpoint_may_have_further_files_of_its_model(directory: Path) -> None:
    model = {checkpoints.MODEL_WEIGHTS: b"weights", checkpoints.MODEL_CONFIG: b"{}", "tokenizer.json": b"[]"}
    common = {name: data for name, data in contents().items() if name in checkpoints.COMMON_FILES}
    checkpoints.write_checkpoint(directory / "0004", model | common)
    checkpoints.verify(directory / "0004")
    (directory / "0004/tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        checkpoints.verify(directory / "0004")
    checkpoints.write_checkpoint(directory / "0005", contents())
    assert [checkpoints.is_full(directory / name) for name in ("0004", "0005")] == [True, False]
    del model[checkpoints.MODEL_CONFIG]
    with pytest.raises(ValueError, match=r"config\.json"):
        checkpoints.write_checkpoint(directory / "0006", model | common)


def test_state_refuses_unknown_fields_and_non_finite_metrics(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="finite"):
        CheckpointState.model_validate(STATE.model_dump() | {"metrics": {"loss": float("nan")}})
    (checkpoint / checkpoints.STATE).write_text(STATE.model_dump_json()[:-1] + ', "extra": 1}')
    with pytest.raises(CorruptCheckpointError, match=checkpoints.STATE):
        checkpoints.read_state(checkpoint)


def test_only_complete_checkpoints_are_listed(directory: Path) -> None:
    assert checkpoints.list_steps(directory) == []
    assert checkpoints.latest(directory) is None
    for step in (10, 2, 12345):
        checkpoints.write_checkpoint(directory / f"{step:04d}", contents())
    (directory / "notes").mkdir()
    (directory / "0099").mkdir()  # no manifest: not a checkpoint
    assert checkpoints.list_steps(directory) == [2, 10, 12345]
    assert checkpoints.latest(directory) == 12345
    checkpoints.delete(directory / "0010")
    checkpoints.delete(directory / "0010")
    assert checkpoints.list_steps(directory) == [2, 12345]


def test_an_existing_checkpoint_is_not_overwritten(checkpoint: Path) -> None:
    with pytest.raises(StorageError):
        checkpoints.write_checkpoint(checkpoint, contents(**{checkpoints.ADAPTER_WEIGHTS: b"new"}))
    checkpoints.verify(checkpoint)
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["0003"]


def test_a_full_disk_leaves_no_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    with pytest.raises(DiskFullError, match=r"0001.*Free space"):
        checkpoints.write_checkpoint(directory / "0001", contents())
    assert list(directory.iterdir()) == []
    target = directory / "file.json"
    with pytest.raises(DiskFullError):
        atomic.write_file(target, b"x")
    assert list(directory.iterdir()) == []


def test_write_file_replaces_the_content(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    atomic.write_file(target, b"one")
    atomic.write_file(target, b"two")
    assert target.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_only_temporary_files_of_ended_processes_are_removed(directory: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    directory.mkdir()
    names = [f".0001.tmp-{dead.pid}", f".0002.tmp-{os.getppid()}", f".0003.tmp-{os.getpid()}"]
    for name in names:
        (directory / name).mkdir()
        (directory / name / "part").write_bytes(b"x")
    (directory / f".index.tmp-{dead.pid}").write_bytes(b"x")
    checkpoints.write_checkpoint(directory / "0007", contents())
    left = {entry.name for entry in directory.iterdir()}
    assert left == {"0007", names[1], names[2]}
    assert checkpoints.list_steps(directory) == [7]


def test_a_killed_writer_leaves_no_checkpoint(directory: Path) -> None:
    """The writer is killed after it has written the files and before the rename."""
    code = f"""
import os, signal
from pathlib import Path
from art.storage import atomic, checkpoints
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.write_checkpoint(Path({str(directory / "0001")!r}), dict.fromkeys({FILES!r}, b"x"))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    assert checkpoints.list_steps(directory) == []
    assert len(list(directory.iterdir())) == 1
    checkpoints.write_checkpoint(directory / "0001", contents())
    assert [entry.name for entry in directory.iterdir()] == ["0001"]
    checkpoints.verify(directory / "0001")


def test_checkpoints_are_read_without_torch() -> None:
    code = "import sys, art.storage.checkpoints, art.protocol.samples, art.credit.advantages; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"


def test_a_file_is_written_in_pieces(directory: Path, checkpoint: Path) -> None:
    pieces = (memoryview(b"moments" * 500) for _ in range(4))
    files: dict[str, checkpoints.Content] = {**contents(), checkpoints.OPTIMIZER: pieces}
    assert checkpoints.write_checkpoint(directory / "0004", files) == checkpoints.identify(checkpoint)
    checkpoints.verify(directory / "0004")


def test_what_fails_between_two_pieces_leaves_nothing(directory: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"moments"
        raise OSError(errno.ENOSPC, "no space left on device")

    with pytest.raises(DiskFullError):
        checkpoints.write_checkpoint(directory / "0004", {**contents(), checkpoints.OPTIMIZER: pieces()})
    assert list(directory.iterdir()) == []


def test_a_checkpoint_without_its_moments_is_valid_and_the_same(checkpoint: Path) -> None:
    identity = checkpoints.identify(checkpoint)
    checkpoints.remove_moments(checkpoint)
    checkpoints.verify(checkpoint)
    assert not checkpoints.has_moments(checkpoint)
    assert checkpoints.identify(checkpoint) == identity
    listed = checkpoints.list_files(checkpoint)
    assert checkpoints.OPTIMIZER not in listed
    assert {*listed, checkpoints.MANIFEST} == {entry.name for entry in checkpoint.iterdir()}
    checkpoints.remove_moments(checkpoint)  # again changes nothing
    (checkpoint / checkpoints.MOMENTS_REMOVED).unlink()
    with pytest.raises(CorruptCheckpointError, match=checkpoints.OPTIMIZER):
        checkpoints.verify(checkpoint)


def test_a_removal_that_was_cut_off_leaves_the_moments_valid(checkpoint: Path) -> None:
    moments = (checkpoint / checkpoints.OPTIMIZER).read_bytes()
    checkpoints.remove_moments(checkpoint)
    (checkpoint / checkpoints.OPTIMIZER).write_bytes(moments)
    assert checkpoints.has_moments(checkpoint)
    checkpoints.verify(checkpoint)
    (checkpoint / checkpoints.OPTIMIZER).write_bytes(moments[:-1])
    with pytest.raises(CorruptCheckpointError, match=checkpoints.OPTIMIZER):
        checkpoints.verify(checkpoint)


def test_old_moments_are_removed_but_not_what_a_job_needs(directory: Path) -> None:
    for step in range(7):
        checkpoints.write_checkpoint(directory / f"{step:04d}", contents())
    needed = [directory / "0001"]
    assert checkpoints.remove_old_moments(directory, newest=5, keep=3, needed=needed) == [0, 2]
    kept = [step for step in range(7) if checkpoints.has_moments(directory / f"{step:04d}")]
    assert kept == [1, 3, 4, 5, 6]
    assert checkpoints.remove_old_moments(directory, newest=5, keep=3) == [1]
    assert checkpoints.remove_old_moments(directory, newest=5, keep=3) == []
