"""The trainer as a process of its own, spoken to through frames."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from art.config import LoraConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ConfigError, InvalidRequestError, NothingTrainableError, ProcessError, TrainingError
from art.protocol.calls import InitCheckpoint, Progress, Sleep, StartTrainer, Train, TrainSft
from art.protocol.rpc import RpcClient
from art.protocol.samples import StepResult, TrainingSample
from art.storage import checkpoints
from art.worker.launch import Launch, Process, WarmParent
from tests.support.calls import raw
from tests.support.trainer_samples import random_samples, sample_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRAINER = TrainerConfig(device="cpu", num_threads=1)
LORA = LoraConfig(rank=8, alpha=16)
RL = TrainConfig(learning_rate=1e-2, mismatch=None)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass
class TrainerProcess:
    client: RpcClient
    process: Process
    heartbeats: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "trainer.log"


def sft_samples(seed: int, count: int = 8) -> list[TrainingSample]:
    return [replace(sample, component="sft") for sample in random_samples(seed, count)]


async def spawn(log: Path, warm_parent: WarmParent) -> tuple[socket.socket, Process]:
    """Start a trainer process: forked by a warm parent, where the system has one, or in a new interpreter."""
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as output:
        launch = Launch(
            module="art.worker.trainer_child", argv=[], frames=theirs, log=output, environment=os.environ | ENVIRONMENT
        )
        process = await warm_parent.fork(launch, timeout_s=120)
        return ours, process or await launch.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def warm_parent() -> AsyncIterator[WarmParent]:
    """What imports torch once for all trainer processes of this file."""
    parent = WarmParent()
    yield parent
    await parent.close()


@contextlib.asynccontextmanager
async def trainer_process(warm_parent: WarmParent, log: Path) -> AsyncIterator[TrainerProcess]:
    ours, process = await spawn(log, warm_parent)
    beats: list[dict[str, Any]] = []
    client = await RpcClient.connect(ours, beats.append)
    try:
        yield TrainerProcess(client, process, beats)
    finally:
        await client.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def job(directory: Path, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "samples": sample_file(directory, changes.pop("samples", random_samples(step))),
        "config": RL,
        "from_checkpoint": directory / f"{step - 1:04d}",
        "to_checkpoint": directory / f"{step:04d}",
        "job_id": f"job-{step:08d}",
    } | changes


async def test_trains_reports_survives_errors_and_is_killed(
    model_path: Callable[[str], str], warm_parent: WarmParent, tmp_path: Path, log: Path
) -> None:
    model = model_path("Qwen3")
    async with trainer_process(warm_parent, log) as trainer:
        client = trainer.client
        with pytest.raises(InvalidRequestError, match="call `start_trainer` first"):
            await client.call(Train(**job(tmp_path, 1)))
        with pytest.raises(ConfigError, match="cannot load base model"):
            await client.call(StartTrainer(model=str(tmp_path / "none"), config=TRAINER))
        await client.call(StartTrainer(model=model, config=TRAINER))
        assert await client.call(InitCheckpoint(path=tmp_path / "0000", lora=LORA)) == StepResult(step=0)

        results = [result async for result in client.stream(Train(**job(tmp_path, 1)))]
        done = [r.done for r in results[:-1] if r.done > 0]
        assert done == list(range(1, len(done) + 1))
        assert done
        assert results[-1].step == 1
        assert results[-1].metrics["data/step_trainable_tokens"] > 0
        checkpoints.verify(tmp_path / "0001")

        again = [result async for result in client.stream(Train(**job(tmp_path, 1)))]
        assert len(again) == 1  # recorded: no progress, no training
        assert again[0].metrics["loss/train"] == results[-1].metrics["loss/train"]

        with pytest.raises(NothingTrainableError):
            await client.call(Train(**job(tmp_path, 2, samples=[])))
        with pytest.raises(ConfigError, match="learning_rate"):
            await client.call(raw("train", **job(tmp_path, 2, config=RL.model_dump() | {"learning_rate": -1})))
        with pytest.raises(InvalidRequestError, match="unknown method 'sleep'; this process has start_trainer, "):
            await client.call(Sleep())
        with pytest.raises(InvalidRequestError, match="`train` has invalid parameters: job_id: "):
            await client.call(raw("train", **job(tmp_path, 2, job_id=None)))
        sft_job = job(tmp_path, 2, config=TrainSFTConfig(), samples=sft_samples(2))
        sft = [result async for result in client.stream(TrainSft(**sft_job))]
        assert sft[-1].step == 2
        assert trainer.heartbeats
        assert "doing" in trainer.heartbeats[-1]

        many_updates = TrainSFTConfig(batch_size=1)
        long_job = client.stream(TrainSft(**job(tmp_path, 3, samples=sft_samples(1, count=500), config=many_updates)))
        assert await anext(long_job) == Progress(done=1, total=500)
        trainer.process.kill()
        with pytest.raises(ProcessError):
            [result async for result in long_job]
    assert checkpoints.list_steps(tmp_path) == [0, 1, 2]

    async with trainer_process(warm_parent, log) as trainer:  # a new process goes on where the files end
        await trainer.client.call(StartTrainer(model=model, config=TRAINER))
        results = [result async for result in trainer.client.stream(Train(**job(tmp_path, 3)))]
        assert results[-1].step == 3


def address_space_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a running process")
async def test_a_trainer_without_memory_says_so_and_trains_the_step_when_there_is_some(
    model_path: Callable[[str], str], warm_parent: WarmParent, tmp_path: Path, log: Path
) -> None:
    async with trainer_process(warm_parent, log) as trainer:
        await trainer.client.call(StartTrainer(model=model_path("Qwen3"), config=TRAINER))
        await trainer.client.call(InitCheckpoint(path=tmp_path / "0000", lora=LORA))
        pid = trainer.process.pid
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (address_space_bytes(pid) - 2**27, unlimited[1]))
        with pytest.raises(TrainingError, match=r"the trainer ran out of memory in `train` .*train the same"):
            await trainer.client.call(Train(**job(tmp_path, 1)))
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
        results = [result async for result in trainer.client.stream(Train(**job(tmp_path, 1)))]
    assert results[-1].step == 1


async def test_a_waiting_call_can_be_cancelled(
    model_path: Callable[[str], str], warm_parent: WarmParent, tmp_path: Path, log: Path
) -> None:
    async with trainer_process(warm_parent, log) as trainer:
        client = trainer.client
        os.kill(trainer.process.pid, signal.SIGSTOP)  # until all that is sent lies in its socket
        start = asyncio.create_task(client.call(StartTrainer(model=model_path("Qwen3"), config=TRAINER)))
        dropped = asyncio.create_task(client.call(InitCheckpoint(path=tmp_path / "dropped", lora=LORA)))
        while len(client._pending) < 2:
            await asyncio.sleep(0)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        await asyncio.sleep(0)  # the turn of the event loop in which the frames go out
        os.kill(trainer.process.pid, signal.SIGCONT)
        await start
        await client.call(InitCheckpoint(path=tmp_path / "kept", lora=LORA))
    assert sorted(os.listdir(tmp_path)) == ["kept"]


async def test_ends_with_its_parent(warm_parent: WarmParent, log: Path) -> None:
    ours, process = await spawn(log, warm_parent)
    ours.close()
    async with asyncio.timeout(60):
        assert await process.wait() == 0
