"""Two processes that train one model at the serverless service, with one folder: no step is lost or mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import art
from tests.support.fake_serverless import FakeServerless, Hold
from tests.support.serverless_runs import QUICK, group, new_model, open_backend

JOBS = "/preview/training-jobs"
PATIENT = replace(QUICK, lost_job_s=10_000.0)


@pytest.fixture
async def fake() -> AsyncIterator[FakeServerless]:
    async with FakeServerless().running() as fake:
        yield fake


@contextlib.asynccontextmanager
async def process(
    fake: FakeServerless, folder: Path
) -> AsyncIterator[tuple[art.ServerlessBackend, art.TrainableModel]]:
    """A backend with a model that share nothing with others but the folder."""
    async with open_backend(fake, folder, PATIENT) as backend:
        model = new_model(folder)
        await model.register(backend)
        yield backend, model


def stored(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "shop/models/agent/sent_jobs.json").read_text())["jobs"]


async def test_steps_of_two_processes_run_one_after_the_other(fake: FakeServerless, tmp_path: Path) -> None:
    async with process(fake, tmp_path) as (first, model), process(fake, tmp_path) as (second, same_model):
        groups = [await group(model, 0.0, 1.0)]
        calls = [asyncio.create_task(one.train(same_model, groups)) for one in (first, second)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*calls)
    assert sorted(result.step for result in results) == [1, 2]
    assert [job["from_step"] for job in stored(tmp_path)] == [0, 1]


async def test_a_registration_waits_for_the_step_of_another_process(fake: FakeServerless, tmp_path: Path) -> None:
    async with process(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0)]
        hold = Hold()
        fake.trouble[JOBS] = [hold]
        call = asyncio.create_task(backend.train(model, groups))
        await hold.until(1)
        registration = asyncio.create_task(_register(fake, tmp_path))
        async with asyncio.timeout(60):
            while fake.requests[-1] != "POST /preview/models":
                await asyncio.sleep(0.001)
            hold.answer.set_result(None)
            assert (await call).step == await registration == 1


async def _register(fake: FakeServerless, folder: Path) -> int:
    async with process(fake, folder) as (_, model):
        return await model.get_step()
