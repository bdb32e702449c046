"""Helpers for rollouts: ask the policy for an answer or for tool calls, and show messages to people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from art.errors import ContextLengthError

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art.model import Model
    from art.trajectory import Trajectory

Cut = Literal["cut_short", "context_full"]
"""Why a rollout ended inside a turn: the answer was longer than allowed, or the conversation filled the context."""


def describe_messages(messages: Iterable[Any]) -> list[str]:
    """Format messages as lines for people to read, with role and content, and tool calls below."""
    lines = []
    for message in messages:
        lines.append(f"{message['role']}: {message.get('content') or ''}".rstrip())
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        lines += [f"  {function['name']} {function['arguments']}" for function in calls]
    return lines


async def sample_answer(
    model: Model[Any, Any], trajectory: Trajectory, *, step: int | None = None, **request: Any
) -> Choice:
    """Ask the policy for one answer to the trajectory's messages, append it and return it.

    Args:
        request: further arguments of the request: `temperature`, `seed`, `max_completion_tokens`, ...
    """
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=trajectory.messages(), **request
    )
    choice: Choice = completion.choices[0]
    trajectory.messages_and_choices.append(choice)
    return choice


async def take_turn(
    model: Model[Any, Any], trajectory: Trajectory, *, step: int | None = None, **request: Any
) -> list[Any] | Cut:
    """Ask the policy for one answer, with the trajectory's tools, append it, and count it in the metric `num_turns`.

    Returns:
        The answer's tool calls, or the reason why the rollout ended in this turn: `cut_short` (the answer was too long)
        or `context_full`. If already the first prompt is too long for the context, the error is raised.
    """
    num_turns = trajectory.metrics.get("num_turns", 0)
    try:
        choice = await sample_answer(model, trajectory, step=step, tools=trajectory.tools or [], **request)
    except Exception as error:
        if getattr(error, "code", None) == ContextLengthError.code and num_turns:
            return "context_full"
        raise
    trajectory.metrics["num_turns"] = num_turns + 1
    return "cut_short" if choice.finish_reason == "length" else list(choice.message.tool_calls or ())
