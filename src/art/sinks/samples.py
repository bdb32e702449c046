"""A sample of the rollouts of a step, for trackers that show tables of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art.sinks.sink import LoggedGroups
from art.trajectory import Trajectory, TrajectoryGroup

SAMPLES = 8
"""Rollouts that a tracker gets of each split and step."""
MAX_TEXT = 20_000
"""Longest conversation in a table, in characters; the middle of longer ones is left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout of a step."""

    split: str
    step: int
    group: int
    """Position of the group among those of its split and step."""
    index: int
    """Position of the rollout in its group."""
    trajectory: Trajectory

    def to_row(self) -> dict[str, str | float | int]:
        """Return the rollout as a row of a table."""
        trajectory = self.trajectory
        return {
            "step": self.step, "split": self.split, "group": self.group, "rollout": self.index,
            "reward": float(trajectory.reward), "conversation": conversation_text(trajectory),
            "metrics": json.dumps(trajectory.metrics, default=str),
            "metadata": json.dumps(trajectory.metadata, default=str),
        }  # fmt: skip


COLUMNS = ("step", "split", "group", "rollout", "reward", "conversation", "metrics", "metadata")
"""Names of the columns of `Sample.to_row`."""


class Sampler:
    """Takes the best and the worst rollout of the first groups of each step, until it has `count` of them.

    Samples wait for the next row, so that a tracker gets both in one request, or neither.
    """

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count
        self._waiting: dict[str, list[Sample]] = {}

    def add(self, groups: LoggedGroups) -> None:
        """Take samples of groups that were logged."""
        samples = self._waiting.setdefault(groups.split, [])
        if samples and samples[0].step != groups.step:
            samples.clear()
        for number, group in enumerate(groups.groups, groups.first):
            for index in _ends(group)[: max(self._count - len(samples), 0)]:
                samples.append(Sample(groups.split, groups.step, number, index, group.trajectories[index]))

    def waiting(self) -> Mapping[str, list[Sample]]:
        """Return the samples that no row has taken yet, by split."""
        return {split: samples for split, samples in self._waiting.items() if samples}

    def forget(self) -> None:
        """Drop the waiting samples, once the tracker has them."""
        self._waiting.clear()


def _ends(group: TrajectoryGroup) -> list[int]:
    """Return the indices of the best and the worst rollout; one index if all have the same reward."""
    order = sorted(range(len(group.trajectories)), key=lambda i: group.trajectories[i].reward, reverse=True)
    if not order or group.trajectories[order[0]].reward == group.trajectories[order[-1]].reward:
        return order[:1]
    return [order[0], order[-1]]


def conversation_text(trajectory: Trajectory) -> str:
    """Return the conversation as plain text: a heading with the role before each message."""
    parts = []
    for message in trajectory.messages():
        fields: dict[str, Any] = dict(message)
        parts.append(f"[{fields.get('role', '?')}]")
        if reasoning := fields.get("reasoning_content") or fields.get("reasoning"):
            parts.append(f"(reasoning) {reasoning}")
        if content := fields.get("content"):
            parts.append(content if isinstance(content, str) else json.dumps(content, default=str, ensure_ascii=False))
        parts += [f"(tool call) {_call_text(call)}" for call in fields.get("tool_calls") or ()]
    text = "\n".join(parts)
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - MAX_TEXT} characters are left out ...]\n{text[-half:]}"
    return text


def _call_text(call: Mapping[str, object]) -> str:
    function = call.get("function")
    if isinstance(function, Mapping):
        return f"{function.get('name')} {function.get('arguments')}"
    return json.dumps(call, default=str, ensure_ascii=False)
