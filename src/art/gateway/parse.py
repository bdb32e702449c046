"""Sampled tokens to an assistant message, as they come or all at once, with the same result.

The tagged grammar (Qwen, Hermes and everything alike) works on token ids, so text that merely looks like a tag is text:

    [<think> reasoning </think>] content (<tool_call> {"name": ..., "arguments": {...}} </tool_call>)*

A tool call that is not valid JSON stays in the content as the model wrote it: nothing that was sampled disappears.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from art.gateway.tokenizer import TextStream, Tokenizer
from art.protocol.chat import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_open: bool = False
    """The completion ended inside its reasoning."""

    def to_message(self, exchange_id: str) -> Message:
        """OpenAI's assistant message; tool calls are named after the exchange."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call_to_dict(call, exchange_id, i) for i, call in enumerate(self.tool_calls)]
        return message


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the message that will not change any more; one field is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class MessageParser(Protocol):
    """Fed with the tokens of one completion, without the token that ended it."""

    def push(self, token_ids: list[int]) -> None: ...

    def push_text(self, data: bytes) -> None:
        """Part of a token, where a stop string cut it."""
        ...

    def take(self) -> list[Delta]:
        """What became certain since the last call."""
        ...

    def finish(self) -> ParsedMessage:
        """The whole message; `take` then has the rest of the deltas."""
        ...


def call_to_dict(call: ToolCall, exchange_id: str, index: int) -> dict[str, Any]:
    """OpenAI's form; the id has at most 40 characters, as OpenAI demands."""
    return {
        "id": f"call_{exchange_id.removeprefix('ex_')}_{index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


@dataclass(frozen=True, slots=True)
class Tags:
    """Token ids of the tagged grammar; `None` where the vocabulary has no such token."""

    think_open: int | None
    think_close: int | None
    call_open: int | None
    call_close: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Tags:
        return cls(*(tokenizer.token_id(tag) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")))

    @property
    def has_reasoning(self) -> bool:
        return self.think_open is not None and self.think_close is not None

    @property
    def has_tool_calls(self) -> bool:
        return self.call_open is not None and self.call_close is not None

    def opens_reasoning(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends inside a `<think>` block, i.e. the completion begins with reasoning."""
        if self.think_open is None:
            return False
        # Only the generation prompt can hold it: a few tokens at the end.
        for token in reversed(prompt_ids[-16:]):
            if token == self.think_close:
                return False
            if token == self.think_open:
                return True
        return False


_START, _REASONING, _CONTENT, _CALL = range(4)


class TaggedParser:
    """`MessageParser` of the tagged grammar."""

    def __init__(self, tokenizer: Tokenizer, tags: Tags, *, in_reasoning: bool, parse_tools: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._tags = tags
        controls = {tags.think_open, tags.think_close} if tags.has_reasoning else set()
        if parse_tools and tags.has_tool_calls:
            controls |= {tags.call_open, tags.call_close}
        self._controls = frozenset(controls)
        self._state = _REASONING if in_reasoning else _START
        self._stream = TextStream()
        self._raw = bytearray()  # bytes of the present segment that are not yet text
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._held = ""  # whitespace at the end of the present segment: dropped if a tag follows
        self._strip_newlines = False  # after reasoning, newlines separate it from the content
        self._deltas: list[Delta] = []

    def push(self, token_ids: list[int]) -> None:
        table = self._bytes
        if self._controls.isdisjoint(token_ids):
            self._raw += b"".join([table[i] for i in token_ids])
            return
        for token in token_ids:
            if token not in self._controls or not self._on_tag(token):
                self._raw += table[token]

    def push_text(self, data: bytes) -> None:
        self._raw += data

    def take(self) -> list[Delta]:
        if self._state != _CALL:
            self._flush_text(self._stream.push(bytes(self._raw)))
            self._raw.clear()
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> ParsedMessage:
        state = self._state
        text = self._end_segment()
        if state == _CALL:
            self._state = _CONTENT
            self._add_content(self._held + "<tool_call>" + text)
        elif state == _REASONING:
            self._flush_text(text)
        else:
            self._flush_text(text)
            if self._held and not self._calls:
                self._add_content(self._held)
        self._held = ""
        return ParsedMessage(
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=self._calls,
            reasoning_open=state == _REASONING,
        )

    def _on_tag(self, token: int) -> bool:
        """Whether the tag means something here; otherwise it is text."""
        tags, state = self._tags, self._state
        if state == _START and token == tags.think_open and self._only_whitespace():
            self._begin(_REASONING)
            return True
        if state == _REASONING:
            if token == tags.think_close:
                self._flush_text(self._end_segment())
                self._begin(_CONTENT)
                self._strip_newlines = True
                return True
        elif state == _CALL:
            if token == tags.call_close:
                self._end_call()
                return True
        elif token == tags.call_open:
            self._flush_text(self._end_segment())
            held = self._held
            self._begin(_CALL)
            self._held = held  # comes back if the call turns out to be malformed
            return True
        return False

    def _only_whitespace(self) -> bool:
        pending = self._stream.pending + bytes(self._raw)
        return not (self._held + pending.decode("utf-8", "replace")).strip()

    def _begin(self, state: int) -> None:
        self._state = state
        self._held = ""
        self._raw.clear()
        self._stream = TextStream()

    def _end_segment(self) -> str:
        text = self._stream.push(bytes(self._raw)) + self._stream.finish()
        self._raw.clear()
        self._stream = TextStream()
        return text

    def _end_call(self) -> None:
        text = self._end_segment()
        call = parse_call(text)
        held = self._held
        self._begin(_CONTENT)
        if call is None:
            self._add_content(f"{held}<tool_call>{text}</tool_call>")
        else:
            self._calls.append(call)
            self._deltas.append(Delta(tool_call=call))

    def _flush_text(self, text: str) -> None:
        """Add text of the present segment, holding back whitespace at its end."""
        if self._state == _REASONING:
            if not self._reasoning:
                text = (self._held + text).lstrip()
                self._held = ""
        elif self._strip_newlines:
            text = text.lstrip("\n")
            self._strip_newlines = not text
        text = self._held + text
        body = text.rstrip()
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


def parse_call(text: str) -> ToolCall | None:
    """`{"name": ..., "arguments": {...}}` as a tool call, or `None` if it is not one."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):  # some models quote the object once more
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + encoded).encode()  # lone surrogates are no text
    except (ValueError, RecursionError):
        return None
    return ToolCall(call["name"], encoded)
