"""SIGKILL of the server, the engine or the trainer in the middle of a step: the same script goes on to the same losses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

import art
from art.config import TrainerConfig
from tests.support.processes import children_of

PROMPTS = ["respond with yes or no", "say yes, no or maybe", "yes or maybe?"]
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
NUM_STEPS, ROLLOUTS = 3, 8
NUMBERS = ["loss/train", "loss/grad_norm", "loss/entropy", "loss/adapter_norm"]  # the loss alone is near 0 by design
DISTURBED_STEP = 1

Saboteur = Callable[[art.LocalBackend], Awaitable[None]]


async def rollout(model: art.TrainableModel, prompt: str, seed: int) -> art.Trajectory:
    messages = [{"role": "user", "content": prompt}]
    client = model.openai_client()
    for turn in range(2):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=art_messages(messages),
            seed=2 * seed + turn,
            max_completion_tokens=8,
        )
        messages += [completion.choices[0], {"role": "user", "content": prompt}]
    reward = sum(REWARDS.get(item.message.content or "", 0.0) for item in messages if not isinstance(item, dict))
    return art.Trajectory(messages_and_choices=messages[:-1], reward=reward)


def art_messages(items: list) -> list:
    return art.Trajectory(messages_and_choices=items).messages()


async def numbers_of_run(
    tiny_model: Path,
    data_dir: Path,
    during_rollouts: Saboteur | None,
    during_training: Saboteur | None,
    settings: art.ModelSettings | None = None,
) -> list[float]:
    numbers = []
    async with art.LocalBackend(path=data_dir) as backend:
        model = art.TrainableModel(
            name="agent", project="crash", base_model=str(tiny_model), base_path=str(data_dir), settings=settings
        )
        await model.register(backend)
        for step in range(NUM_STEPS):
            disturb = step == DISTURBED_STEP
            gathering = asyncio.ensure_future(
                art.gather_trajectory_groups(
                    (
                        art.TrajectoryGroup(rollout(model, prompt, 1000 * step + 100 * p + i) for i in range(ROLLOUTS))
                        for p, prompt in enumerate(PROMPTS)
                    ),
                    pbar_desc=None,
                )
            )
            if disturb and during_rollouts:
                await during_rollouts(backend)
            groups = await gathering
            training = asyncio.ensure_future(backend.train(model, groups, learning_rate=5e-3))
            if disturb and during_training:
                await during_training(backend)
            result = await training
            assert result.step == step + 1
            numbers += [result.metrics[name] for name in NUMBERS]
    return numbers


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return asyncio.run(numbers_of_run(tiny_model, tmp_path_factory.mktemp("calm"), None, None))


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def child_pid(backend: art.LocalBackend, kind: str) -> int | None:
    health = await (await backend._connection()).health()
    return health["base_models"][0][kind]["pid"]


def killing(kind: str, after_s: float) -> Saboteur:
    async def sabotage(backend: art.LocalBackend) -> None:
        await asyncio.sleep(after_s)
        kill(backend.server_pid if kind == "server" else await child_pid(backend, kind))

    return sabotage


@pytest.mark.parametrize(
    ("kind", "phase", "after_s"),
    [
        pytest.param("server", "rollouts", 0.01, marks=pytest.mark.slow),
        ("server", "training", 0.02),
        pytest.param("engine", "rollouts", 0.01, marks=pytest.mark.slow),
        ("engine", "training", 0.05),
        ("trainer", "training", 0.02),
    ],
)
def test_kill_changes_nothing(
    kind: str, phase: str, after_s: float, undisturbed: list[float], tiny_model: Path, tmp_path: Path
) -> None:
    sabotage = killing(kind, after_s)
    run = numbers_of_run(
        tiny_model, tmp_path, sabotage if phase == "rollouts" else None, sabotage if phase == "training" else None
    )
    numbers = asyncio.run(run)
    # The loss of a step on its own policy is a sum of float32 terms near 1 that cancel: what is left is some units in
    # their last place (1.2e-7), which change with the sequences that happen to share a batch of the engine.
    assert numbers == pytest.approx(undisturbed, rel=1e-5, abs=5e-7)


async def kill_second_trainer_process(backend: art.LocalBackend) -> None:
    await asyncio.sleep(0.02)
    trainer = await child_pid(backend, "trainer")
    assert trainer is not None
    (second,) = children_of(trainer)
    kill(second)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on CUDA each process needs a device, and the numbers are bfloat16"
)
@pytest.mark.parametrize("sabotage", [None, kill_second_trainer_process])
def test_two_trainer_processes_give_the_numbers_of_one(
    sabotage: Saboteur | None, undisturbed: list[float], tiny_model: Path, tmp_path: Path
) -> None:
    settings = art.ModelSettings(trainer=TrainerConfig(num_processes=2))
    numbers = asyncio.run(numbers_of_run(tiny_model, tmp_path, None, sabotage, settings))
    assert numbers == pytest.approx(undisturbed, rel=1e-3, abs=1e-6)


def test_no_process_outlives_the_script(tiny_model: Path, tmp_path: Path) -> None:
    async def pids() -> list[int]:
        async with art.LocalBackend(path=tmp_path) as backend:
            model = art.TrainableModel(
                name="agent", project="orphans", base_model=str(tiny_model), base_path=str(tmp_path)
            )
            await model.register(backend)
            found = [backend.server_pid, await child_pid(backend, "engine"), await child_pid(backend, "trainer")]
            return [pid for pid in found if pid is not None]

    found = asyncio.run(pids())
    assert len(found) == 3
    for pid in found:
        assert not Path(f"/proc/{pid}").exists()
