"""Two engine processes of one base model: chats, a step, a process that is killed in the middle, and the next step."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import art
from art.cli.status import describe_server
from art.config import EngineConfig

PROMPT = "say yes, no or maybe"
NUM_CHATS = 16


WORDS = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 40, "maxItems": 40}


async def chat(model: art.TrainableModel, seed: int) -> Any:
    """Ask for an answer that takes a moment: the model alone would stop after one word."""
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=[{"role": "system", "content": f"Game {seed}. " * 12}, {"role": "user", "content": PROMPT}],
        seed=seed,
        max_completion_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS}},
    )
    return completion.choices[0]


async def rollout(model: art.TrainableModel, seed: int) -> art.Trajectory:
    messages = [{"role": "user", "content": PROMPT}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, seed=seed, max_completion_tokens=8
    )
    return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=seed % 2)


async def replicas(backend: art.LocalBackend) -> list[dict[str, Any]]:
    return (await (await backend.open()).health())["base_models"][0]["replicas"]


async def until_both_serve(backend: art.LocalBackend, policy: str) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        while True:
            told = await replicas(backend)
            if all(policy in one["policies"] for one in told):
                return told
            await asyncio.sleep(0.05)


async def train(backend: art.LocalBackend, model: art.TrainableModel, seed: int) -> art.TrainResult:
    group = art.TrajectoryGroup(rollout(model, seed + i) for i in range(4))
    return await backend.train(model, await art.gather_trajectory_groups([group], pbar_desc=None), learning_rate=1e-3)


async def test_a_killed_replica_fails_no_chat_and_comes_back_with_what_was_published(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = art.ModelSettings(engine=EngineConfig(replicas=2, device="cpu"))
    async with art.LocalBackend(path=tmp_path) as backend:
        model = art.TrainableModel(
            name="agent", project="p", base_model=str(tiny_model), base_path=str(tmp_path), settings=settings
        )
        await model.register(backend)
        await until_both_serve(backend, "p/agent@0")
        assert (await train(backend, model, 1000)).step == 1
        told = await until_both_serve(backend, "p/agent@1")

        undisturbed = await asyncio.gather(*(chat(model, seed) for seed in range(NUM_CHATS)))
        running = [asyncio.create_task(chat(model, seed)) for seed in range(NUM_CHATS)]
        while not all(one["requests"] for one in told):
            assert not all(task.done() for task in running), "chats go to both"
            told = await replicas(backend)
        os.kill(told[1]["pid"], signal.SIGKILL)
        answers = await asyncio.gather(*running)
        assert [one.message.content for one in answers] == [one.message.content for one in undisturbed]

        told = await until_both_serve(backend, "p/agent@1")
        assert [one["restarts"] for one in told] == [0, 1]
        assert "SIGKILL" in told[1]["last_end"]
        result = await train(backend, model, 2000)
        assert (result.step, result.metrics["publish/probe_gap"] < 1e-4) == (2, True)
        told = await until_both_serve(backend, "p/agent@2")
        assert [one["restarts"] for one in told] == [0, 1]
        client = await backend.open()
        report = await describe_server(client.base_url)
    assert "engine 2 of" in report
    assert "serves p/agent@0, p/agent@1, p/agent@2, 1 restarts" in report
