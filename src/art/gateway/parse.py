"""Parse sampled tokens to an assistant message. Parsing token by token or all at once gives the same message.

The tagged grammar looks at token ids, so text that merely looks like a tag stays text. Qwen, Hermes and many others use
these tags (for the tags that other families put around calls, see `tool_calls.py`):

    [<think> reasoning </think>] content (<tool_call> {"name": ..., "arguments": {...}} </tool_call>)*

A malformed tool call stays in the content unchanged, so that no sampled text disappears.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any

from art.gateway.calls import CallFormat, Schemas, ToolCall
from art.gateway.tokenizer import TextStream, Tokenizer
from art.gateway.tool_calls import TAGGED
from art.protocol.chat import Message, tool_call


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The content, reasoning and tool calls of one completion."""

    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_open: bool = False
    """Whether the completion ended inside its reasoning."""

    def to_message(self, exchange_id: str) -> Message:
        """Make OpenAI's assistant message. The ids of its tool calls contain `exchange_id`, the id of the record."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call_to_dict(call, exchange_id, i) for i, call in enumerate(self.tool_calls)]
        return message


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a message that later tokens cannot change, for streaming. Exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


def call_to_dict(call: ToolCall, exchange_id: str, index: int) -> dict[str, Any]:
    """Make a tool call in OpenAI's form. Its id has at most 40 characters, OpenAI's limit."""
    return tool_call(f"call_{exchange_id.removeprefix('ex_')}_{index}", call.name, call.arguments)


@dataclass(frozen=True, slots=True)
class Tags:
    """Ids of the tokens around reasoning; `None` where the vocabulary lacks the token."""

    think_open: int | None
    think_close: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Tags:
        return cls(tokenizer.token_id("<think>"), tokenizer.token_id("</think>"))

    def opens_reasoning(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends inside a `<think>` block, i.e. the completion begins with reasoning."""
        # Only the opening of the answer can contain it: the last few tokens.
        tags = [token for token in prompt_ids[-16:] if token in (self.think_open, self.think_close)]
        return bool(tags) and tags[-1] == self.think_open


