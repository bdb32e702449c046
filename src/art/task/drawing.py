"""Draw scenarios and scripted play of a task, and check what the task returns."""

from __future__ import annotations

import random
from collections.abc import Iterable

from art.errors import ConfigError
from art.task.interface import Conversation, Scenario, Split, Task, play_by_skill


def draw_scenarios(task: Task, split: Split, *, seed: int, count: int) -> list[Scenario]:
    """Draw scenarios of a task by `task.scenarios(...)`, and check what it returns.

    Raises:
        ConfigError: the result is not a list of scenarios, has too few for training, or none for a held-out split.
    """
    result = task.scenarios(split, seed=seed, count=count)
    scenarios = list(result) if isinstance(result, Iterable) else []
    call = f"task {task.name!r}: scenarios({split!r}, seed={seed}, count={count})"
    if wrong := [item for item in scenarios if not isinstance(item, Scenario)]:
        raise ConfigError(f"{call} must return a list of `Scenario`, e.g. from `self.scenario(...)`; got {wrong[0]!r}")
    fewest = count if split == "train" else min(count, 1)
    if not fewest <= len(scenarios) <= count:
        raise ConfigError(
            f"{call} returned {len(scenarios)} scenarios, expected {count}. If there are not that many to train on, "
            "repeat some"
        )
    return scenarios


def draw_conversations(task: Task, *, seed: int, count: int, skill: float | None = None) -> list[Conversation]:
    """Draw scripted play of a task by `task.warm_start_conversations(...)`, and check what it returns.

    Args:
        skill: mean skill of the play, from 0 to 1; `None` takes the task's own.

    Raises:
        ConfigError: the task has no scripted play, the result is not a list of conversations that end with an answer,
            or the task does not let the skill be set.
    """
    if skill is not None and not 0 <= skill <= 1:
        raise ConfigError(f"the skill of play must be from 0 to 1, got {skill}")
    if skill is not None and type(task).warm_start_conversations is not Task.warm_start_conversations:
        raise ConfigError(
            f"task {task.name!r} overrides `warm_start_conversations`, so its skill cannot be set; implement "
            "`play(rng, skill)` instead"
        )
    rng = random.Random(seed)
    result = task.warm_start_conversations(rng, count) if skill is None else play_by_skill(task, rng, count, skill)
    conversations = list(result) if isinstance(result, Iterable) else []
    call = f"task {task.name!r}: warm_start_conversations(rng, {count})"
    if len(conversations) != count:
        raise ConfigError(f"{call} returned {len(conversations)} conversations, expected {count}")
    for conversation in conversations:
        if not isinstance(conversation, Conversation):
            raise ConfigError(f"{call} must return a list of `Conversation`; got {conversation!r}")
        if not conversation.messages or conversation.messages[-1]["role"] != "assistant":
            raise ConfigError(f"{call}: a conversation must end with an assistant message; got {conversation!r}")
    return conversations
