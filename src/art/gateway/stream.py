"""Write one streamed choice as entries of OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from art.gateway.parsing.parse import Delta, call_to_dict
from art.protocol.chat import FinishReason


class ChoiceWriter:
    """Turns deltas into the `choices` entries of `chat.completion.chunk` objects and passes them to `put`.

    Log-prob entries travel with the next text. While text is held back (half a character, a possible stop string),
    they wait with it.
    """

    def __init__(self, index: int, exchange_id: str, put: Callable[[dict[str, Any]], None]) -> None:
        self._index = index
        self._exchange_id = exchange_id
        self._put = put
        self._opened = False
        self._num_calls = 0
        self._reports: list[dict[str, Any]] = []

    def write(self, deltas: list[Delta], reports: list[dict[str, Any]]) -> None:
        if not self._opened:
            self._opened = True
            self._send({"role": "assistant", "content": ""}, None)
        self._reports += reports
        for delta in deltas:
            self._send(self._fields(delta), None)

    def finish(self, finish_reason: FinishReason, stop_string: str | None) -> None:
        self._send({}, finish_reason, stop_string)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        if delta.tool_call is not None:
            call = {"index": self._num_calls, **call_to_dict(delta.tool_call, self._exchange_id, self._num_calls)}
            self._num_calls += 1
            return {"tool_calls": [call]}
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        return {"content": delta.content}

    def _send(self, delta: dict[str, Any], finish_reason: FinishReason | None, stop_string: str | None = None) -> None:
        reports, self._reports = self._reports, []
        entry = {
            "index": self._index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": {"content": reports, "refusal": None} if reports else None,
            "exchange_id": self._exchange_id,
        }
        if stop_string is not None:
            entry["stop_reason"] = stop_string
        self._put(entry)
