"""`art.pipeline` with a server: equal to the plain loop without staleness, and within its bound with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous.step import PipelineStep
from art.task import derive_seed, sample_answer
from art.tasks.yes_no_maybe import REWARDS, YesNoMaybe, parse_answer

PROJECT = "pipeline"
GROUPS, ROLLOUTS, STEPS = 4, 4, 3
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "num_minibatches": 2}
SCENARIOS = YesNoMaybe().scenarios("train", seed=0, count=GROUPS * STEPS)


async def rollout(model: art.TrainableModel, scenario: art.Scenario, rollout_index: int) -> art.Trajectory:
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario.inputs["prompt"]}])
    choice = await sample_answer(
        model, trajectory, temperature=1.0, max_completion_tokens=8, logprobs=True,
        seed=derive_seed(scenario.seed, rollout_index),
    )  # fmt: skip
    trajectory.reward = REWARDS.get(parse_answer(choice.message.content), 0.0)
    return trajectory


async def make_model(backend: art.LocalBackend, base_model: Path, name: str) -> art.TrainableModel:
    model = art.TrainableModel(name=name, project=PROJECT, base_model=str(base_model), report_metrics=[])
    await model.register(backend)
    return model


def tokens_of(groups: Sequence[art.TrajectoryGroup]) -> list[list[list[str]]]:
    """The sampled tokens of each rollout of each group."""
    return [[_tokens(trajectory.messages_and_choices[-1]) for trajectory in group] for group in groups]


def _tokens(choice: Any) -> list[str]:
    return [token.token for token in choice.logprobs.content]


async def test_without_staleness_it_is_the_plain_loop_token_for_token(
    shared_backend: art.LocalBackend, tiny_model: Path
) -> None:
    plain, piped = [await make_model(shared_backend, tiny_model, name) for name in ("plain", "piped")]
    expected = []
    for step in range(STEPS):
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(plain, scenario, index) for index in range(ROLLOUTS))
                for scenario in SCENARIOS[step * GROUPS : (step + 1) * GROUPS]
            ),
            pbar_desc=None,
        )
        result = await plain.train(groups, **SETTINGS)
        expected.append((tokens_of(groups), result.metrics["loss/train"], result.metrics["loss/grad_norm"]))
    pipeline = art.pipeline(
        piped, scenarios=SCENARIOS, rollout=rollout, rollouts_per_group=ROLLOUTS, groups_per_step=GROUPS,
        max_staleness=0, shuffle=False,
    )  # fmt: skip
    steps = [step async for step in pipeline.train(STEPS, **SETTINGS)]
    seen = [(tokens_of(step.groups), step.metrics["loss/train"], step.metrics["loss/grad_norm"]) for step in steps]
    assert [tokens for tokens, *_ in seen] == [tokens for tokens, *_ in expected]
    assert [numbers for _, *numbers in seen] == [pytest.approx(numbers, rel=1e-4) for _, *numbers in expected]
    assert [step.metrics["offpolicy/max_staleness"] for step in steps] == [0] * STEPS


@pytest.mark.parametrize("in_flight", ["finish", "switch"])
async def test_with_staleness_everything_is_trained_within_the_bound(
    in_flight: str, shared_backend: art.LocalBackend, tiny_model: Path
) -> None:
    model = await make_model(shared_backend, tiny_model, in_flight)
    pipeline = art.pipeline(
        model, scenarios=SCENARIOS, rollout=rollout, evaluate=YesNoMaybe().scenarios("val", seed=0, count=4),
        rollouts_per_group=ROLLOUTS, groups_per_step=2, max_staleness=2, every=3, in_flight=in_flight,
    )  # fmt: skip
    steps: list[PipelineStep] = [step async for step in pipeline.train(6, **SETTINGS)]
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert max(step.staleness_max for step in steps) == 2
    for step in steps:
        versions = {trajectory.initial_policy_version for group in step.groups for trajectory in group}
        metrics = step.metrics
        dropped = sum(value for name, value in metrics.items() if name.startswith("ledger/dropped_tokens/"))
        assert metrics["ledger/sampled_tokens"] == metrics["ledger/trained_tokens"] + dropped
        without_spread = {"ledger/dropped_tokens/no_reward_spread"}
        assert {name for name in metrics if name.startswith("ledger/dropped_tokens/")} <= without_spread, versions
        assert metrics["offpolicy/max_staleness"] <= 2
        if in_flight == "finish":
            assert step.staleness_max == metrics["offpolicy/max_staleness"]
    trained = sorted(group.metadata["scenario_id"] for step in steps for group in step.groups)
    assert trained == sorted(scenario.id for scenario in SCENARIOS)
    assert [evaluation.step for step in steps for evaluation in step.evaluations] == [0, 3, 6]
