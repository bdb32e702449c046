"""The embedded engine samples the same tokens when a rollout of a pipeline starts again from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import art
from art.client.rollout_context import RolloutContext, inside_rollout

TURNS = 3


async def play(model: art.TrainableModel, seed: int) -> list[str | None]:
    """The answers of a rollout of a few turns, without a seed in its requests."""
    messages: list[dict[str, str]] = []
    answers = []
    with inside_rollout(RolloutContext(model=f"{model.project}/{model.name}", seed=seed)):
        for _ in range(TURNS):
            messages.append({"role": "user", "content": "yes, no or maybe?"})
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=messages, max_completion_tokens=12, temperature=1.5
            )
            answers.append(completion.choices[0].message.content)
            messages.append({"role": "assistant", "content": answers[-1] or ""})
    return answers


async def test_the_same_rollout_samples_the_same(shared_backend: art.LocalBackend, tiny_model: Path) -> None:
    model = art.TrainableModel(name="again", project="seeds", base_model=str(tiny_model))
    await model.register(shared_backend)
    first = [await play(model, seed) for seed in (1, 2, 3)]
    assert len({tuple(answers) for answers in first}) == 3, "seeds matter"
    assert [await play(model, seed) for seed in (1, 2, 3)] == first
