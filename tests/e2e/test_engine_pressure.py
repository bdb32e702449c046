"""How busy a real engine says it is, before, while and after it samples."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import art
from art.errors import NotFoundError


@pytest.fixture(scope="module")
def backend(shared_backend: art.LocalBackend) -> art.LocalBackend:
    return shared_backend


async def test_the_pressure_of_a_real_engine(backend: art.LocalBackend, tiny_model: Path) -> None:
    model = art.TrainableModel(name="pressed", project="pressure", base_model=str(tiny_model), report_metrics=[])
    with pytest.raises(NotFoundError):
        await backend.engine_pressure(model)
    await model.register(backend)
    idle = await backend.engine_pressure(model)
    assert (idle.running, idle.waiting, idle.asleep, idle.kv_used_share) == (0, 0, False, None)
    assert idle.seats >= 8
    num_requests = idle.seats + 6
    client = model.openai_client()

    async def ask(seed: int) -> None:
        await client.chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": "say"}],
            max_completion_tokens=4, seed=seed,
        )  # fmt: skip

    await ask(0)  # the first request may load the policy
    hosts = (await (await backend._connection()).health())["base_models"]
    (pid,) = [host["engine"]["pid"] for host in hosts if host["base_model"] == str(tiny_model)]
    os.kill(pid, signal.SIGSTOP)  # so that no request ends while it is counted
    try:
        requests = [asyncio.create_task(ask(seed)) for seed in range(num_requests)]
        async with asyncio.timeout(60):
            while (seen := await backend.engine_pressure(model)).waiting < 6:
                await asyncio.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (seen.running, seen.waiting, seen.seats, seen.asleep) == (idle.seats, 6, idle.seats, True)
    await asyncio.gather(*requests)
    assert await backend.engine_pressure(model) == idle
