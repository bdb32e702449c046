"""One rollout: its conversations, numbers and judgement."""

from __future__ import annotations

from typing import Any

from art.viewer.answers.base import Answer
from art.viewer.answers.rollout_rows import RolloutKey, RolloutRow


class ToolCall(Answer):
    id: str | None
    name: str
    arguments: str
    """JSON text as the model wrote it."""


class Item(Answer):
    """A message of a conversation, or an answer that the policy sampled."""

    role: str
    text: str
    """The content as text. Parts that are no text, such as images, are named in brackets."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    is_sampled: bool = False
    """Whether the model sampled it in this rollout."""
    exchange_id: str | None = None
    policy_version: int | None = None
    finish_reason: str | None = None
    num_tokens: int | None = None
    """Number of sampled tokens."""
    started_at: float | None = None
    duration_s: float | None = None
    """Seconds from the request to the end of the answer, with the time that it waited."""


class Tool(Answer):
    name: str
    description: str | None
    parameters: dict[str, Any] | None


class Conversation(Answer):
    """One history of a rollout. The first is the main one; others are of sub-agents or of a compacted context."""

    name: str
    items: list[Item]
    tools: list[Tool]


class Judgement(Answer):
    """What a judge said about a rollout."""

    name: str
    score: float | None
    passes: list[float] | None = None
    """Score of each time that the judge was asked, where that was kept."""
    disagreement: float | None = None
    """Standard deviation of the scores of its passes."""
    parts: dict[str, float] = {}
    """Scores that make up its score, by name: criteria of a rubric, or judges of a weighted sum."""
    explanation: str | None = None


class RolloutDetail(RolloutRow):
    histories: list[Conversation]
    metrics: dict[str, float | None]
    metadata: dict[str, str | float | bool | None]
    logs: list[str]
    judge: Judgement | None
    error: str | None = None
    """The exception of a rollout that failed, with its traceback."""
    previous: RolloutKey | None = None
    next: RolloutKey | None = None
    """Neighbours in the same split and step, by group and index."""
    missing: str | None = None
    """What of the rollout is not known, and why."""
