"""Sample rollouts for tables: which are taken, and their text."""

from __future__ import annotations

from typing import Any

import art
from art.sinks import LoggedGroups
from art.sinks.samples import COLUMNS, MAX_TEXT, Sampler, conversation_text


def group(*rewards: float) -> art.TrajectoryGroup:
    return art.TrajectoryGroup([art.Trajectory(reward=reward) for reward in rewards])


def logged(groups: list[art.TrajectoryGroup], *, split: str = "train", step: int = 1, first: int = 0) -> LoggedGroups:
    return LoggedGroups(split=split, step=step, first=first, groups=groups)


def taken(sampler: Sampler) -> list[tuple[str, int, int, int]]:
    return [(s.split, s.step, s.group, s.index) for samples in sampler.waiting().values() for s in samples]


def test_the_best_and_the_worst_of_the_first_groups() -> None:
    sampler = Sampler(5)
    sampler.add(logged([group(0.2, 0.9, 0.1), group(1.0, 1.0), group()]))
    sampler.add(logged([group(0.0, 1.0), group(0.0, 1.0)], first=3))
    sampler.add(logged([group(1.0)], split="val"))
    assert taken(sampler) == [
        ("train", 1, 0, 1), ("train", 1, 0, 2), ("train", 1, 1, 0), ("train", 1, 3, 1), ("train", 1, 3, 0),
        ("val", 1, 0, 0),
    ]  # fmt: skip
    sampler.forget()
    assert taken(sampler) == []


def test_samples_of_a_step_without_a_row_do_not_pile_up() -> None:
    sampler = Sampler(2)
    for step in range(100):
        sampler.add(logged([group(0.0, 1.0)], step=step))
    assert taken(sampler) == [("train", 99, 0, 1), ("train", 99, 0, 0)]


def test_no_samples() -> None:
    sampler = Sampler(0)
    sampler.add(logged([group(0.0, 1.0)]))
    assert taken(sampler) == []


def test_a_conversation_as_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages: Any = [
        {"role": "user", "content": "up?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "blue"},
    ]
    trajectory = art.Trajectory(messages_and_choices=messages)
    assert conversation_text(trajectory).splitlines() == [
        "[user]", "up?", "[assistant]", "(reasoning) hm", '(tool call) look {"at": "sky"}', "[tool]", "blue",
    ]  # fmt: skip


def test_a_long_conversation_loses_its_middle() -> None:
    messages: Any = [{"role": "user", "content": "a" * MAX_TEXT + "b" * MAX_TEXT}]
    text = conversation_text(art.Trajectory(messages_and_choices=messages))
    assert MAX_TEXT < len(text) < MAX_TEXT + 100
    assert text.startswith("[user]\na")
    assert text.endswith("b")
    assert "characters are left out" in text


def test_a_row_has_every_column() -> None:
    sampler = Sampler(1)
    sampler.add(logged([group(0.5)]))
    (sample,) = sampler.waiting()["train"]
    assert tuple(sample.to_row()) == COLUMNS
