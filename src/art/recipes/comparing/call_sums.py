"""`CallSums`: what the requests of one rollout did, as it is kept in a file."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from art.report.model_comparison import CallCounts


class CallSums(BaseModel):
    """Counts, times and tokens of the requests of one rollout."""

    model_config = ConfigDict(extra="forbid")

    answer_seconds: list[float] = Field(default_factory=list)
    """Time of each usable answer in seconds."""
    faults: dict[str, int] = Field(default_factory=dict)
    num_rate_limited: int = 0
    num_cut: int = 0
    num_empty: int = 0
    num_without_usage: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charged_usd: float = 0.0
    """Sum of the costs that the provider reported."""
    num_charged: int = 0
    """Number of answers that came with their cost."""

    @property
    def num_answers(self) -> int:
        return len(self.answer_seconds)

    def add_fault(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1

    def add_answer(self, body: dict[str, Any], seconds: float) -> None:
        """Count a usable answer.

        Args:
            body: the answer as JSON, or what is known of a streamed one.
        """
        self.answer_seconds.append(round(seconds, 6))
        choices = body.get("choices") or [{}]
        self.num_cut += any(choice.get("finish_reason") == "length" for choice in choices)
        self.num_empty += "choices" in body and all(_is_empty(choice) for choice in choices)
        usage = body.get("usage") or {}
        prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
        completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
        if prompt is None or completion is None:
            self.num_without_usage += 1
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cached_tokens += _count(details.get("cached_tokens")) or 0
        if isinstance(cost := usage.get("cost"), (int, float)) and not isinstance(cost, bool):  # OpenRouter
            self.charged_usd += cost
            self.num_charged += 1


current_calls: ContextVar[CallSums | None] = ContextVar("art_compared_calls", default=None)
"""The sums of the rollout that the running code belongs to."""


def count_calls(rollouts: Iterable[CallSums]) -> CallCounts:
    """Sum up what became of the requests of several rollouts."""
    counts = CallCounts()
    for calls in rollouts:
        counts.num_answered += calls.num_answers
        counts.num_rate_limited += calls.num_rate_limited
        counts.num_cut += calls.num_cut
        counts.num_empty += calls.num_empty
        counts.num_without_usage += calls.num_without_usage
        for kind, count in calls.faults.items():
            counts.faults[kind] = counts.faults.get(kind, 0) + count
    return counts


def _count(value: Any) -> int | None:
    """A number of tokens that a server reported; `None` if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_empty(choice: dict[str, Any]) -> bool:
    message = choice.get("message")
    if not isinstance(message, dict):
        return "message" in choice or "text" not in choice
    return not (message.get("content") or message.get("tool_calls") or message.get("function_call"))
