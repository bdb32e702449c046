"""Bad input against the real server, engine and trainer: a clear error each time, nothing lost, the server lives."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import art
from art.errors import NothingTrainableError, StorageError, TrajectoryError, TrajectoryMismatchError
from art.storage.jsonl import read_lines
from art.storage.trajectories import read_groups
from tests.support.model_folder import paths_of

MESSAGES = [{"role": "user", "content": "say yes, no or maybe"}]


in_module_loop = pytest.mark.asyncio(loop_scope="module")


async def answer(model: art.TrainableModel, **options: object) -> art.Trajectory:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=MESSAGES, max_completion_tokens=8, **options
    )
    return art.Trajectory(messages_and_choices=[*MESSAGES, completion.choices[0]])


async def groups_with(model: art.TrainableModel, rewards: list[float]) -> list[art.TrajectoryGroup]:
    trajectories = [await answer(model, seed=i) for i in range(len(rewards))]
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        trajectory.reward = reward
    return [art.TrajectoryGroup(trajectories)]


@in_module_loop
async def test_unknown_step(model: art.TrainableModel) -> None:
    with pytest.raises(openai.NotFoundError, match="no published checkpoint of step 99"):
        await model.openai_client().chat.completions.create(model=model.get_inference_name(99), messages=MESSAGES)


@in_module_loop
async def test_context_too_long(model: art.TrainableModel) -> None:
    for count, said in (
        (1200, "leaves no room for an answer"),
        (30_000, "390000 characters, are too many"),
    ):
        long: list[Any] = [{"role": "user", "content": "yes no maybe " * count}]
        with pytest.raises(openai.BadRequestError, match=said):
            await model.openai_client().chat.completions.create(model=model.get_inference_name(), messages=long)


@in_module_loop
async def test_no_reward_spread(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    """As the loops of older scripts call it: they go on, and the log grows by a row and by the groups."""
    log = paths_of(model)
    for i in range(await model.get_step(), 2):
        groups = await groups_with(model, [0.1, 0.1, 0.1])
        result = await backend.train(model, groups)
        await model.log(groups, split="train", metrics=result.metrics, step=result.step)
        assert (result.trained, result.step, await model.get_step()) == (False, 0, 0)
        assert result.metrics["data/step_num_groups_trainable"] == 0
        assert result.findings[0].startswith("every group (1) has equal rewards")
        rows = [row for _, row in read_lines(log.history) if row]
        assert [row["data/step_num_groups_trainable"] for row in rows] == [0] * (i + 1)
        assert len(list(read_groups(log.trajectories("train", 0)))) == i + 1
    with pytest.raises(NothingTrainableError, match="equal rewards"):
        await backend.train(model, groups, on_nothing="raise")


@in_module_loop
async def test_a_rollout_that_cannot_be_trained_does_not_stop_the_others(model: art.TrainableModel) -> None:
    for rollout_id, options in (("greedy", {"temperature": 0}), ("fine-0", {}), ("fine-1", {})):
        client = openai.AsyncOpenAI(base_url=model.rollout_base_url(rollout_id), api_key=model.inference_api_key)
        async with client:
            await client.chat.completions.create(
                model=model.get_inference_name(), messages=MESSAGES, max_completion_tokens=4, **options
            )
        group = rollout_id.partition("-")[0]
        await model.put_rollout(rollout_id, group_id=group, reward=float(rollout_id == "fine-1"))
    await model.put_rollout("lost", group_id="greedy", outcome="infra_fault", error="crashed")
    groups = await model.collect_trajectory_groups(2, 2, timeout_s=20, pbar_desc=None)
    with pytest.raises(TrajectoryMismatchError, match=r"groups\[0\].* sampled greedily"):
        await model.train(groups)
    model._collector = None  # as in a program that was started again
    (fine,) = await model.collect_trajectory_groups(1, 2, timeout_s=20, pbar_desc=None)
    assert fine.metadata["group_id"] == "fine"


@in_module_loop
async def test_nan_reward(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    with pytest.raises(TrajectoryError, match="reward"):
        await backend.train(model, await groups_with(model, [1.0, math.nan]))


@in_module_loop
async def test_changed_text_is_detected(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    groups = await groups_with(model, [1.0, 0.0])
    groups[0].trajectories[0].messages_and_choices[1].message.content = "certainly"
    with pytest.raises(TrajectoryMismatchError, match="changed after sampling"):
        await backend.train(model, groups)


@in_module_loop
async def test_a_data_directory_that_is_gone_is_said(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    groups = await groups_with(model, [1.0, 0.0])
    moved = backend.path.with_name("moved")
    backend.path.rename(moved)
    gone = rf"the data directory {backend.path} was deleted, moved or replaced while its server was running"
    try:
        with pytest.raises(StorageError, match=gone):
            await backend.train(model, groups)
        with pytest.raises(StorageError, match=gone):
            await backend.train_sft(model, list(groups[0]))
        with pytest.raises(StorageError, match=gone):
            await model.register(backend)
        with pytest.raises(openai.InternalServerError, match=gone):
            await model.openai_client().chat.completions.create(model=model.get_inference_name(0), messages=MESSAGES)
    finally:
        moved.rename(backend.path)
    assert (await backend.train(model, [art.TrajectoryGroup([])] + groups, learning_rate=1e-9)).trained


@in_module_loop
async def test_everything_still_works_afterwards(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    result = await backend.train(model, await groups_with(model, [1.0, 0.0, 0.5]), learning_rate=1e-3)
    assert result.step == await model.get_step() == 2
    assert result.metrics["ledger/sampled_tokens"] == result.metrics["ledger/trained_tokens"]


@in_module_loop
async def test_base_model_that_does_not_exist(backend: art.LocalBackend) -> None:
    missing = art.TrainableModel(name="other", project="tests", base_model="./no/such/model")
    with pytest.raises(art.ArtError, match="no/such/model"):
        await missing.register(backend)


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "art.cli.server", "--port", str(port), "--data-dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port 0" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@in_module_loop
async def test_full_disk(small_disk: Path, tiny_model: Path) -> None:
    async with art.LocalBackend(path=small_disk) as backend:
        model = art.TrainableModel(
            name="agent", project="full", base_model=str(tiny_model), base_path=str(small_disk.parent / "log")
        )
        await model.register(backend)
        groups = await groups_with(model, [1.0, 0.0])
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file:
            try:
                while True:
                    file.write(bytes(65536))
                    file.flush()
            except OSError:
                pass

        async def use_up_what_is_left() -> None:
            for i in range(200):
                await answer(model, seed=i)

        with pytest.raises(openai.APIStatusError, match="no space left") as refused:
            await use_up_what_is_left()
        assert refused.value.status_code == 507
        with pytest.raises(art.errors.DiskFullError):
            await backend.train(model, groups, learning_rate=1e-3)
        ballast.unlink()
        await answer(model)
        result = await backend.train(model, groups, learning_rate=1e-3)
        assert result.step == 1
