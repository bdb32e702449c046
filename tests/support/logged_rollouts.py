"""Groups as a log has them: a rollout with a tool, judged, with times of its exchanges; and a failed rollout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art.messages import load_choice
from art.sinks import LoggedGroups, Run
from art.trajectory import History, PydanticException, Trajectory, TrajectoryGroup

BEGAN = datetime(2026, 1, 31, 10, 0, tzinfo=UTC)
T0 = BEGAN.timestamp()
SECRET = "the launch code is 0451"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": f"find things, {SECRET}",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


def run_in(folder: Path, project: str = "shop", name: str = "agent-1") -> Run:
    return Run(project=project, name=name, folder=folder)


def answer(
    text: str = "", *, at: tuple[float, float] | None = None, exchange_id: str | None = None, **fields: Any
) -> Any:
    """A choice; `at` are the start and end of its exchange, in seconds after `BEGAN`."""
    message = {"role": "assistant", "content": text, **fields.pop("message", {})}
    data: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message, **fields}
    if exchange_id is not None:
        data["exchange_id"] = exchange_id
    if at is not None:
        data["exchange"] = {
            "policy_version": 7, "started_at": T0 + at[0], "ended_at": T0 + at[1], "prompt_tokens": 30,
            "completion_tokens": 12,
        }  # fmt: skip
    return load_choice(data)


def call(name: str = "search", arguments: str = '{"query": "invoice"}', call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_rollout(**fields: Any) -> Trajectory:
    """A rollout of 5 seconds: a request of 1 s, a tool, a request of 2 s."""
    return Trajectory(
        messages_and_choices=[
            {"role": "system", "content": f"You help. {SECRET}"},
            {"role": "user", "content": f"Find my invoice, {SECRET}"},
            answer(
                at=(0.5, 1.5), exchange_id="ex_1", finish_reason="tool_calls",
                message={"tool_calls": [call()], "reasoning_content": f"I should search {SECRET}"},
            ),
            {"role": "tool", "tool_call_id": "call_1", "content": f"invoice 12: {SECRET}"},
            answer(f"It is number 12 {SECRET}", at=(2.0, 4.0), exchange_id="ex_2"),
        ],
        tools=TOOLS,
        reward=0.75,
        metrics={
            "duration": 5.0, "num_turns": 2, "independent_reward": 1.0, "ruler_score": 0.75, "ruler/brevity": 0.5,
        },
        metadata={"scenario_id": "s-3", "question": SECRET},
        logs=[f"RULER explanation: it found the invoice, {SECRET}"],
        start_time=BEGAN,
        **fields,
    )  # fmt: skip


def failure(kind: str = "TimeoutError") -> PydanticException:
    return PydanticException(type=kind, message=f"too late, {SECRET}", traceback=f"Traceback ... {SECRET}")


def logged(groups: Sequence[TrajectoryGroup], *, split: str = "train", step: int = 3, first: int = 0) -> LoggedGroups:
    """Groups as they come out of the log."""
    read = [TrajectoryGroup.model_validate_json(group.model_dump_json()) for group in groups]
    return LoggedGroups(split=split, step=step, first=first, groups=read)


def forked_rollout() -> Trajectory:
    """A rollout whose second conversation repeats the first answer of the main one, as recorded forks do."""
    shared = answer("one", at=(0, 1), exchange_id="ex_a")
    opening = {"role": "user", "content": "go"}
    other = [opening, shared, {"role": "user", "content": "b"}, answer("three", at=(3, 4), exchange_id="ex_c")]
    return Trajectory(
        messages_and_choices=[opening, shared, {"role": "user", "content": "a"}, answer("two", at=(1, 2), exchange_id="ex_b")],
        additional_histories=[History(messages_and_choices=other)],
        start_time=BEGAN,
    )  # fmt: skip
