"""SIGKILL of the server, the engine or the trainer in the middle of a step: the same script goes on to the same losses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import art
from art.config import TrainerConfig
from tests.support.processes import children_of, is_running
from tests.support.shared_server import on

PROMPTS = ["respond with yes or no", "say yes, no or maybe", "yes or maybe?"]
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
NUM_STEPS, ROLLOUTS = 3, 8
NUMBERS = ["loss/train", "loss/grad_norm", "loss/entropy", "loss/adapter_norm"]  # the loss alone is near 0 by design
DISTURBED_STEP = 1

Saboteur = Callable[[art.LocalBackend], Awaitable[None]]
Saboteurs = Mapping[int, Saboteur]
"""What disturbs the run, by step."""


@dataclass
class Run:
    numbers: list[float]
    pids: list[int | None]
    """Process ids of server, engine and trainer."""
    outlived: list[int | None]
    """Those of them that still ran when the script had left the backend."""


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


async def run_script(
    tiny_model: Path,
    data_dir: Path,
    during_rollouts: Saboteurs | None = None,
    during_training: Saboteurs | None = None,
    settings: art.ModelSettings | None = None,
    make_backend: type[art.LocalBackend] = art.LocalBackend,
) -> Run:
    numbers = []
    async with make_backend(path=data_dir) as backend:
        model = art.TrainableModel(
            name="agent", project="crash", base_model=str(tiny_model), base_path=str(data_dir), settings=settings
        )
        await model.register(backend)
        for step in range(NUM_STEPS):
            gathering = asyncio.ensure_future(
                art.gather_trajectory_groups(
                    (
                        art.TrajectoryGroup(rollout(model, prompt, 1000 * step + 100 * p + i) for i in range(ROLLOUTS))
                        for p, prompt in enumerate(PROMPTS)
                    ),
                    pbar_desc=None,
                )
            )
            if during_rollouts and step in during_rollouts:
                await during_rollouts[step](backend)
            groups = await gathering
            training = asyncio.ensure_future(backend.train(model, groups, learning_rate=5e-3))
            if during_training and step in during_training:
                await during_training[step](backend)
            result = await training
            assert result.step == step + 1
            numbers += [result.metrics[name] for name in NUMBERS]
        pids = [backend.server_pid, await child_pid(backend, "engine"), await child_pid(backend, "trainer")]
    return Run(numbers, pids, [pid for pid in pids if pid is not None and is_running(pid)])


@pytest.fixture(scope="module")
def undisturbed(
    tiny_model: Path, shared_backend: art.LocalBackend, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """The numbers of a run that nothing disturbs."""
    path = tmp_path_factory.mktemp("calm")
    return asyncio.run(run_script(tiny_model, path, make_backend=on(shared_backend))).numbers


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def child_pid(backend: art.LocalBackend, kind: str) -> int | None:
    health = await (await backend.open()).health()
    return health["base_models"][0][kind]["pid"]


def killing(kind: str, after_s: float) -> Saboteur:
    async def sabotage(backend: art.LocalBackend) -> None:
        await asyncio.sleep(after_s)
        kill(backend.server_pid if kind == "server" else await child_pid(backend, kind))

    return sabotage


@pytest.fixture(scope="module")
def disturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which each process is killed in turn."""
    killed = {0: killing("engine", 0.05), 1: killing("trainer", 0.02), 2: killing("server", 0.02)}
    return asyncio.run(run_script(tiny_model, tmp_path_factory.mktemp("killed"), None, killed))


# The loss of a step on its own policy is a sum of float32 terms near 1 that cancel: what is left is some units in their
# last place (1.2e-7), which change with the sequences that happen to share a batch of the engine.
TOLERANCE = {"rel": 1e-5, "abs": 5e-7}


def test_kill_changes_nothing(disturbed: Run, undisturbed: list[float]) -> None:
    assert disturbed.numbers == pytest.approx(undisturbed, **TOLERANCE)


def test_no_process_outlives_the_script(disturbed: Run) -> None:
    assert None not in disturbed.pids
    assert len(set(disturbed.pids)) == 3
    assert disturbed.outlived == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("during_rollouts", "during_training"),
    [
        pytest.param({DISTURBED_STEP: killing("server", 0.01)}, {}, id="server-rollouts"),
        pytest.param({}, {DISTURBED_STEP: killing("server", 0.02)}, id="server-training"),
        pytest.param({DISTURBED_STEP: killing("engine", 0.01)}, {}, id="engine-rollouts"),
        pytest.param({}, {DISTURBED_STEP: killing("engine", 0.05)}, id="engine-training"),
        pytest.param({}, {DISTURBED_STEP: killing("trainer", 0.02)}, id="trainer-training"),
    ],
)
def test_kill_of_one_process_changes_nothing(
    during_rollouts: Saboteurs, during_training: Saboteurs, undisturbed: list[float], tiny_model: Path, tmp_path: Path
) -> None:
    run = asyncio.run(run_script(tiny_model, tmp_path, during_rollouts, during_training))
    assert run.numbers == pytest.approx(undisturbed, **TOLERANCE)


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
@pytest.mark.parametrize("during_training", [None, {DISTURBED_STEP: kill_second_trainer_process}])
def test_two_trainer_processes_give_the_numbers_of_one(
    during_training: Saboteurs | None, undisturbed: list[float], tiny_model: Path, tmp_path: Path
) -> None:
    settings = art.ModelSettings(trainer=TrainerConfig(num_processes=2))
    run = asyncio.run(run_script(tiny_model, tmp_path, None, during_training, settings))
    assert run.numbers == pytest.approx(undisturbed, rel=1e-3, abs=1e-6)
