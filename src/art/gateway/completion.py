"""Turn the engine's tokens for one completion into text, log-prob entries and finally a message."""

from __future__ import annotations

from typing import Any

from art.engine import Timings, TokenChunk
from art.gateway.format.renderer import Renderer
from art.gateway.parsing.parse import Delta, MessageParser
from art.gateway.record.recorder import new_exchange_id
from art.gateway.record.segments import Segments
from art.gateway.stop import StopScanner
from art.protocol.answers import FinishReason
from art.protocol.chat import Message
from art.protocol.dialects.chat_completions import ChatRequest


class Completion:
    """One choice of a request: call `add` with the engine's chunks until it has a `finish_reason`."""

    def __init__(self, index: int, request: ChatRequest, renderer: Renderer, parser: MessageParser) -> None:
        self.index = index
        self.exchange_id = new_exchange_id()
        self._token_bytes = renderer.tokenizer.token_bytes
        self._parser = parser
        self._stop_token_ids = renderer.stop_token_ids
        self._scanner = StopScanner(request.stop_strings, self._token_bytes) if request.stop_strings else None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.kept: list[list[int]] = []
        """What each token was drawn from where truncation left something out; see `TokenChunk.kept`."""
        self.segments: Segments = []
        """Parts of the answer that different steps sampled; empty for one step."""
        self.num_cached_tokens = 0
        self.timings: Timings | None = None
        """Where the engine's time went, as far as it has said so."""
        self.returns_token_ids = bool(request.return_token_ids)
        """Whether the answer has the ids of its tokens."""
        self._names_ids = bool(request.return_tokens_as_token_ids)
        self.reports: list[dict[str, Any]] | None = [] if request.logprobs else None
        """OpenAI's log-prob entries of the tokens; `None` if the request does not ask for them."""
        self.message: Message = {}
        """The answer, once it has ended."""
        self.exchange: dict[str, Any] | None = None
        """Facts about the exchange (see `Exchange.summary`), once it is recorded."""
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: TokenChunk) -> None:
        """Add the tokens of a chunk. Nothing may be added once `finish_reason` is set."""
        ids = chunk.token_ids
        text_ids = ids[:-1] if ids and ids[-1] in self._stop_token_ids else ids
        kept = len(ids)
        reason = chunk.finish_reason
        if self._scanner is None:
            self._parser.push(text_ids)
        else:
            before = self._scanner.num_tokens
            released, cut = self._scanner.push(text_ids)
            self._parser.push(released)
            if self._scanner.matched is not None:
                self._parser.push_text(cut)
                reason = "stop"
                kept = self._scanner.num_tokens - before
            elif reason is not None:
                self._parser.push(self._scanner.finish())
        self.token_ids += ids[:kept]
        self.logprobs += chunk.logprobs[:kept]
        self.kept += chunk.kept[:kept] if chunk.kept else [[]] * kept
        if self.reports is not None:
            self.reports += [self._report(chunk, i) for i in range(kept)]
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        self.timings = chunk.timings or self.timings
        if reason is not None:
            parsed = self._parser.finish()
            self.message = parsed.to_message(self.exchange_id)
            self.finish_reason = "tool_calls" if reason == "stop" and parsed.tool_calls else reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the completion; `None` if none did."""
        return None if self._scanner is None else self._scanner.matched

    def take(self) -> list[Delta]:
        """Return the parts of the message that became final since the last call."""
        return self._parser.take()

    def _report(self, chunk: TokenChunk, i: int) -> dict[str, Any]:
        alternatives = chunk.top_logprobs[i] if chunk.top_logprobs else []
        return {
            **self._token_report(chunk.token_ids[i], chunk.logprobs[i]),
            "top_logprobs": [self._token_report(token, logprob) for token, logprob in alternatives],
        }

    def _token_report(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes[token]
        # JSON has no infinity; OpenAI's smallest log-prob replaces it.
        text = f"token_id:{token}" if self._names_ids else data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}
