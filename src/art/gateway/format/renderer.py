"""The interface between messages and tokens: what the gateway needs of a model's text format."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from art.errors import ConfigError, InvalidRequestError
from art.gateway.format.bridge import Branch
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.parsing import harmony
from art.gateway.parsing.parse import Delta, MessageParser, ParsedMessage, SegmentParser
from art.protocol.chat import Message, Tool

TemplateKwargs: TypeAlias = Mapping[str, Any]
"""Settings of a chat template by name: booleans, numbers and strings."""
_MAX_VARIANTS = 32
"""Largest number of renderers with other template settings that are cached per model."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A request and its answer, as messages and as exact tokens."""

    messages: list[Message]
    """The messages of the request with the recorded reasoning of earlier answers, and the answer at the end."""
    prompt_token_ids: list[int]
    completion_token_ids: list[int]


class Renderer(Protocol):
    """Renders messages to tokens, extends recorded tokens, and parses completions, for one model."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends an answer."""
    handles_tools: bool
    template_kwargs: TemplateKwargs

    def render(self, messages: list[Message], tools: list[Tool] | None, *, opening: bool = True) -> list[int]:
        """Render a conversation to tokens, up to where the next answer begins; without `opening`, up to its own end.

        Raises:
            InvalidRequestError: the template does not accept these messages.
        """
        ...

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        """Build the next prompt by extending the exact tokens of `turn`, or return why that is impossible."""
        ...

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        """Render the last message as the completion of a prompt, up to and including the end of the turn.

        Args:
            prompt_ids: the tokens of all messages before the last one, as `render` returns them.

        Returns:
            `None` if the rendered conversation does not begin with the prompt.
        """
        ...

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        """Make the parser for one completion of the prompt `prompt_ids`."""
        ...

    def with_kwargs(self, kwargs: TemplateKwargs) -> Renderer:
        """Return a cached renderer of this model with other template settings.

        Raises:
            ConfigError: the template does not know a setting.
        """
        ...


def parse(
    renderer: Renderer, prompt_ids: list[int], completion_ids: list[int], tools: list[Tool] | None = None
) -> ParsedMessage:
    """Parse a whole completion, with or without the token that ended it."""
    if completion_ids and completion_ids[-1] in renderer.stop_token_ids:
        completion_ids = completion_ids[:-1]
    parser = renderer.parser(prompt_ids, tools, parse_tools=True)
    parser.push(completion_ids)
    return parser.finish()


def variants(base: TemplateKwargs, build: Callable[[TemplateKwargs], Renderer]) -> Callable[[TemplateKwargs], Renderer]:
    """Make the method `Renderer.with_kwargs` for a renderer with the settings `base`. It caches what it builds."""

    @functools.lru_cache(maxsize=_MAX_VARIANTS)
    def with_json(kwargs: str) -> Renderer:
        return build({**base, **json.loads(kwargs)})

    return lambda kwargs: with_json(json.dumps(dict(kwargs), sort_keys=True))


_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


def without_empty_reasoning(answer: str) -> str:
    """Remove the empty reasoning block that some templates write before a last message without reasoning.

    Training on it would teach the model to begin with a block that no prompt contains.
    """
    return _EMPTY_REASONING.sub("", answer, count=1) if _EMPTY_REASONING.match(answer) else answer


def template_messages(messages: list[Message], *, drop_reasoning: bool = False) -> list[Message]:
    """Convert messages to what templates expect: tool-call arguments as objects, and no `exchange_id`."""
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
    """List the tokens that end an answer: the template's turn end, the tokenizer's EOS, `generation_config.json`'s.

    Raises:
        ConfigError: there is no such token, so no answer would ever end.
    """
    candidates = (turn_end_id, tokenizer.eos_token_id, *tokenizer.generation_stop_ids)
    ids = tuple(dict.fromkeys(i for i in candidates if i is not None))
    if not ids:
        raise ConfigError(
            f"{tokenizer.name_or_path}: no token ends an answer (no `eos_token` in tokenizer_config.json, no "
            "`eos_token_id` in generation_config.json, and the chat template closes turns with plain text)"
        )
    return ids


class TextRenderer:
    """Gives the tokens of one prompt as they are, and takes the whole text of an answer as its content."""

    handles_tools = False

    def __init__(self, model: Renderer, prompt_token_ids: list[int]) -> None:
        """
        Args:
            model: renderer of the model, which knows its tokens.
        """
        self.tokenizer = model.tokenizer
        self.stop_token_ids = model.stop_token_ids
        self.template_kwargs: TemplateKwargs = {}
        self._prompt_token_ids = prompt_token_ids

    def render(self, messages: list[Message], tools: list[Tool] | None, *, opening: bool = True) -> list[int]:
        return self._prompt_token_ids

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        return Branch("template_rewrites_history")

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        return None

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        return _TextParser(self.tokenizer)

    def with_kwargs(self, kwargs: TemplateKwargs) -> Renderer:
        return self


class _TextParser(SegmentParser):
    """Decodes sampled tokens to text, without looking for reasoning or calls."""

    def push(self, token_ids: list[int]) -> None:
        self._raw += b"".join([self._bytes[i] for i in token_ids])

    def take(self) -> list[Delta]:
        self._add(self._decode())
        return self._take_deltas()

    def finish(self) -> ParsedMessage:
        self._add(self._end_segment())
        return self._parsed(reasoning_open=False)

    def _add(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._deltas.append(Delta(content=text))


_SETTING = "enable_thinking"
"""The setting by which chat templates of models with both modes choose one."""


def reasoning_settings(renderer: Renderer, *, reasons: bool, param: str) -> TemplateKwargs:
    """Settings of the chat template that make the model reason or not; none if the template leaves no choice.

    Raises:
        InvalidRequestError: the model should reason, and never does.
    """
    template = renderer.tokenizer.template
    if template is not None and _SETTING in template.settings:
        return {_SETTING: reasons}
    if reasons and renderer.tokenizer.token_id("<think>") is None and not harmony.is_in(renderer.tokenizer):
        raise InvalidRequestError(
            f"this model does not reason: its chat template has no setting `{_SETTING}`, and its vocabulary no "
            f"`<think>`; leave `{param}` out",
            param=param,
        )
    return {}
