"""Parse answers in the harmony format of gpt-oss: several messages in channels, each with a header.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

The channel tells what a message is. `analysis` is reasoning and `final` is content. `commentary` is a tool call if it
is addressed to a function, otherwise content. The prompt ends with "<|start|>assistant". Messages of other kinds, and
calls whose arguments are not a JSON object, stay in the content unchanged.
"""

from __future__ import annotations

import re

from art.gateway.calls import load_json, make_call
from art.gateway.parse import Delta, MessageParser, ParsedMessage
from art.gateway.tokenizer import Tokenizer
from art.protocol.chat import Message

_START, _MESSAGE, _END = "<|start|>", "<|message|>", "<|end|>"
CALL_END = "<|call|>"
STOPS = ("<|return|>", CALL_END)
"""Tokens that end an answer. <|end|> only ends one message of it."""

_CHANNEL = re.compile(r"<\|channel\|>(analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<\||\s|$)")


def is_in(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has the tokens of the harmony format."""
    tokens = (_START, _MESSAGE, _END, "<|channel|>", *STOPS)
    return all(tokenizer.token_id(token) is not None for token in tokens)


def harmony_messages(messages: list[Message]) -> list[Message]:
    """Copy reasoning to `thinking`, the field that gpt-oss templates read. Those templates accept only one of content
    and reasoning before a tool call, so both are joined."""
    result = []
    for message in messages:
        if reasoning := message.get("reasoning_content"):
            message = {**message, "thinking": reasoning}
            if message.get("tool_calls") and message["content"]:
                message |= {"thinking": f"{reasoning}\n{message['content']}", "content": ""}
        result.append(message)
    return result


class HarmonyParser(MessageParser):
    """Parses the sampled tokens of an answer in gpt-oss's harmony format."""

    def __init__(self, tokenizer: Tokenizer, *, parse_tools: bool) -> None:
        super().__init__(tokenizer)
        self._message, self._ends = tokenizer.token_id(_MESSAGE), {tokenizer.token_id(t) for t in (_END, _START)}
        self._end_id = tokenizer.token_id(_END)
        self._controls = {self._message, *self._ends}
        self._parse_tools = parse_tools
        self._header: str | None = None  # header of the current message; None before its <|message|>
        self._fresh = False  # no text of the current message was given out yet

    def push(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if token in self._controls and self._on_control(token):
                continue
            self._raw += self._bytes[token]

    def _flush(self) -> None:
        if self._kind in ("analysis", "final"):
            self._give_out(self._decode())

    def finish(self) -> ParsedMessage:
        is_open = self._kind == "analysis"
        self._end_message("")
        return self._parsed(reasoning_open=is_open)

    @property
    def _kind(self) -> str | None:
        """Kind of the current message: its channel, "call", or `None` if it is unknown or of another kind."""
        if self._header is None or (channel := _CHANNEL.search(self._header)) is None:
            return None
        recipient = _RECIPIENT.search(self._header)
        if recipient is None:
            return "final" if channel[1] == "commentary" else channel[1]
        return "call" if self._parse_tools and recipient[1].startswith("functions.") else None

    def _on_control(self, token: int) -> bool:
        """Handle a control token. False if it has no meaning at this place, so that it is text."""
        if token == self._message and self._header is None:
            self._header = self._end_segment()
            self._fresh = True
            return True
        if token in self._ends and self._header is not None:
            self._end_message(_END if token == self._end_id else "")
            if token != self._end_id:
                self._raw += _START.encode()
            return True
        return False

    def _end_message(self, end: str) -> None:
        kind, header, text = self._kind, self._header, self._end_segment()
        call = None
        if kind == "call" and header is not None and (recipient := _RECIPIENT.search(header)) is not None:
            call = make_call({"name": recipient[1].removeprefix("functions."), "arguments": load_json(text)})
        if kind in ("analysis", "final"):
            self._give_out(text)
        elif call is not None:
            self._calls.append(call)
            self._deltas.append(Delta(tool_call=call))
        elif header is not None:  # a message of another kind, or a malformed call
            self._add(f"{header}{_MESSAGE}{text}{end}", self._content)
        elif text not in (_START, f"{_START}assistant"):  # truncated inside a header
            self._add(text, self._content)
        self._header = None

    def _give_out(self, text: str) -> None:
        self._add(text, self._reasoning if self._kind == "analysis" else self._content)

    def _add(self, text: str, parts: list[str]) -> None:
        if not text:
            return
        if self._fresh and parts:
            text = "\n" + text  # separates two messages of one channel
        self._fresh = False
        parts.append(text)
        self._deltas.append(Delta(reasoning=text) if parts is self._reasoning else Delta(content=text))
