"""How busy a real engine says it is, before, while and after it samples."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import art
from art.errors import NotFoundError

NUM, TOKENS = 240, 24


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
    client = model.openai_client()
    requests = [
        asyncio.create_task(
            client.chat.completions.create(
                model=model.get_inference_name(), messages=[{"role": "user", "content": "say"}],
                max_completion_tokens=TOKENS, temperature=2.0, seed=seed,
            )
        )
        for seed in range(NUM)
    ]  # fmt: skip
    most = 0
    while not all(request.done() for request in requests):
        seen = await backend.engine_pressure(model)
        assert seen.running <= idle.seats == seen.seats
        assert seen.running + seen.waiting <= NUM
        most = max(most, seen.running)
        await asyncio.sleep(0.01)
    await asyncio.gather(*requests)
    assert most > 8
    assert await backend.engine_pressure(model) == idle
