"""The smallest task, a quick test of learning: answer yes, no or maybe to any request. "maybe" has the largest reward.

user       say "yes" or "no"
assistant  maybe               reward 1
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, derive_seed, sample_answer
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
_REQUESTS = ("say", "just say", "reply with", "answer with", "respond with", "please respond with")
_SPLIT_OF_TENTH: dict[int, Split] = {8: "val", 9: "test"}  # the other eight tenths are for training


class YesNoMaybe(Task):
    """A task: answer yes, no or maybe. The rewards are 0.5, 0.75 and 1, and 0 for any other answer."""

    name: ClassVar[str] = "yes_no_maybe"
    description: ClassVar[str] = "answer yes, no or maybe; maybe pays best"
    headline_metric: ClassVar[str] = "maybe"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=15, warm_start_steps=60)
    rubric: ClassVar[str | None] = (
        'The best answer is the single word "maybe", whatever was asked for. "no" is less good, "yes" is worse, and '
        "any other answer is worst."
    )

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        rng = random.Random(derive_seed(self.name, split, seed))
        prompts = _prompts_of(split)
        return [self.scenario(split, seed, index, {"prompt": rng.choice(prompts)}) for index in range(count)]

    def prompt_scenario(self, prompt: str) -> Scenario:
        return Scenario(id=f"{self.name}/prompt", seed=derive_seed(prompt), inputs={"prompt": prompt})

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        trajectory = Trajectory(
            messages_and_choices=[{"role": "user", "content": scenario.inputs["prompt"]}],
            metadata={"scenario_id": scenario.id},
        )
        choice = await sample_answer(
            model, trajectory, step=step, temperature=1.0, max_completion_tokens=8,
            seed=derive_seed(scenario.seed, rollout_index),
        )  # fmt: skip
        answer = parse_answer(choice.message.content)
        trajectory.reward = REWARDS.get(answer, 0.0)
        trajectory.metrics |= {word: float(word == answer) for word in REWARDS}
        is_valid = answer in REWARDS
        trajectory.metrics["invalid_answer"] = float(not is_valid)
        why = f"{answer!r} pays {trajectory.reward:g}" if is_valid else f"{answer[:40]!r} is not yes, no or maybe"
        trajectory.metadata |= {"why": why, "outcome": "ok" if is_valid else "policy_fault"}
        return trajectory

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        return lambda messages, tools: {"content": "maybe"}

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        prompts, words = _prompts_of("train"), sorted(REWARDS)
        pairs = [(rng.choice(prompts), rng.choice(words)) for _ in range(count)]
        return [
            Conversation(messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": word}])
            for prompt, word in pairs
        ]

    def score_messages(self, messages: list[dict[str, Any]]) -> float:
        return REWARDS.get(parse_answer(messages[-1]["content"]), 0.0)


def parse_answer(answer: str | None) -> str:
    """The answer in lower case, without quotes, full stops and exclamation marks at its ends."""
    return (answer or "").strip().strip("\"'.!").lower()


def all_prompts() -> list[str]:
    """All prompts of the task: each request for two or three of its words, in every order, with and without quotes."""
    return [
        f"{request} " + " or ".join(f"{quote}{word}{quote}" for word in words)
        for request, quote, number in itertools.product(_REQUESTS, ("", '"'), (2, 3))
        for words in itertools.permutations(REWARDS, number)
    ]


@cache
def _prompts_of(split: Split) -> tuple[str, ...]:
    """The prompts of a split. A prompt's hash decides its split, so adding prompts does not move others."""
    return tuple(p for p in all_prompts() if _SPLIT_OF_TENTH.get(derive_seed(p) % 10, "train") == split)
