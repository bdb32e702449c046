"""Answers that have a form, from the engine's masks to the trainer's: learning, exact ratios, a ledger that closes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

import art
from art.backend import TrainResult
from art.testing.tiny_model import build_tiny_model
from tests.support.driving import SITUATIONS, Form, Played, play, warm_start_conversations

RATIO_WITHIN = 1e-4
ROLLOUTS_PER_GROUP = 8
NUM_STEPS, LEARNING_RATE, WARM_START_STEPS = 8, 1e-2, 150
"""Chosen on seeds 100 and 101."""
LEARNT = 0.9
"""Share of right answers afterwards. By the warm start alone it is about 0.5, less what is cut off."""
NUM_GAMES = 240
PROJECT = "form"
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def backend(shared_backend: art.LocalBackend) -> art.LocalBackend:
    return shared_backend


async def play_groups(model: art.TrainableModel, form: Form, seed: int, **request: Any) -> list[list[Played]]:
    return await asyncio.gather(
        *(
            asyncio.gather(
                *(
                    play(model, form, situation, seed=1_000_003 * seed + 100 * number + k, **request)
                    for k in range(ROLLOUTS_PER_GROUP)
                )
            )
            for number, situation in enumerate(SITUATIONS)
        )
    )


async def train(model: art.TrainableModel, groups: Sequence[Sequence[Played]], learning_rate: float) -> TrainResult:
    """A step, of which every token is accounted for and every ratio before the first update is 1."""
    submitted = [art.TrajectoryGroup([played.trajectory for played in group]) for group in groups]
    result = await model.backend().train(model, submitted, learning_rate=learning_rate)
    metrics = result.metrics
    dropped = {name: value for name, value in metrics.items() if name.startswith("ledger/dropped_tokens/")}
    assert dropped.keys() <= {"ledger/dropped_tokens/no_reward_spread"}
    assert metrics["ledger/sampled_tokens"] == sum(played.num_tokens for group in groups for played in group)
    assert metrics["ledger/sampled_tokens"] == metrics["ledger/trained_tokens"] + sum(dropped.values())
    teaching = [group for group in groups if len({played.trajectory.reward for played in group}) > 1]
    # Answers that were cut off are among them.
    assert metrics["ledger/trained_tokens"] == sum(played.num_tokens for group in teaching for played in group)
    assert result.trained == bool(teaching)
    if result.trained:
        assert math.expm1(metrics["offpolicy/first_update_gap_max"]) < RATIO_WITHIN
        assert abs(metrics["offpolicy/ratio_max"] - 1) < RATIO_WITHIN  # a single update
        assert metrics["offpolicy/constraint_refused_tokens"] == 0
        assert 0 < metrics["data/step_forced_tokens"] < metrics["data/step_constrained_tokens"]
    return result


def mean_reward(groups: Sequence[Sequence[Played]]) -> float:
    return statistics.fmean(played.trajectory.reward for group in groups for played in group)


def num_cut(groups: Sequence[Sequence[Played]]) -> int:
    return sum(played.action is None for group in groups for played in group)


async def evaluate(model: art.TrainableModel, form: Form, seed: int) -> float:
    seeds = range(10**9 * (seed + 1), 10**9 * (seed + 1) + NUM_GAMES)
    played = await asyncio.gather(*(play(model, form, SITUATIONS[s % len(SITUATIONS)], seed=s) for s in seeds))
    return mean_reward([played])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("form", get_args(Form))
async def test_a_game_with_formed_answers_is_learnt(form: Form, seed: int, tmp_path: Path) -> None:
    """`play` checks the form of every finished answer."""
    conversations = warm_start_conversations(form, seed)
    base_model = build_tiny_model(
        tmp_path / "model", conversations=conversations, seed=seed, warm_start_steps=WARM_START_STEPS
    )
    async with art.LocalBackend(path=tmp_path / "data") as backend:
        model = art.TrainableModel(name="agent", project=PROJECT, base_model=str(base_model))
        await model.register(backend)
        before = await evaluate(model, form, seed)
        cut, largest_gap = 0, 0.0
        for step in range(NUM_STEPS):
            groups = await play_groups(model, form, 1000 * (seed + 1) + step)
            result = await train(model, groups, LEARNING_RATE * (NUM_STEPS - step) / NUM_STEPS)
            assert result.metrics.get("data/step_constrained_tokens", 0.0) == result.metrics["ledger/trained_tokens"]
            largest_gap = max(largest_gap, result.metrics.get("offpolicy/first_update_gap_max", 0.0))
            cut += num_cut(groups) if result.trained else 0
        after = await evaluate(model, form, seed)
    print(f"{form}, seed {seed}: {before:.3f} -> {after:.3f}, {cut} answers cut off, gap {largest_gap:.1e} nats")
    assert 0.2 < before < 0.65
    assert after >= LEARNT
    assert cut > 0


def with_spread(groups: list[list[Played]]) -> list[list[Played]]:
    """The groups with rewards that differ, whatever was answered."""
    for group in groups:
        for number, played in enumerate(group):
            played.trajectory.reward = float(number % 2)
    return groups


@in_module_loop
@pytest.mark.parametrize("form", get_args(Form))
async def test_steps_on_formed_answers_are_exact(form: Form, model: art.TrainableModel) -> None:
    """The model has never seen such answers, so most of them are far from what it would say freely."""
    for step in range(2):
        groups = with_spread(await play_groups(model, form, 10 + step))
        result = await train(model, groups, 1e-3)
        assert result.metrics["data/step_constrained_tokens"] == result.metrics["ledger/trained_tokens"]
    assert num_cut(groups) > 0


CUTS: list[dict[str, Any]] = [
    {"top_p": 0.7}, {"extra_body": {"top_k": 4}}, {"extra_body": {"min_p": 0.15}},
    {"top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 1e-3}},
]  # fmt: skip


@in_module_loop
@pytest.mark.parametrize("form", [None, "json"])
async def test_steps_on_answers_of_likely_tokens_are_exact(form: Form | None, model: art.TrainableModel) -> None:
    """Each group is sampled with another cut, and trained in the same step."""
    groups = [
        list(await asyncio.gather(*(play(model, form, SITUATIONS[n], seed=90 + k, **cut) for k in range(4))))
        for n, cut in enumerate(CUTS)
    ]
    result = await train(model, with_spread(groups), 1e-3)
    assert result.trained


async def kill_during(task: asyncio.Future[Any], backend: art.LocalBackend, kind: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    health = await (await backend.open()).health()
    assert not task.done()
    os.kill(health["base_models"][0][kind]["pid"], signal.SIGKILL)


@dataclass
class Run:
    """What three steps sampled and computed."""

    answers: list[Any] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)


async def run(tiny_model: Path, data_dir: Path, *, disturbed: bool) -> Run:
    """Three steps. In the second one, the engine is killed while it samples and the trainer while it trains."""
    made = Run()
    requests: list[tuple[Form, dict[str, Any]]] = [
        ("json", {}),
        ("tool", {"extra_body": {"top_k": 6}}),
        ("json", CUTS[0]),
    ]
    async with art.LocalBackend(path=data_dir) as backend:
        model = art.TrainableModel(name="agent", project=PROJECT, base_model=str(tiny_model))
        await model.register(backend)
        for step, (form, cut) in enumerate(requests):
            playing = asyncio.ensure_future(play_groups(model, form, step, **cut))
            if disturbed and step == 1:
                await kill_during(playing, backend, "engine", after_s=0.1)
            groups = with_spread(await playing)
            training = asyncio.ensure_future(train(model, groups, 5e-3))
            if disturbed and step == 1:
                await kill_during(training, backend, "trainer", after_s=0.05)
            metrics = (await training).metrics
            made.numbers += [metrics[f"loss/{name}"] for name in ("grad_norm", "entropy", "adapter_norm")]
            made.answers += [played.text for group in groups for played in group]
        health = await (await backend.open()).health()
        made.restarts = [health["base_models"][0][kind]["restarts"] for kind in ("engine", "trainer")]
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_killed_processes_go_on_inside_their_constraints(tiny_model: Path, tmp_path: Path) -> None:
    """Answers go on at their next token, and the step is replayed from the record."""
    calm = await run(tiny_model, tmp_path / "calm", disturbed=False)
    disturbed = await run(tiny_model, tmp_path / "disturbed", disturbed=True)
    assert (calm.restarts, disturbed.restarts) == ([0, 0], [1, 1])
    assert disturbed.answers == calm.answers
    assert disturbed.numbers == pytest.approx(calm.numbers, rel=1e-3, abs=1e-6)
