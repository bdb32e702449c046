"""Turn the engine's tokens for one completion into text, log-prob entries and finally a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from art.engine import TokenChunk
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.parsing.parse import Delta, MessageParser
from art.gateway.stop import StopScanner
from art.protocol.chat import FinishReason, Message


class Completion:
    """A completion that is being sampled. Call `add` with the engine's chunks until it returns true."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: MessageParser,
        stop_token_ids: tuple[int, ...],
        stop_strings: list[str],
        *,
        with_logprobs: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._stop_token_ids = stop_token_ids
        self._scanner = StopScanner(stop_strings, tokenizer.token_bytes) if stop_strings else None
        self._with_logprobs = with_logprobs
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._reports: list[dict[str, Any]] = []
        self.num_cached_tokens = 0
        self._finish: str | None = None

    def add(self, chunk: TokenChunk) -> bool:
        """Add tokens. Returns true once the completion has ended, so that later chunks can be ignored."""
        ids = chunk.token_ids
        text_ids = ids[:-1] if ids and ids[-1] in self._stop_token_ids else ids
        kept = len(ids)
        self._finish = chunk.finish_reason
        if self._scanner is None:
            self._parser.push(text_ids)
        else:
            before = self._scanner.num_tokens
            scan = self._scanner.push(text_ids)
            self._parser.push(scan.token_ids)
            if scan.matched:
                self._parser.push_text(scan.cut)
                self._finish = "stop"
                kept = self._scanner.num_tokens - before
            elif self._finish is not None:
                self._parser.push(self._scanner.finish())
        self.token_ids += ids[:kept]
        self.logprobs += chunk.logprobs[:kept]
        if self._with_logprobs:
            self._report(chunk, kept)
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        return self._finish is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the completion, if one did."""
        return None if self._scanner is None else self._scanner.matched

    def take(self) -> list[Delta]:
        """Return the parts of the message that became final since the last call."""
        return self._parser.take()

    def take_reports(self) -> list[dict[str, Any]]:
        """Return OpenAI log-prob entries for the tokens since the last call; none without `with_logprobs`."""
        reports, self._reports = self._reports, []
        return reports

    def finish(self, exchange_id: str) -> tuple[Message, FinishReason]:
        """Return the whole message. The ids of its tool calls contain the exchange id, which makes them unique."""
        parsed = self._parser.finish()
        message = parsed.to_message(exchange_id)
        if self._finish == "stop" and parsed.tool_calls:
            return message, "tool_calls"
        return message, "length" if self._finish == "length" else "stop"

    def _report(self, chunk: TokenChunk, kept: int) -> None:
        for i in range(kept):
            alternatives = chunk.top_logprobs[i] if chunk.top_logprobs else []
            self._reports.append(
                {
                    **self._token_report(chunk.token_ids[i], chunk.logprobs[i]),
                    "top_logprobs": [self._token_report(token, logprob) for token, logprob in alternatives],
                }
            )

    def _token_report(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes[token]
        # JSON has no infinity; OpenAI's smallest log-prob replaces it.
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion that has ended and is recorded."""

    index: int
    exchange_id: str
    message: Message
    finish_reason: FinishReason
    num_tokens: int
    num_cached_tokens: int
    stop_string: str | None
    reports: list[dict[str, Any]] | None
