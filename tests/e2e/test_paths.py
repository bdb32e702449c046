"""The other ways through the system: supervised fine-tuning, rollouts named in the base URL, pinned steps, deletion."""

from __future__ import annotations

import openai
import pytest

import art

PROMPT = {"role": "user", "content": "say yes, no or maybe"}
in_module_loop = pytest.mark.asyncio(loop_scope="module")
PROJECT = "paths"


@pytest.fixture(scope="module")
def backend(shared_backend: art.LocalBackend) -> art.LocalBackend:
    return shared_backend


async def share_of(model: art.TrainableModel, word: str, *, step: int | None = None, count: int = 60) -> float:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=[PROMPT], n=count, seed=7, max_completion_tokens=8
    )
    return sum(choice.message.content == word for choice in completion.choices) / count


@in_module_loop
async def test_supervised_fine_tuning_teaches_an_answer(model: art.TrainableModel) -> None:
    before = await share_of(model, "no")
    shown = [art.Trajectory(messages_and_choices=[PROMPT, {"role": "assistant", "content": "no"}]) for _ in range(64)]
    await model.train_sft(shown, config=art.TrainSFTConfig(learning_rate=1e-2, batch_size=4))
    assert await model.get_step() == 1
    assert await share_of(model, "no") > max(0.8, before + 0.2)


@in_module_loop
async def test_an_older_step_is_served_as_it_was(model: art.TrainableModel) -> None:
    assert await share_of(model, "no", step=0) < 0.8
    assert await share_of(model, "no", step=1) > 0.8


@in_module_loop
async def test_a_rollout_named_in_the_base_url_can_be_trained(
    model: art.TrainableModel, backend: art.LocalBackend
) -> None:
    """What an agent in another language does: an address, a key, OpenAI's protocol, nothing of ours."""
    trajectories = []
    for i, reward in enumerate([0.0, 1.0]):
        async with openai.AsyncOpenAI(
            base_url=model.rollout_base_url(f"rollout-{i}"), api_key=model.inference_api_key
        ) as client:
            first = await client.chat.completions.create(
                model=model.get_inference_name(), messages=[PROMPT], max_completion_tokens=8
            )
            said = {"role": "assistant", "content": first.choices[0].message.content}
            await client.chat.completions.create(
                model=model.get_inference_name(), messages=[PROMPT, said, PROMPT], max_completion_tokens=8
            )
        trajectory = await model.get_rollout(f"rollout-{i}")
        assert len(trajectory.messages_and_choices) == 4
        trajectory.reward = reward
        trajectories.append(trajectory)
    result = await backend.train(model, [art.TrajectoryGroup(trajectories)], learning_rate=1e-4)
    assert result.metrics["ledger/trained_tokens"] > 0
    assert result.metrics["ledger/untracked_choices"] == 0


@in_module_loop
async def test_deleting_checkpoints_keeps_the_newest(model: art.TrainableModel) -> None:
    newest = await model.get_step()
    await model.delete_checkpoints()
    assert await model.get_step() == newest
    with pytest.raises(openai.NotFoundError):
        await share_of(model, "no", step=0, count=1)
    assert await share_of(model, "no", count=4) >= 0
