"""Use the hand-written renderers of the `renderers` package as a `Renderer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from art.errors import InvalidRequestError
from art.gateway.format.bridge import Branch
from art.gateway.format.renderer import (
    RecordedTurn,
    Renderer,
    TemplateKwargs,
    has_reasoning,
    template_messages,
    variants,
    without_empty_reasoning,
)
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.parsing.calls import make_call, parameter_schemas, with_written_calls
from art.gateway.parsing.parse import Delta, MessageParser, ParsedMessage, TaggedParser, Tags
from art.gateway.parsing.tool_calls import OBJECTS, TAGGED
from art.protocol.chat import Message, Tool

_OWN_PARSERS = {"qwen3": TAGGED, "llama-3": OBJECTS}
"""Package renderers whose answers ART parses itself: while they stream, and with several calls in one answer."""
_LLAMA = "llama-3"
"""Its renderer accepts one tool call per message."""


class PackageRenderer:
    """Renders prompts, extends recorded ones and parses answers with a renderer of the `renderers` package."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        kwargs: TemplateKwargs,
        build: Callable[[TemplateKwargs], Renderer],
        *,
        keep_reasoning: bool | None = None,
    ) -> None:
        """
        Raises:
            ValueError, AssertionError, KeyError: the tokenizer lacks the family's tokens, or a setting is unknown.
        """
        import renderers  # here because it imports the openai client, which takes half a second
        import renderers.base
        import renderers.configs

        config = renderers.base.merge_chat_template_kwargs(renderers.configs.config_from_name(family), dict(kwargs))
        self.family = family
        self.tokenizer = tokenizer
        self.template_kwargs: TemplateKwargs = dict(kwargs)
        self.tags = Tags.of(tokenizer)
        self.handles_tools = True
        self._keep_reasoning = keep_reasoning
        self._package = renderers.create_renderer(tokenizer, config)
        # `bridge` decides about dropped reasoning itself, so the package may bridge wherever it can.
        self._bridging = renderers.create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
        self._drops_reasoning = self._package.effective_thinking_retention != "all"
        self.stop_token_ids = tuple(
            dict.fromkeys([*self._package.get_stop_token_ids(), *tokenizer.generation_stop_ids])
        )
        self.with_kwargs = variants(self.template_kwargs, build)

    def render(self, messages: list[Message], tools: list[Tool] | None, *, opening: bool = True) -> list[int]:
        try:
            ids: list[int] = self._package.render_ids(
                self._prepare(messages), tools=tools or None, add_generation_prompt=opening
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(
                f"the model's chat format does not accept these messages: {error}", param="messages"
            ) from error
        return ids

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        whole: list[int] = self._package.render_ids(self._prepare(messages), tools=tools or None)
        if whole[: len(prompt_ids)] != prompt_ids:
            return None
        answer = whole[len(prompt_ids) :]
        text = self.tokenizer.text(answer)
        if text != (cleaned := without_empty_reasoning(text)):
            answer = self.tokenizer.encode(cleaned, add_special_tokens=False)
        ends = [i for i, token in enumerate(answer) if token in self.stop_token_ids]
        return answer[: ends[-1] + 1] if ends else None

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        if any(message["role"] == "assistant" for message in new_messages):
            return Branch("history_continues_elsewhere")
        if self._drops_reasoning and self._keep_reasoning is not True and _drops_now(turn.messages, new_messages):
            return Branch("reasoning_dropped")
        rendered = self._bridging.bridge_to_next_turn(
            turn.prompt_token_ids, turn.completion_token_ids, template_messages(new_messages), tools=tools or None
        )
        if rendered is None:
            return Branch("template_rewrites_history")
        ids: list[int] = rendered.token_ids
        recorded = turn.prompt_token_ids + turn.completion_token_ids
        if ids[: len(recorded)] != recorded:  # the package trims tokens after a turn end
            return Branch("template_rewrites_history")
        return ids

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        if (calls := _OWN_PARSERS.get(self.family)) is not None:
            if calls.opening is None and not tools:  # without tools, a JSON object is an ordinary answer
                parse_tools = False
            schemas = parameter_schemas(tools) if parse_tools else None
            in_reasoning = self.tags.opens_reasoning(prompt_ids)
            return TaggedParser(self.tokenizer, self.tags, in_reasoning=in_reasoning, schemas=schemas, calls=calls)
        return _PackageParser(self._package, self.tokenizer, prompt_ids, tools, parse_tools=parse_tools)

    def _prepare(self, messages: list[Message]) -> list[Message]:
        prepared = template_messages(messages)
        return with_written_calls(prepared, OBJECTS, at_least=2) if self.family == _LLAMA else prepared


class _PackageParser:
    """Parses only when the completion has ended, since the package cannot parse a part of one.

    A stream gets its text at the end.
    """

    def __init__(
        self, package: Any, tokenizer: Tokenizer, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool
    ) -> None:
        self._package = package
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._parse_tools = parse_tools
        self._ids: list[int] = []
        self._rest = b""
        self._deltas: list[Delta] = []

    def push(self, token_ids: list[int]) -> None:
        self._ids += token_ids

    def push_text(self, data: bytes) -> None:
        self._rest += data

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> ParsedMessage:
        parsed = self._package.parse_response(self._ids, tools=self._tools or None, prompt_ids=self._prompt_ids)
        content, calls = parsed.content, []
        for call in parsed.tool_calls:
            arguments = {} if call.arguments is None else call.arguments
            readable = make_call({"name": call.name, "arguments": arguments})
            if self._parse_tools and call.status == "ok" and readable is not None:
                calls.append(readable)
            elif call.token_span is not None:  # keep malformed calls as text: no sampled token may disappear
                start, end = call.token_span
                content += self._tokenizer.text(self._ids[start:end])
            else:
                content += call.raw
        content += self._rest.decode("utf-8", "replace")
        reasoning = parsed.reasoning_content or ""
        self._deltas = [delta for delta in (Delta(reasoning=reasoning), Delta(content=content)) if delta != Delta()]
        self._deltas += [Delta(tool_call=call) for call in calls]
        return ParsedMessage(content, reasoning or None, calls, reasoning_open=parsed.reasoning_complete is False)


def _drops_now(recorded: list[Message], new_messages: list[Message]) -> bool:
    """Whether a new user message makes the template drop reasoning that is part of the recorded tokens."""
    if not any(message["role"] == "user" for message in new_messages):
        return False
    last_query = max((i for i, message in enumerate(recorded) if message["role"] == "user"), default=-1)
    return has_reasoning(recorded[last_query + 1 :])
