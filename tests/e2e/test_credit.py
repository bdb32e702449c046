"""What is learnt, through the real server: turn and token rewards, and every loss that `train` knows by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import art
from art.config.training import ALGORITHMS
from art.errors import TrajectoryError

PROMPT = {"role": "user", "content": "say yes, no or maybe"}
in_module_loop = pytest.mark.asyncio(loop_scope="module")
PROJECT = "credit"


@pytest.fixture(scope="module")
def backend(shared_backend: art.LocalBackend) -> art.LocalBackend:
    return shared_backend


async def rollouts(model: art.TrainableModel, count: int, *, num_turns: int = 1, seed: int = 0) -> list[art.Trajectory]:
    """Trajectories of `num_turns` answers each, with the log-probs of every token."""
    client, name = model.openai_client(), model.get_inference_name()

    async def rollout(i: int) -> art.Trajectory:
        trajectory = art.Trajectory()
        for turn in range(num_turns):
            trajectory.messages_and_choices.append(PROMPT)
            completion = await client.chat.completions.create(
                model=name, messages=trajectory.messages(), max_completion_tokens=8, logprobs=True,
                seed=seed + 100 * i + turn,
            )  # fmt: skip
            trajectory.messages_and_choices.append(completion.choices[0])
        return trajectory

    return list(await asyncio.gather(*map(rollout, range(count))))


def choices(trajectory: art.Trajectory) -> list[Any]:
    return [item for item in trajectory.messages_and_choices if not isinstance(item, dict)]


async def share_of(model: art.TrainableModel, word: str, count: int = 60) -> float:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[PROMPT], n=count, seed=7, max_completion_tokens=8
    )
    return sum(choice.message.content == word for choice in completion.choices) / count


@in_module_loop
async def test_turn_rewards_alone_teach(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    before = await share_of(model, "no")
    for step in range(2):
        members = await rollouts(model, 8, num_turns=2, seed=1000 * step)
        for trajectory in members:
            trajectory.turn_rewards = [float(choice.message.content == "no") for choice in choices(trajectory)]
        result = await backend.train(model, [art.TrajectoryGroup(members)], learning_rate=1e-2)
    assert result.metrics["ledger/trained_tokens"] > 0
    assert await share_of(model, "no") > before + 0.2


@in_module_loop
async def test_token_rewards_are_those_of_the_recorded_tokens(
    model: art.TrainableModel, backend: art.LocalBackend
) -> None:
    members = await rollouts(model, 2)
    for trajectory, value in zip(members, (0.0, 1.0), strict=True):
        trajectory.token_rewards = [[value] * len(choice.logprobs.content) for choice in choices(trajectory)]
    result = await backend.train(model, [art.TrajectoryGroup(members)], learning_rate=1e-4)
    assert result.metrics["ledger/trained_tokens"] == result.metrics["ledger/sampled_tokens"] > 0
    members[1].token_rewards[0].append(1.0)
    length = len(members[1].token_rewards[0])
    expected = rf"token_rewards\[0\] has {length} rewards, but that choice has {length - 1} sampled tokens"
    with pytest.raises(TrajectoryError, match=expected):
        await backend.train(model, [art.TrajectoryGroup(members)])


@in_module_loop
async def test_turn_rewards_that_do_not_fit_are_refused(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    members = await rollouts(model, 2, num_turns=2)
    members[1].turn_rewards = [1.0]
    with pytest.raises(TrajectoryError, match=r"groups\[0\]\.trajectories\[1\] has 1 turn_rewards for 2 choices"):
        await backend.train(model, [art.TrajectoryGroup(members)])
    members[1].turn_rewards = [1.0, 0.0]
    with pytest.raises(TrajectoryError, match=r"groups\[0\]\.trajectories\[0\] has no turn_rewards"):
        await backend.train(model, [art.TrajectoryGroup(members)])


@in_module_loop
async def test_every_loss_by_name_makes_a_step(model: art.TrainableModel, backend: art.LocalBackend) -> None:
    members = await rollouts(model, 4)
    for i, trajectory in enumerate(members):
        trajectory.reward = float(i % 2)
    groups, start = [art.TrajectoryGroup(members)], await model.get_step()
    for name in ALGORITHMS:
        length = 8 if name == "dr_grpo" else None
        result = await backend.train(model, groups, loss=name, normalize=length, learning_rate=1e-6, mismatch=None)
        assert result.step == await model.get_step()
    assert result.step == start + len(ALGORITHMS)
    result = await backend.train(
        model, groups, loss_fn="ppo", kl_penalty_coef=0.1, kl_penalty_reference_step=start, learning_rate=1e-6,
        truncated_importance_sampling=2.0,
    )  # fmt: skip
    assert result.step == start + len(ALGORITHMS) + 1
