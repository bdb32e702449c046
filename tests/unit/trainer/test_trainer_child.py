"""The trainer as a process of its own, spoken to through frames."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from art.config import LoraConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ConfigError, InvalidRequestError, NothingTrainableError, ProcessError
from art.protocol.calls import InitCheckpoint, Progress, Sleep, StartTrainer, Train, TrainSft
from art.protocol.rpc import RpcClient
from art.protocol.samples import StepResult, TrainingSample
from art.storage import checkpoints
from tests.support.calls import raw
from tests.support.trainer_samples import random_samples, sample_file

TRAINER = TrainerConfig(device="cpu", num_threads=1)
LORA = LoraConfig(rank=8, alpha=16)
RL = TrainConfig(learning_rate=1e-2, mismatch=None)


@dataclass
class TrainerProcess:
    client: RpcClient
    process: subprocess.Popen[bytes]
    heartbeats: list[dict[str, Any]] = field(default_factory=list)


def sft_samples(seed: int, count: int = 8) -> list[TrainingSample]:
    return [replace(sample, component="sft") for sample in random_samples(seed, count)]


def spawn() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "art.runtime.children.trainer_child", "--fd", str(theirs.fileno())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    return ours, process


@contextlib.asynccontextmanager
async def trainer_process() -> AsyncIterator[TrainerProcess]:
    ours, process = spawn()
    beats: list[dict[str, Any]] = []
    client = await RpcClient.connect(ours, beats.append)
    try:
        yield TrainerProcess(client, process, beats)
    finally:
        await client.close()
        process.kill()
        process.wait()


def job(directory: Path, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "samples": sample_file(directory, changes.pop("samples", random_samples(step))),
        "config": RL,
        "from_checkpoint": directory / f"{step - 1:04d}",
        "to_checkpoint": directory / f"{step:04d}",
        "job_id": f"job-{step:08d}",
    } | changes


async def test_trains_reports_survives_errors_and_is_killed(model_path: Callable[[str], str], tmp_path: Path) -> None:
    model = model_path("Qwen3")
    async with trainer_process() as trainer:
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
        trainer.process.send_signal(signal.SIGKILL)
        with pytest.raises(ProcessError):
            [result async for result in long_job]
    assert checkpoints.list_steps(tmp_path) == [0, 1, 2]

    async with trainer_process() as trainer:  # a new process goes on where the files end
        await trainer.client.call(StartTrainer(model=model, config=TRAINER))
        results = [result async for result in trainer.client.stream(Train(**job(tmp_path, 3)))]
        assert results[-1].step == 3


async def test_a_waiting_call_can_be_cancelled(model_path: Callable[[str], str], tmp_path: Path) -> None:
    async with trainer_process() as trainer:
        client = trainer.client
        start = asyncio.create_task(client.call(StartTrainer(model=model_path("Qwen3"), config=TRAINER)))
        dropped = asyncio.create_task(client.call(InitCheckpoint(path=tmp_path / "dropped", lora=LORA)))
        await asyncio.sleep(0.05)
        dropped.cancel()
        await start
        await client.call(InitCheckpoint(path=tmp_path / "kept", lora=LORA))
    assert sorted(os.listdir(tmp_path)) == ["kept"]


def test_ends_with_its_parent() -> None:
    ours, process = spawn()
    ours.close()
    assert process.wait(timeout=20) == 0
