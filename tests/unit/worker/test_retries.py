"""How often a call is made whose process dies every time: as often as `CALL_ATTEMPTS` says, never more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art.config import ModelSettings, ServerConfig, TrainConfig
from art.config.server import CALL_ATTEMPTS
from art.errors import ProcessError, StorageError
from art.protocol import calls
from art.protocol.rpc import retry_on_process_death
from art.runtime.hosting.host import BaseModelHost
from art.storage.layout import DataDir
from tests.support.fake_process import Connection, processes_with
from tests.support.published import make_checkpoint
from tests.support.trainer_samples import random_samples

ATTEMPTS = CALL_ATTEMPTS


class Mortal(Connection):
    """A connection whose process dies under most calls."""

    def __init__(self) -> None:
        super().__init__()
        self.deadly = ("load_adapter", "score", "train", "trial", "init_checkpoint")
        self.files: list[tuple[Path, bytes]] = []
        """The samples that came with each call."""

    def note(self, call: calls.Call[Any]) -> None:
        if isinstance(call, calls.SampleCall) and isinstance(call.samples, calls.SampleFile):
            self.files.append((call.samples.path, call.samples.path.read_bytes()))
        super().note(call)


@pytest.fixture
def client() -> Mortal:
    return Mortal()


@pytest.fixture
def host(client: Mortal, tmp_path: Path) -> BaseModelHost:
    processes = processes_with(client)
    return BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig(), make_process=processes)


async def test_a_publish_is_tried_as_often_as_the_policy_says(
    host: BaseModelHost, client: Mortal, tmp_path: Path
) -> None:
    with pytest.raises(ProcessError, match="died during load_adapter"):
        await host.adapters.load("m@1", await make_checkpoint(tmp_path / "0001", adapter=1))
    assert client.made == ["load_adapter m@1"] * ATTEMPTS
    assert not host.adapters.is_loaded("m@1")


async def test_a_step_is_tried_as_often_as_the_policy_says_and_a_trial_once(
    host: BaseModelHost, client: Mortal, tmp_path: Path
) -> None:
    step = calls.Train(samples=[], config=TrainConfig(), from_checkpoint=tmp_path, to_checkpoint=tmp_path, job_id="job")
    with pytest.raises(ProcessError, match="died during train"):
        await host.trainer.train(step)
    with pytest.raises(ProcessError, match="died during init_checkpoint"):
        await host.trainer.init_checkpoint(tmp_path, None)
    with pytest.raises(ProcessError, match="died during trial"):
        await host.trainer.trial([], None)
    assert client.made == ["train"] * ATTEMPTS + ["init_checkpoint"] * ATTEMPTS + ["trial"]


async def test_each_attempt_gets_the_same_samples_and_their_file_is_deleted_after_the_call(
    host: BaseModelHost, client: Mortal, tmp_path: Path
) -> None:
    step = calls.Train(
        samples=random_samples(0), config=TrainConfig(), from_checkpoint=tmp_path, to_checkpoint=tmp_path, job_id="job"
    )
    with pytest.raises(ProcessError):
        await host.trainer.train(step)
    with pytest.raises(ProcessError):
        await host.trainer.trial(random_samples(0), None)
    [path, *others], contents = zip(*client.files, strict=True)
    assert others[: ATTEMPTS - 1] == [path] * (ATTEMPTS - 1)
    assert len(set(contents)) == 1
    assert path.parent == DataDir(tmp_path).samples
    assert list(DataDir(tmp_path).samples.iterdir()) == []


async def test_samples_that_cannot_be_written_are_an_error_of_the_disk(host: BaseModelHost, tmp_path: Path) -> None:
    DataDir(tmp_path).samples.write_text("a file in the way")
    with pytest.raises(StorageError, match=r"writing .*\.samples.* failed"):
        await host.trainer.trial(random_samples(0), None)


async def test_a_process_that_cannot_start_is_final() -> None:
    asked: list[int] = []

    async def connect() -> Any:
        asked.append(1)
        raise ProcessError("it was given up")

    async def never(client: Any) -> None:
        raise AssertionError

    with pytest.raises(ProcessError, match="given up"):
        await retry_on_process_death(connect, never, "a call", ATTEMPTS)
    assert len(asked) == 1
