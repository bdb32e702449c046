"""Two adapters on one base learn the word game together, one as the spymaster and one as the guesser."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art.task import draw_scenarios
from art.tasks.codenames.codenames_options import ROLES, Role
from art.tasks.codenames.codenames_task import Codenames
from art.tasks.codenames.two_policies import PairConfig, train_two
from art.testing.tiny.build import build_tiny_model
from art.trajectory import TrajectoryGroup

TASK = Codenames(**Codenames.tiny_options)


def first_checkpoint(model: art.TrainableModel) -> Any:
    """The model before its first step."""
    return SimpleNamespace(
        openai_client=model.openai_client, get_inference_name=lambda step=None: model.get_inference_name(0)
    )


async def wins(policies: dict[Role, Any], count: int = 200) -> float:
    """Share of held-out games that a team wins."""
    boards = draw_scenarios(TASK, "val", seed=0, count=count)
    games = await asyncio.gather(*(TASK.team_rollout(policies, board, 0) for board in boards))
    return statistics.fmean(game.metrics["win"] for game in games)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_both_policies_learn_their_role(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "tiny", task=TASK, seed=0)
    async with art.LocalBackend(path=str(tmp_path / "art")) as backend:
        policies: dict[Role, Any] = {
            role: art.TrainableModel(name=role, project="words", base_model=str(base)) for role in ROLES
        }
        for model in policies.values():
            await model.register(backend)
        seen: list[TrajectoryGroup] = []
        await train_two(
            TASK, policies, PairConfig(num_steps=30, learning_rate=3e-3), lambda step, groups: seen.extend(groups)
        )
        before = {role: first_checkpoint(model) for role, model in policies.items()}
        shares = {
            "neither": await wins(before),
            "spymaster": await wins({**before, "spymaster": policies["spymaster"]}),
            "guesser": await wins({**before, "guesser": policies["guesser"]}),
            "both": await wins(policies),
        }
        print(shares)
        assert [await model.get_step() for model in policies.values()] == [30, 30]
    assert {group.metadata["role"] for group in seen} == {*ROLES}
    assert shares["both"] > max(shares["spymaster"], shares["guesser"])
    assert min(shares["spymaster"], shares["guesser"]) > shares["neither"] + 0.05
    assert shares["both"] > shares["neither"] + 0.2
