"""Rollouts and judges that workers import, for the tests of `workers=`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

import art
from art.client.rollout_context import current_rollout
from art.tasks.yes_no_maybe import REWARDS, parse_answer


@dataclass
class Note:
    """What a rollout is told to do."""

    id: str
    fate: str = "answer"
    folder: str = ""


class AgentError(Exception):
    """An error whose constructor takes more than a text, as those of many libraries."""

    def __init__(self, tool: str, status: int) -> None:
        super().__init__(f"{tool} answered {status}")
        self.tool, self.status_code = tool, status


async def chat(model: art.Model, note: Note, rollout_index: int = 0, *, seed: int = 0) -> art.Trajectory:
    """Ask the model once, and record what the rollout could see."""
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": f"{note.id} {rollout_index}"}])
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages()
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    trajectory.reward = float(rollout_index)
    trajectory.metrics["seed"] = seed
    trajectory.log(f"asked {model.get_inference_name()}")
    return trajectory


async def fate(note: Note) -> art.Trajectory:
    """Do what the note says, and write down in its folder that the rollout began and how it ended."""
    log(note, "began")
    try:
        if note.fate == "segfault":
            await asyncio.sleep(0.3)  # the others have begun
            os.kill(os.getpid(), signal.SIGSEGV)
            await asyncio.sleep(60)
        if note.fate == "block":
            time.sleep(30)  # noqa: ASYNC251
        if note.fate == "agent_error":
            raise AgentError("search", 503)
        if note.fate == "value_error":
            raise ValueError("no such board")
        if note.fate == "infra":
            return art.Trajectory(metadata={"outcome": "infra_fault", "error": "the browser is gone"})
        await asyncio.sleep({"wait": 1.0, "hang": 60.0}.get(note.fate, 0.0))
    except asyncio.CancelledError:
        log(note, "cancelled")
        raise
    log(note, "ended")
    return art.Trajectory(reward=1.0, metadata={"id": note.id, "pid": os.getpid()})


def log(note: Note, what: str) -> None:
    if note.folder:
        with (Path(note.folder) / f"{note.id}.txt").open("a") as file:
            file.write(f"{what}\n")


def logged(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.txt"
    return path.read_text().split() if path.exists() else []


async def context_rollout(model: Any, scenario: Any, rollout_index: int, seed: int) -> art.Trajectory:
    """Return what a pipeline's rollout knows about itself."""
    context = current_rollout.get()
    assert context is not None
    seeds = [str(context.next_seed()) for _ in range(2)]
    return art.Trajectory(
        reward=float(rollout_index),
        metadata={
            "name": model.get_inference_name(),
            "seed": str(seed),
            "seeds": " ".join(seeds),
            "step": context.step,
        },
    )


async def book(model: art.Model, usd: float) -> art.Trajectory:
    model.costs.check()
    model.costs.book("judge/ruler", usd=usd)
    return art.Trajectory(reward=usd)


async def asks(model: art.Model) -> None:
    await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "captured"}]
    )


async def refused(base_url: str) -> art.Trajectory:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    raise AssertionError("unreachable")


def logs_calls(function: Callable[..., Awaitable[art.Trajectory]]) -> Callable[..., Awaitable[art.Trajectory]]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> art.Trajectory:
        trajectory = await function(*args, **kwargs)
        trajectory.log("decorated")
        return trajectory

    return wrapper


@logs_calls
async def decorated(number: int, *more: int, by: int = 1, **names: int) -> art.Trajectory:
    return art.Trajectory(reward=float((number + sum(more)) * by + sum(names.values())))


class Game:
    """A game whose rollout is a method."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    async def rollout(self, moves: list[int]) -> art.Trajectory:
        return art.Trajectory(reward=self.bonus + max(moves, key=lambda move: move * self.bonus))

    @classmethod
    async def free(cls, reward: float) -> art.Trajectory:
        return art.Trajectory(reward=reward, metadata={"class": cls.__name__})


def length(text: str) -> int:
    """A judge that blocks."""
    time.sleep(0.01)
    return len(text)


async def waits(seconds: float) -> art.Trajectory:
    await asyncio.sleep(seconds)
    return art.Trajectory(reward=1.0)


async def yes_no(model: art.TrainableModel, scenario: art.Scenario) -> art.Trajectory:
    """Play a scenario of `yes_no_maybe`; its seeds are those that the pipeline gives each request."""
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario.inputs["prompt"]}])
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=8, temperature=1.0
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    trajectory.reward = REWARDS.get(parse_answer(answer.choices[0].message.content), 0.0)
    return trajectory


async def captured_yes_no(model: art.TrainableModel, scenario: art.Scenario, index: int) -> art.Trajectory:
    """Do the same by a client of its own. The server sees these requests as another rollout."""
    async with art.capture(model) as captured:
        client = openai.AsyncOpenAI(base_url=captured.base_url, api_key=model.inference_api_key)
        answer = await client.chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": scenario.inputs["prompt"]}],
            max_completion_tokens=8, seed=index,
        )  # fmt: skip
        captured.trajectory.reward = REWARDS.get(parse_answer(answer.choices[0].message.content), 0.0) + index / 10
    return captured.trajectory


@contextlib.asynccontextmanager
async def alone_on_this_machine() -> AsyncIterator[None]:
    """Wait until no other process is inside."""
    descriptor = os.open(Path(tempfile.gettempdir(), "art-alone.lock"), os.O_CREAT | os.O_RDWR)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


async def one_game(model: art.TrainableModel, scenario: art.Scenario, rollout_index: int) -> art.Trajectory:
    """Play tic-tac-toe while nobody else does. Then the engine computes one request at a time, and its numbers do not
    depend on which requests share a batch."""
    async with alone_on_this_machine():
        trajectory = await art.get_task("tic_tac_toe").rollout(model, scenario, rollout_index=rollout_index)
    trajectory.metadata["pid"] = os.getpid()
    return trajectory
