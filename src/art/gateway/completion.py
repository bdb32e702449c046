"""Turn the engine's tokens for one completion into text, up to a stop string, and write it as OpenAI does.

tokens --StopScanner--> released tokens --parser--> deltas --ChoiceWriter--> chunks of a stream
                                                    message --whole_choice--> entry of `choices`
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from art.engine import Timings, TokenChunk
from art.gateway.parse import Delta, MessageParser, call_to_dict
from art.gateway.renderer import Renderer
from art.protocol.answers import FinishReason
from art.protocol.chat import Message
from art.protocol.chat_completions import ChatRequest
from art.record.recorded_answers import Segments
from art.record.recorder import new_exchange_id


class StopScanner:
    """Scans the tokens of one completion and holds back those that may be part of a stop string."""

    def __init__(self, strings: list[str], token_bytes: Mapping[int, bytes]) -> None:
        self._strings = [string.encode() for string in strings]
        self._token_bytes = token_bytes
        self._held: list[int] = []
        self._buffer = b""  # bytes of the held tokens
        self.num_tokens = 0
        """Number of tokens scanned; after a match, up to and including the token that completed it."""
        self.matched: str | None = None
        """The stop string that was found first."""

    def push(self, token_ids: list[int]) -> tuple[list[int], bytes]:
        """Scan tokens, and return those that are certainly not part of a stop string.

        At a match, also return the bytes before the stop string in the token where it begins.

        Example: stop string "END", tokens "go", " E", "N", "D now"
            after " E"     (["go"], b"")      " E" is held back whole, since it may have to be cut
            after "D now"  ([], b" ")         and `matched` is "END"
        """
        released: list[int] = []
        for token in token_ids:
            self.num_tokens += 1
            self._held.append(token)
            self._buffer += self._token_bytes[token]
            matches = [(start, string) for string in self._strings if (start := self._buffer.find(string)) >= 0]
            if matches:
                start, string = min(matches, key=lambda match: match[0])
                self.matched = string.decode()
                whole, cut = self._release(start)
                return released + whole, cut
            # Hold back the longest suffix that is a proper prefix of a stop string.
            longest = min(max(map(len, self._strings)) - 1, len(self._buffer))
            suffixes = (self._buffer[-size:] for size in range(longest, 0, -1))
            held = next((one for one in suffixes if any(text.startswith(one) for text in self._strings)), b"")
            released += self._release(len(self._buffer) - len(held))[0]
        return released, b""

    def finish(self) -> list[int]:
        """Release the tokens still held back, for a completion that ended without a stop string."""
        held, self._held, self._buffer = self._held, [], b""
        return held

    def _release(self, end: int) -> tuple[list[int], bytes]:
        """Release the tokens that end at or before byte `end` of the buffer, and the next token's bytes up to there."""
        count = position = 0
        for token in self._held:
            size = len(self._token_bytes[token])
            if position + size > end:
                break
            position += size
            count += 1
        whole, self._held = self._held[:count], self._held[count:]
        cut = self._buffer[position:end]
        self._buffer = self._buffer[position:]
        return whole, cut


class Completion:
    """One choice of a request: call `add` with the engine's chunks until it has a `finish_reason`."""

    def __init__(
        self, index: int, request: ChatRequest, renderer: Renderer, parser: MessageParser, num_alternatives: int = 0
    ) -> None:
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
        self.alternatives: list[list[tuple[int, float]]] | None = [] if num_alternatives else None
        """The most likely tokens at each place, best first, where they are recorded."""
        self.num_alternatives, self._num_reported = num_alternatives, request.top_logprobs or 0
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
        top = chunk.top_logprobs or [[]] * kept
        if self.alternatives is not None:
            self.alternatives += [others[: self.num_alternatives] for others in top[:kept]]
        if self.reports is not None:
            for token, logprob, best in zip(ids[:kept], chunk.logprobs, top, strict=False):
                others = [self._report(*other) for other in best[: self._num_reported]]
                self.reports.append({**self._report(token, logprob), "top_logprobs": others})
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

    def _report(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes[token]
        # JSON has no infinity; OpenAI's smallest log-prob replaces it.
        text = f"token_id:{token}" if self._names_ids else data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}


@dataclass(frozen=True, slots=True)
class ChatStream:
    """A streamed answer to a chat request."""

    num_prompt_tokens: int
    chunks: AsyncGenerator[dict[str, Any], None]
    """OpenAI's `chat.completion.chunk` objects."""


def whole_choice(completion: Completion) -> dict[str, Any]:
    """Make the entry of `choices` in a `chat.completion` object for a completion that has ended."""
    return _entry(completion, {"message": completion.message}, 0, is_last=True)


class ChoiceWriter:
    """Passes a growing completion to `put`, as `choices` entries of `chat.completion.chunk` objects.

    Log-prob entries and token ids travel with the next text. While text is held back (half a character, a possible stop
    string), they wait with it.
    """

    def __init__(self, completion: Completion, put: Callable[[dict[str, Any]], None]) -> None:
        self._completion = completion
        self._put = put
        self._opened = False
        self._num_calls = self._num_sent = 0

    def write(self) -> None:
        """Pass on what became final since the last call."""
        if not self._opened:
            self._opened = True
            opening = {"delta": {"role": "assistant", "content": ""}}
            self._put(_entry(self._completion, opening, len(self._completion.token_ids), is_last=False))
        for delta in self._completion.take():
            if delta.tool_call is not None:
                call = call_to_dict(delta.tool_call, self._completion.exchange_id, self._num_calls)
                self._send({"tool_calls": [{"index": self._num_calls, **call}]}, is_last=False)
                self._num_calls += 1
            elif delta.reasoning:
                self._send({"reasoning_content": delta.reasoning}, is_last=False)
            else:
                self._send({"content": delta.content}, is_last=False)

    def finish(self) -> None:
        self.write()
        self._send({}, is_last=True)

    def _send(self, delta: dict[str, Any], *, is_last: bool) -> None:
        since, self._num_sent = self._num_sent, len(self._completion.token_ids)
        self._put(_entry(self._completion, {"delta": delta}, since, is_last=is_last))


def _entry(completion: Completion, content: dict[str, Any], since: int, *, is_last: bool) -> dict[str, Any]:
    """An entry of `choices` with the log-probs and tokens from number `since` on."""
    reports = completion.reports
    if "delta" in content:
        reports = (reports or [])[since:] or None
    entry = {
        "index": completion.index, **content, "finish_reason": completion.finish_reason if is_last else None,
        "logprobs": None if reports is None else {"content": reports, "refusal": None},
        "exchange_id": completion.exchange_id,
    }  # fmt: skip
    if completion.returns_token_ids:
        entry["token_ids"] = completion.token_ids[since:]
    if is_last and completion.exchange is not None:
        entry["exchange"] = completion.exchange
    if is_last and completion.stop_string is not None:
        entry["stop_reason"] = completion.stop_string
    return entry
