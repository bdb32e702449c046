"""A trainer of two processes under its supervisor: calls, failures, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from art.config import LoraConfig, ServerConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ArtError, ConfigError, InvalidRequestError, NothingTrainableError, ProcessError
from art.protocol.calls import Call, InitCheckpoint, SampleFile, StartTrainer, Train, TrainSft
from art.protocol.rpc import RpcClient
from art.protocol.samples import StepResult, TrainingSample
from art.storage import checkpoints
from art.worker.process import ChildProcess, ChildSpec
from tests.support.calls import raw
from tests.support.processes import children_of, wait_until_gone
from tests.support.trainer_samples import sample_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

RL = TrainConfig(learning_rate=1e-2, mismatch=None)
MANY_UPDATES = TrainSFTConfig(batch_size=1)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


def supervised(model: str, log_path: Path) -> ChildProcess:
    settings = TrainerConfig(device="cpu", num_threads=2, num_processes=2)

    async def start(client: RpcClient) -> None:
        await client.call(StartTrainer(model=model, config=settings))

    spec = ChildSpec(
        name="trainer",
        module="art.worker.trainer_child",
        log_path=log_path,
        num_threads=2,
        config=ServerConfig(child_start_timeout_s=120.0),
    )
    return ChildProcess(spec, start)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChildProcess]:
    trainer = supervised(model, tmp_path_factory.mktemp("logs") / "trainer.log")
    await trainer.connect()
    yield trainer
    await trainer.close()


def samples(count: int, *, component: str = "rl") -> list[TrainingSample]:
    """Two shared tokens, then one of its own, and one that all learn."""
    return [
        TrainingSample(
            sample_id=f"s{i}",
            rollout_id=f"s{i}",
            token_ids=[1, 2, 3 + i % 20, 5],
            loss_mask=[False, False, True, True],
            sampling_logprobs=[0.0, 0.0, -1.0, -1.0],
            advantages=[0.0, 0.0, 1.0, -0.5 * (i % 3)],
            component=component,  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def job(directory: Path, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "samples": sample_file(directory, changes.pop("samples", samples(12))),
        "config": RL,
        "from_checkpoint": directory / f"{step - 1:04d}",
        "to_checkpoint": directory / f"{step:04d}",
        "job_id": f"job-{step:08d}",
    } | changes


async def init(client: RpcClient, directory: Path) -> None:
    await client.call(InitCheckpoint(path=directory / "0000", lora=LoraConfig(rank=4)))


def pids_of_team(trainer: ChildProcess) -> list[int]:
    """Process 0, and those that it started."""
    assert trainer.pid is not None
    return [trainer.pid, *children_of(trainer.pid)]


async def test_each_process_has_a_log(trainer: ChildProcess) -> None:
    await trainer.connect()
    assert "process 1 of 2 joined" in trainer.spec.log_path.with_name("trainer.log.1").read_text()


async def test_calls_failed_calls_and_steps(trainer: ChildProcess, tmp_path: Path) -> None:
    client = await trainer.connect()
    pids = pids_of_team(trainer)
    assert len(pids) == 2
    await init(client, tmp_path)
    results = [result async for result in client.stream(Train(**job(tmp_path, 1)))]
    assert results[-1].step == 1
    assert results[-1].metrics["data/step_trainable_tokens"] == 24
    assert all(result.done <= result.total for result in results[:-1])
    refusals: list[tuple[type[ArtError], Call[Any]]] = [
        (NothingTrainableError, Train(**job(tmp_path, 2, samples=[]))),
        (
            ConfigError,
            raw("train", **job(tmp_path, 2, samples=[], config=RL.model_dump() | {"learning_rate": -1})),
        ),
        (InvalidRequestError, Train(**job(tmp_path, 2) | {"samples": SampleFile(tmp_path / "gone")})),
        (InvalidRequestError, raw("sleep")),
    ]
    for kind, call in refusals:
        with pytest.raises(kind):
            await client.call(call)
    results = [result async for result in client.stream(Train(**job(tmp_path, 2)))]
    assert [result.step for result in results if isinstance(result, StepResult)] == [2]
    assert pids_of_team(trainer) == pids
    assert trainer.num_restarts == 0


async def test_ctrl_c_is_left_to_the_parent(trainer: ChildProcess, tmp_path: Path) -> None:
    client = await trainer.connect()
    for pid in pids_of_team(trainer):
        os.kill(pid, signal.SIGINT)
    await init(client, tmp_path)
    assert trainer.num_restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_the_death_of_one_in_a_step_ends_all_and_the_step_is_made_again(
    rank: int, trainer: ChildProcess, tmp_path: Path
) -> None:
    client = await trainer.connect()
    await init(client, tmp_path)
    pids, restarts = pids_of_team(trainer), trainer.num_restarts
    long_job = job(tmp_path, 1, samples=samples(300, component="sft"), config=MANY_UPDATES)
    stream = client.stream(TrainSft(**long_job))
    assert (await anext(stream)).done == 1
    os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(ProcessError) as death:
        [result async for result in stream]
    if rank == 1:
        assert f"process 1 of this trainer (pid {pids[1]}) died (signal 9, SIGKILL)" in death.value.message
    wait_until_gone(pids)
    assert checkpoints.list_steps(tmp_path) == [0]
    client = await trainer.connect()
    assert trainer.num_restarts == restarts + 1
    short_job = job(tmp_path, 1, samples=samples(6, component="sft"), config=MANY_UPDATES)
    results = [result async for result in client.stream(TrainSft(**short_job))]
    assert results[-1].step == 1
    assert checkpoints.read_state(tmp_path / "0001").num_updates == 6


async def test_closing_ends_all(trainer: ChildProcess) -> None:
    """Last, as it ends the trainer that the tests share."""
    await trainer.connect()
    pids = pids_of_team(trainer)
    assert len(pids) == 2
    await trainer.close()
    wait_until_gone(pids)
