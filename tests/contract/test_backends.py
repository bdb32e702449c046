"""One small script, unchanged, on every kind of backend: register, roll out, train, log, come back, and fail well.

A kind is one entry of `KINDS`: an asynchronous context manager that yields an `Opened`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError, ConflictError, NotFoundError, NothingTrainableError, TrajectoryError
from art_cloud.ssh_backend import Install
from tests.support.fake_serverless import BASE_MODEL, FakeServerless
from tests.support.fake_sky import CLUSTER, FakeSky
from tests.support.fake_ssh import FakeMachine
from tests.support.serverless_runs import open_backend

SETTINGS: dict[str, Any] = {"learning_rate": 1e-4, "loss": "cispo"}
"""What every kind honours."""


@dataclass
class Opened:
    """A kind of backend whose server runs."""

    backend: art.Backend
    base_model: str
    reopen: Callable[[], Awaitable[art.Backend]]
    """Closes the backend as a script does at its end, and opens it as its next run does."""


@dataclass
class Machine:
    """What the kinds share: a server with a tiny model, started once."""

    local: art.LocalBackend
    base_model: str


@contextlib.asynccontextmanager
async def local(machine: Machine, folder: Path) -> AsyncIterator[Opened]:
    async def reopen() -> art.Backend:
        await machine.local.close()
        return machine.local

    yield Opened(machine.local, machine.base_model, reopen)


@contextlib.asynccontextmanager
async def remote(machine: Machine, folder: Path) -> AsyncIterator[Opened]:
    server = await machine.local.open()
    opened: list[art.Backend] = []

    async def reopen() -> art.Backend:
        if opened:
            await opened[-1].close()
        opened.append(art.RemoteBackend(server.base_url, server.api_key))
        return opened[-1]

    yield Opened(await reopen(), machine.base_model, reopen)
    await opened[-1].close()


@contextlib.asynccontextmanager
async def serverless(machine: Machine, folder: Path) -> AsyncIterator[Opened]:
    async with FakeServerless().running() as fake:
        opened: list[art.Backend] = []

        async def reopen() -> art.Backend:
            if opened:
                await opened[-1].close()
            opened.append(open_backend(fake, folder))
            return opened[-1]

        yield Opened(await reopen(), BASE_MODEL, reopen)
        await opened[-1].close()


@contextlib.asynccontextmanager
async def over_ssh(
    machine: Machine, other: FakeMachine, open_one: Callable[[], art.SshBackend]
) -> AsyncIterator[Opened]:
    opened: list[art.Backend] = []

    async def reopen() -> art.Backend:
        if opened:
            await opened[-1].close()
        opened.append(open_one())
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{other.bin_dir}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("ART_LAUNCHED_DIR", str(other.folder / "launched"))
        try:
            yield Opened(await reopen(), machine.base_model, reopen)
            await opened[-1].close()
        finally:
            other.kill()


def ssh(machine: Machine, folder: Path) -> contextlib.AbstractAsyncContextManager[Opened]:
    install = Install(source="art==1.2.3", extras=())
    return over_ssh(
        machine, FakeMachine(folder / "machine", has_art=True), lambda: art.SshBackend("box", install=install)
    )


def skypilot(machine: Machine, folder: Path) -> contextlib.AbstractAsyncContextManager[Opened]:
    """The same machine, launched by a fake `sky`."""
    other = FakeMachine(folder / "machine", has_art=True)
    FakeSky(other)
    install = Install(source="art==1.2.3", extras=())
    return over_ssh(machine, other, lambda: art.SkyPilotBackend(cluster=CLUSTER, install=install))


KINDS: dict[str, Callable[[Machine, Path], contextlib.AbstractAsyncContextManager[Opened]]] = {
    "LocalBackend": local,
    "RemoteBackend": remote,
    "ServerlessBackend": serverless,
    "SkyPilotBackend": skypilot,
    "SshBackend": ssh,
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Machine]:
    backend = art.LocalBackend(path=tmp_path_factory.mktemp("server"), show_page=False)
    yield Machine(backend, str(tiny_model))
    asyncio.run(backend.close())


SLOW = {"LocalBackend", "SkyPilotBackend", "SshBackend"}
"""Kinds whose servers start again in each run of a script, which takes seconds."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in KINDS])
async def kind(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> AsyncIterator[Opened]:
    async with KINDS[request.param](machine, tmp_path) as opened:
        yield opened


async def registered(backend: art.Backend, base_model: str, folder: Path, name: str) -> art.TrainableModel:
    model = art.TrainableModel(
        name=name, project="contract", base_model=base_model, base_path=str(folder), report_metrics=[]
    )
    await model.register(backend)
    return model


async def rollout(model: art.TrainableModel, reward: float, step: int | None = None) -> art.Trajectory:
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "say yes, no or maybe"}])
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=trajectory.messages(), max_completion_tokens=4
    )
    trajectory.messages_and_choices.append(completion.choices[0])
    trajectory.reward = reward
    return trajectory


