"""Write a choice as OpenAI does: whole, or as entries of the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from art.gateway.completion import Completion
from art.gateway.parsing.parse import Delta, call_to_dict


@dataclass(frozen=True, slots=True)
class ChatStream:
    """A streamed answer to a chat request."""

    num_prompt_tokens: int
    chunks: AsyncGenerator[dict[str, Any], None]
    """OpenAI's `chat.completion.chunk` objects."""


def whole_choice(completion: Completion) -> dict[str, Any]:
    """Make the entry of `choices` in a `chat.completion` object for a completion that has ended."""
    return _entry(completion, {"message": completion.message}, completion.reports, completion.token_ids, is_last=True)


class ChoiceWriter:
    """Passes a growing completion to `put`, as `choices` entries of `chat.completion.chunk` objects.

    Log-prob entries and token ids travel with the next text. While text is held back (half a character, a possible stop
    string), they wait with it.
    """

    def __init__(self, completion: Completion, put: Callable[[dict[str, Any]], None]) -> None:
        self._completion = completion
        self._put = put
        self._opened = False
        self._num_calls = 0
        self._num_sent = 0

    def write(self) -> None:
        """Pass on what became final since the last call."""
        if not self._opened:
            self._opened = True
            opening = {"delta": {"role": "assistant", "content": ""}}
            self._put(_entry(self._completion, opening, None, [], is_last=False))
        for delta in self._completion.take():
            self._send(self._fields(delta), is_last=False)

    def finish(self) -> None:
        self.write()
        self._send({}, is_last=True)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        if delta.tool_call is not None:
            call = call_to_dict(delta.tool_call, self._completion.exchange_id, self._num_calls)
            self._num_calls += 1
            return {"tool_calls": [{"index": self._num_calls - 1, **call}]}
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        return {"content": delta.content}

    def _send(self, delta: dict[str, Any], *, is_last: bool) -> None:
        reports = (self._completion.reports or [])[self._num_sent :]
        token_ids = self._completion.token_ids[self._num_sent :]
        self._num_sent += len(token_ids)
        self._put(_entry(self._completion, {"delta": delta}, reports or None, token_ids, is_last=is_last))


def _entry(
    completion: Completion,
    content: dict[str, Any],
    reports: list[dict[str, Any]] | None,
    token_ids: list[int],
    *,
    is_last: bool,
) -> dict[str, Any]:
    entry = {
        "index": completion.index,
        **content,
        "finish_reason": completion.finish_reason if is_last else None,
        "logprobs": None if reports is None else {"content": reports, "refusal": None},
        "exchange_id": completion.exchange_id,
    }
    if completion.returns_token_ids:
        entry["token_ids"] = token_ids
    if is_last and completion.exchange is not None:
        entry["exchange"] = completion.exchange
    if is_last and completion.stop_string is not None:
        entry["stop_reason"] = completion.stop_string
    return entry
