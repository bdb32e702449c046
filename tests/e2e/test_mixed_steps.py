"""Rewards, supervised data and observations in one step, with `LocalBackend`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import fmean

import pytest
import pytest_asyncio

import art
from art.config import TrainConfig
from art.errors import ConfigError, TrajectoryError
from art.storage.step_files import TokenFile, read_plans
from art.tasks.yes_no_maybe import parse_answer
from tests.support.model_folder import paths_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

Rollouts = Callable[[], Awaitable[list[art.TrajectoryGroup]]]
QUESTION = {"role": "user", "content": "say yes, no or maybe"}
GREETING = {"role": "user", "content": "good morning, what is your name?"}
EXAMPLES = [art.Trajectory(messages_and_choices=[GREETING, {"role": "assistant", "content": "good morning"}])] * 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(shared_backend: art.LocalBackend, tiny_model: Path) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="mixed-steps", base_model=str(tiny_model))
    await model.register(shared_backend)
    return model


async def rollout(model: art.TrainableModel) -> art.Trajectory:
    """Two answers, and between them the verdict of the environment."""
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[QUESTION])
    for turn in range(2):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=4
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        if turn == 0:
            trajectory.reward = float(parse_answer(completion.choices[0].message.content) == "maybe")
            trajectory.messages_and_choices.append({"role": "user", "content": "maybe maybe"})
    return trajectory


async def groups_of(model: art.TrainableModel) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(model) for _ in range(16)) for _ in range(2)], pbar_desc=None
    )


async def test_one_step_learns_from_rewards_examples_and_the_environment(model: art.TrainableModel) -> None:
    config = TrainConfig(learning_rate=3e-3, sft_weight=0.1, observation_weight=0.05)
    rewards, results = [], []
    for _ in range(10):
        groups = await groups_of(model)
        rewards.append(fmean(trajectory.reward for group in groups for trajectory in group))
        results.append(await model.train(groups, config, sft=EXAMPLES))
    first, last = results[0].metrics, results[-1].metrics
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.1
    assert last["loss/sft"] < 0.7 * first["loss/sft"]
    assert last["loss/observation"] < 0.9 * first["loss/observation"]
    assert first["data/step_num_sft_trajectories"] == 2
    assert first["ledger/observed_tokens"] == first["data/step_observation_tokens"] > 0
    sampled = [first[f"ledger/{name}_tokens"] for name in ("sampled", "trained", "context")]
    assert sampled[0] == sum(sampled[1:]) + sum(
        value for name, value in first.items() if name.startswith("ledger/dropped_tokens/")
    )
    supervised = first["data/step_sft_tokens"] + first["data/step_observation_tokens"]
    assert first["data/step_trainable_tokens"] == supervised + first["ledger/trained_tokens"]
    assert '"loss/sft"' in paths_of(model).history.read_text()
    (plan,) = read_plans(paths_of(model).step(results[0].step))
    rollouts = [rollout for group in plan.groups for rollout in group.rollouts]
    assert sum(rollout.trained_tokens for rollout in rollouts) == first["ledger/trained_tokens"]
    tokens = TokenFile(paths_of(model).step(results[0].step))
    assert plan.has_token_file
    assert len(tokens.read_all(["reasons"])["reasons"]) == first["data/step_trainable_tokens"]


async def test_groups_without_spread_leave_the_step_to_the_examples(model: art.TrainableModel) -> None:
    groups = await groups_of(model)
    for trajectory in groups[0]:
        trajectory.reward = 1.0
    before = await model.get_step()
    nothing = await model.train(groups[:1], sft=[])
    assert (nothing.trained, nothing.step) == (False, before)
    result = await model.train(groups[:1], sft=EXAMPLES, learning_rate=1e-4, on_nothing="raise")
    assert (result.trained, result.step) == (True, before + 1)
    assert result.metrics["ledger/trained_tokens"] == 0
    assert result.metrics["data/step_sft_tokens"] == result.metrics["data/step_trainable_tokens"] > 0
    assert not any("no step was trained" in finding for finding in result.findings)


async def test_what_cannot_be_mixed_is_refused(model: art.TrainableModel) -> None:
    groups = await groups_of(model)
    with pytest.raises(ConfigError, match="`sft_weight` does nothing without `sft`"):
        await model.train(groups, sft_weight=0.5)
    with pytest.raises(ConfigError, match="dpo is a loss of pairs alone and takes no supervised data"):
        await model.train(groups, sft=EXAMPLES, loss="dpo")
    with pytest.raises(TrajectoryError, match="`sft` is a Trajectory, not a list of Trajectory"):
        await model.train(groups, sft=EXAMPLES[0])  # type: ignore[arg-type]
    with pytest.raises(TrajectoryError, match=r"sft\[0\] has no messages"):
        await model.train(groups, sft=[art.Trajectory()])
