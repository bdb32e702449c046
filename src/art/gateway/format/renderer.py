"""The seam between messages and tokens: what the gateway needs of a model's text format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from art.errors import ConfigError
from art.gateway.format.bridge import Branch
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.parsing.parse import MessageParser, ParsedMessage
from art.protocol.chat import Message, Tool

TemplateKwargs: TypeAlias = Mapping[str, Any]
"""Settings of a chat template by name: booleans, numbers and strings."""
_MAX_VARIANTS = 32
"""Sets of per-request template settings kept ready for one model."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A request and its answer: text and exact tokens."""

    messages: list[Message]
    """As sent, and the answer at the end; recorded reasoning included."""
    prompt_token_ids: list[int]
    completion_token_ids: list[int]


class Renderer(Protocol):
    """What the gateway needs of a model's text format."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends an answer."""
    handles_tools: bool
    template_kwargs: TemplateKwargs

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        """Tokens of a conversation up to where the next answer begins.

        Raises:
            InvalidRequestError: the model's template refuses these messages.
        """
        ...

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        """The next prompt as an extension of the exact tokens of `turn`, or why there is none."""
        ...

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        """Tokens of the last message as an answer to `prompt_ids`, which is the rendering of those before it.

        Up to the end of the turn. `None` if the template writes the message in a way that does not follow the prompt.
        """
        ...

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        """For one completion of `prompt_ids`."""
        ...

    def with_kwargs(self, kwargs: TemplateKwargs) -> Renderer:
        """The same format with other template settings on top. Cached."""
        ...


def parse(
    renderer: Renderer, prompt_ids: list[int], completion_ids: list[int], tools: list[Tool] | None = None
) -> ParsedMessage:
    """A whole completion as a message; the token that ended it may be there or not."""
    if completion_ids and completion_ids[-1] in renderer.stop_token_ids:
        completion_ids = completion_ids[:-1]
    parser = renderer.parser(prompt_ids, tools, parse_tools=True)
    parser.push(completion_ids)
    return parser.finish()


class Variants:
    """Renderers of one model with other template settings, made once each."""

    def __init__(self, base: TemplateKwargs, build: Callable[[TemplateKwargs], Renderer]) -> None:
        self._base = base
        self._build = build
        self._ready: dict[str, Renderer] = {}

    def get(self, kwargs: TemplateKwargs) -> Renderer:
        """
        Raises:
            ConfigError: a setting is unknown to the template.
        """
        key = json.dumps(dict(kwargs), sort_keys=True)
        found = self._ready.get(key)
        if found is None:
            if len(self._ready) >= _MAX_VARIANTS:
                self._ready.pop(next(iter(self._ready)))
            found = self._ready[key] = self._build({**self._base, **kwargs})
        return found


_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


def without_empty_reasoning(answer: str) -> str:
    """`answer` without the empty reasoning block that some templates put before a last message that has none.

    Learning it would teach a model to open with a block that it was not shown.
    """
    return _EMPTY_REASONING.sub("", answer, count=1) if _EMPTY_REASONING.match(answer) else answer


def template_messages(messages: list[Message], *, drop_reasoning: bool = False) -> list[Message]:
    """Messages as templates expect them: tool-call arguments as objects, none of our own fields."""
    result = []
    for message in messages:
        if message["role"] == "assistant" and len(message) > 2:
            message = {key: value for key, value in message.items() if key != "exchange_id"}
            if drop_reasoning:
                message.pop("reasoning_content", None)
            if message["content"] is None:
                message["content"] = ""
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [_with_object_arguments(call) for call in calls]
        result.append(message)
    return result


def _with_object_arguments(call: Message) -> Message:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def has_reasoning(messages: list[Message]) -> bool:
    return any(message.get("reasoning_content") for message in messages)


def stop_token_ids(tokenizer: Tokenizer, turn_end_id: int | None) -> tuple[int, ...]:
    """The template's turn end, the tokenizer's end of text and the model's own generation settings.

    Raises:
        ConfigError: there is none, so that no answer would ever end.
    """
    found = (turn_end_id, tokenizer.eos_token_id, *tokenizer.generation_stop_ids)
    ids = tuple(dict.fromkeys(i for i in found if i is not None))
    if not ids:
        raise ConfigError(
            f"{tokenizer.name_or_path}: no token ends an answer (no `eos_token` in tokenizer_config.json, no "
            "`eos_token_id` in generation_config.json, and the chat template closes turns with plain text)"
        )
    return ids