async def gathered(model: art.TrainableModel, *rewards: float) -> list[art.TrajectoryGroup]:
    rollouts = (rollout(model, reward) for reward in rewards)
    return await art.gather_trajectory_groups([art.TrajectoryGroup(rollouts)], pbar_desc=None)


async def script(backend: art.Backend, base_model: str, folder: Path, name: str, num_steps: int) -> art.TrainableModel:
    """The script: it goes on where the last run has stopped."""
    model = await registered(backend, base_model, folder, name)
    for step in range(await model.get_step(), num_steps):
        result = await model.train(await gathered(model, 0.0, 1.0), **SETTINGS)
        assert (result.step, result.trained) == (step + 1, True)
        assert "loss/train" in result.metrics
    return model


async def test_the_script_trains_logs_and_goes_on_in_its_next_run(kind: Opened, tmp_path: Path) -> None:
    name = f"agent-{uuid.uuid4().hex[:8]}"
    model = await script(kind.backend, kind.base_model, tmp_path, name, num_steps=2)
    assert await model.get_step() == 2
    assert len((await rollout(model, 0.0, step=1)).messages_and_choices) == 2, "an older step answers"
    history = Path(model.base_path) / "contract/models" / name / "history.jsonl"
    assert len(history.read_text().splitlines()) == 2

    backend = await kind.reopen()
    model = await script(backend, kind.base_model, tmp_path, name, num_steps=3)
    assert len(history.read_text().splitlines()) == 3
    newest = [one.step for one in await backend.list_checkpoints(model) if one.newest]
    assert newest == [3]
    deleted = await backend.delete_checkpoints(model, keep_steps=[3], best_metric="no/such")
    assert {1, 2} <= set(deleted)
    assert [one.step for one in await backend.list_checkpoints(model)] == [3]


async def test_a_job_with_a_name_trains_once(kind: Opened, tmp_path: Path) -> None:
    model = await registered(kind.backend, kind.base_model, tmp_path, f"agent-{uuid.uuid4().hex[:8]}")
    groups, job_id = await gathered(model, 0.0, 1.0), uuid.uuid4().hex
    job = await kind.backend.train(model, groups, wait=False, job_id=job_id, **SETTINGS)
    first = await job
    assert (first.step, (await job.status()).state) == (1, "succeeded")
    assert (await kind.backend.train(model, groups, job_id=job_id, **SETTINGS)).step == 1
    assert (await (await kind.backend.follow_train_job(model, job_id))).step == 1
    assert await model.get_step() == 1
    with pytest.raises(ConflictError):
        await kind.backend.train(model, groups, job_id=job_id, learning_rate=1e-5, loss="cispo")
    with pytest.raises(NotFoundError):
        await kind.backend.follow_train_job(model, "no-such-job")


async def test_what_cannot_be_trained_fails_alike(kind: Opened, tmp_path: Path) -> None:
    model = await registered(kind.backend, kind.base_model, tmp_path, f"agent-{uuid.uuid4().hex[:8]}")
    train, equal = kind.backend.train, await gathered(model, 0.5, 0.5)
    result = await train(model, equal, **SETTINGS)
    assert (result.step, result.trained) == (0, False)
    assert "equal rewards" in result.findings[0]
    with pytest.raises(NothingTrainableError, match="equal rewards"):
        await train(model, equal, on_nothing="raise", **SETTINGS)
    with pytest.raises(NothingTrainableError):
        await train(model, [art.TrajectoryGroup([ValueError("broken")])], on_nothing="raise", **SETTINGS)
    with pytest.raises(NothingTrainableError):
        await kind.backend.train_sft(model, [])
    with pytest.raises(TrajectoryError, match="not a list of TrajectoryGroup"):
        await train(model, equal[0], **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"learning_rat=0\.0001; it knows optimizer, learning_rate, loss"):
        await train(model, equal, learning_rat=1e-4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="without `sft`"):
        await train(model, equal, sft_weight=0.5, **SETTINGS)
    assert await model.get_step() == 0