class MessageParser(abc.ABC):
    """Parses the tokens of one completion, without the token that ended it.

    Holds the bytes of the current segment and the finished parts of the message.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._stream = TextStream()
        self._raw = bytearray()  # bytes of the current segment that are not decoded yet
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._deltas: list[Delta] = []

    @abc.abstractmethod
    def push(self, token_ids: list[int]) -> None:
        """Add sampled tokens."""

    def push_text(self, data: bytes) -> None:
        """Add the first bytes of a token whose other bytes a stop string cut off."""
        self._raw += data

    def take(self) -> list[Delta]:
        """Return the pieces of the message that became final since the last call."""
        self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    @abc.abstractmethod
    def _flush(self) -> None:
        """Add what is certain of the current segment to the message."""

    @abc.abstractmethod
    def finish(self) -> ParsedMessage:
        """Return the whole message. A last call of `take` then returns the remaining deltas."""

    def _decode(self) -> str:
        """Text of the bytes so far, without a character that is not complete."""
        text = self._stream.push(bytes(self._raw))
        self._raw.clear()
        return text

    def _end_segment(self) -> str:
        return self._decode() + self._stream.finish()

    def _parsed(self, *, reasoning_open: bool) -> ParsedMessage:
        reasoning = "".join(self._reasoning) or None
        return ParsedMessage("".join(self._content), reasoning, self._calls, reasoning_open)


_START, _REASONING, _CONTENT, _CALL = range(4)


class TaggedParser(MessageParser):
    """Parses the sampled tokens of an answer with tags around its reasoning and its tool calls."""

    def __init__(
        self, tokenizer: Tokenizer, tags: Tags, *, in_reasoning: bool, schemas: Schemas | None,
        calls: CallFormat = TAGGED,
    ) -> None:  # fmt: skip
        """`schemas` are the parameters of the functions that may be called; `None` if calls are ordinary text."""
        super().__init__(tokenizer)
        self._tags = tags
        self._format = calls
        self._schemas = schemas or {}
        parse_tools = schemas is not None and calls.is_in(tokenizer)
        self._call_open = tokenizer.token_id(calls.opening) if parse_tools and calls.opening else None
        self._call_close = tokenizer.token_id(calls.closing) if parse_tools and calls.closing else None
        self._may_be_calls = parse_tools and calls.opening is None
        thinks = {tags.think_open, tags.think_close}
        self._controls = frozenset((set() if None in thinks else thinks) | {self._call_open, self._call_close})
        self._state = _REASONING if in_reasoning else _START
        self._held = ""  # whitespace at the end of the current segment: dropped if a tag follows
        self._strip_newlines = False  # after reasoning, newlines separate it from the content

    def push(self, token_ids: list[int]) -> None:
        table = self._bytes
        if self._controls.isdisjoint(token_ids):
            self._raw += b"".join([table[i] for i in token_ids])
            return
        for token in token_ids:
            if token not in self._controls or not self._on_tag(token):
                self._raw += table[token]

    def _flush(self) -> None:
        if self._state != _CALL:
            self._flush_text(self._decode())

    def finish(self) -> ParsedMessage:
        state = self._state
        text = self._end_segment()
        if state == _CALL:
            self._take_calls(text, is_ended=self._format.closing is None)
        else:
            self._flush_text(text)
            if self._state == _CALL:
                self._take_calls("")
            if self._held and not self._calls and state != _REASONING:
                self._add_content(self._held)
        self._held = ""
        return self._parsed(reasoning_open=state == _REASONING)

    def _on_tag(self, token: int) -> bool:
        """Handle a tag. False if it has no meaning at this place, so that it is text."""
        tags, state = self._tags, self._state
        if state == _START and token == tags.think_open:
            pending = self._stream.pending + bytes(self._raw)
            if (self._held + pending.decode("utf-8", "replace")).strip():
                return False  # reasoning comes first
            self._begin(_REASONING)
        elif state == _REASONING and token == tags.think_close:
            self._flush_text(self._end_segment())
            self._begin(_CONTENT)
            self._strip_newlines = True
        elif state == _CALL and token == self._call_close:
            self._take_calls(self._end_segment(), closing=self._format.closing or "")
        elif state in (_START, _CONTENT) and token == self._call_open:
            self._flush_text(self._end_segment())
            held = self._held
            self._begin(_CALL)
            self._held = held  # restored if the call turns out to be malformed
        else:
            return False
        return True

    def _begin(self, state: int) -> None:
        self._state = state
        self._held = ""
        self._raw.clear()
        self._stream = TextStream()

    def _take_calls(self, text: str, *, is_ended: bool = True, closing: str = "") -> None:
        """Read calls up to the closing tag or the end of the answer. Malformed or truncated ones become content
        unchanged."""
        held = self._held
        if self._format.opening is None:  # here the held text is the beginning of the calls
            held, text = "", held + text
        calls = self._format.read(text, self._schemas) if is_ended else None
        self._begin(_CONTENT)
        if calls is None:
            self._add_content(f"{held}{self._format.opening or ''}{text}{closing}")
        else:
            self._calls += calls
            self._deltas += [Delta(tool_call=call) for call in calls]

    def _flush_text(self, text: str) -> None:
        """Add text to the current segment, holding back whitespace at its end."""
        if self._state == _REASONING:
            if not self._reasoning:
                text = (self._held + text).lstrip()
                self._held = ""
        elif self._strip_newlines:
            text = text.lstrip("\n")
            self._strip_newlines = not text
        text = self._held + text
        body = text.rstrip()
        if self._may_be_calls and self._state != _REASONING and not self._content and (start := body.lstrip()):
            if start.startswith(self._format.beginnings):
                self._state, self._held = _CALL, text
                return
            if any(beginning.startswith(start) for beginning in self._format.beginnings):
                self._held = text
                return
        self._held = text[len(body) :]
        if not body:
            return
        if self._state == _REASONING:
            self._reasoning.append(body)
            self._deltas.append(Delta(reasoning=body))
        else:
            self._add_content(body)
            if self._state == _START:
                self._state = _CONTENT

    def _add_content(self, text: str) -> None:
        self._content.append(text)
        self._deltas.append(Delta(content=text))
