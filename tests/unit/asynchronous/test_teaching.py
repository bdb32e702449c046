"""Curriculum and `max_concurrent="auto"` as settings of `art.pipeline`."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous import concurrency
from art.asynchronous.pipeline import Pipeline
from art.asynchronous.step import PipelineStep
from art.errors import ConfigError
from art.metrics.catalogue import CATALOGUE
from art.protocol.answers import EnginePressure
from tests.support.scripted_backend import ScriptedBackend

NUM = 12
SCENARIOS = [{"id": f"s{index}", "rate": rate} for index, rate in enumerate([0.0] * 4 + [1.0] * 4 + [0.5] * 4)]


class Agent:
    """Solves each scenario with its own chance, which depends on the seed alone."""

    async def __call__(self, model: Any, scenario: dict[str, Any], rollout_index: int, seed: int) -> art.Trajectory:
        await asyncio.sleep(0)
        return art.Trajectory(reward=float(random.Random(seed).random() < scenario["rate"]))


def make(backend: ScriptedBackend, agent: Any, scenarios: Any = SCENARIOS, **settings: Any) -> Pipeline:
    sizes = {"rollouts_per_group": 6, "groups_per_step": 4, "max_concurrent": None}
    return art.pipeline(backend.model(), scenarios=scenarios, rollout=agent, **sizes | settings)


async def collect(pipeline: Pipeline, steps: int) -> list[PipelineStep]:
    return [step async for step in pipeline.train(steps)]


async def test_a_curriculum_trains_what_teaches(tmp_path: Path) -> None:
    shares = {}
    for curriculum in (False, True):
        backend = ScriptedBackend(tmp_path / str(curriculum))
        steps = await collect(make(backend, Agent(), curriculum=curriculum), 40)
        late = [step.metrics["pipeline/groups_useful_share"] for step in steps[-15:]]
        shares[curriculum] = sum(late) / len(late)
        trained = Counter(str(group.metadata["scenario_id"]) for step in steps for group in step.groups)
        assert len(trained) == NUM
    assert shares[True] > 1.4 * shares[False]


async def test_the_reason_of_each_choice_is_in_the_journal_and_the_sums_in_the_metrics(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)
    pipeline = make(backend, Agent(), curriculum=True)
    seen: dict[str, Any] = {}
    async for step in pipeline.train(6):
        assert "pipeline/choice_seen_share" in step.metrics
        assert {name for name in step.metrics if name.startswith("pipeline/choice")} <= CATALOGUE.keys()
        with closing(sqlite3.connect(tmp_path / "shop/models/agent/pipeline/journal.db")) as journal:
            for (plan,) in journal.execute("SELECT plan FROM groups"):
                seen |= json.loads(plan)["reason"]
    assert {"chosen_by", "spread_chance", "groups_before"} <= seen.keys()


async def test_a_curriculum_needs_a_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="curriculum"):
        make(ScriptedBackend(tmp_path), Agent(), lambda position: SCENARIOS[0], curriculum=True)


async def test_auto_follows_the_engine_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "POLL_S", 0.005)
    running = asked = 0

    class Backend(ScriptedBackend):
        async def engine_pressure(self, model: Any) -> EnginePressure:
            nonlocal asked
            asked += 1
            return EnginePressure(running=min(running, 5), waiting=max(0, running - 5), seats=5)

    async def rollout(model: Any, scenario: Any, rollout_index: int) -> art.Trajectory:
        nonlocal running
        running += 1
        await asyncio.sleep(0.02)
        running -= 1
        return art.Trajectory(reward=float(rollout_index))

    backend = Backend(tmp_path)
    pipeline = make(backend, rollout, groups_per_step=8, max_concurrent="auto", max_staleness=1)
    steps = await collect(pipeline, 4)
    assert asked > 4
    assert 4 <= steps[-1].metrics["pipeline/concurrency_limit"] <= 6  # five seats, and a tenth more
    assert steps[-1].metrics["pipeline/engine_seats_used_share"] > 0.5
    assert steps[-1].metrics["pipeline/concurrency_wait_s"] > 0
