"""The renderer for any model with a chat template: renders with it, and extends recorded tokens by comparing its texts.

A trial shows how the model writes tool calls: a call that the template renders must come back from the parser.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

from art.errors import ConfigError, InvalidRequestError
from art.gateway.format.bridge import Branch, extend_text
from art.gateway.format.renderer import (
    RecordedTurn,
    Renderer,
    TemplateKwargs,
    has_reasoning,
    parse,
    stop_token_ids,
    template_messages,
    variants,
    without_empty_reasoning,
)
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.parsing import harmony
from art.gateway.parsing.parse import MessageParser, TaggedParser, Tags
from art.gateway.parsing.tool_calls import CALL_FORMATS, TAGGED, ToolCall, with_call_ids
from art.protocol.chat import Message, Tool, tool_call


class TemplateRenderer:
    """Renders with a chat template. Parses gpt-oss's harmony format, or the tags that the vocabulary has."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        kwargs: TemplateKwargs,
        build: Callable[[TemplateKwargs], Renderer],
        *,
        keep_reasoning: bool | None = None,
    ) -> None:
        """
        Args:
            kwargs: settings of the template, e.g. `{"enable_thinking": False}`.
            build: makes a renderer of this model with other settings.
            keep_reasoning: whether later prompts keep the reasoning of earlier turns; `None` leaves it to the template.

        Raises:
            ConfigError: the model has no chat template, or the template does not know a setting.
        """
        if tokenizer.template is None:
            raise ConfigError(
                f"{tokenizer.name_or_path} has no chat template (chat_template.jinja, or `chat_template` in "
                "tokenizer_config.json); use an instruction-tuned model, or add a template"
            )
        if unknown := sorted(kwargs.keys() - tokenizer.template.settings):
            raise ConfigError(
                f"the chat template of this model has no setting {unknown}; it has "
                f"{sorted(tokenizer.template.settings) or 'none'}",
                param="chat_template_kwargs",
            )
        self.tokenizer = tokenizer
        self.template_kwargs: TemplateKwargs = dict(kwargs)
        self.tags = Tags.of(tokenizer)
        self._is_harmony = harmony.is_in(tokenizer)
        self._keep_reasoning = keep_reasoning
        self._turn_end, self._turn_end_id = _find_turn_end(tokenizer, self.template_kwargs)
        self.stop_token_ids = stop_token_ids(tokenizer, self._turn_end_id)
        if self._is_harmony:
            ends = [i for token in harmony.STOPS if (i := tokenizer.token_id(token)) is not None]
            self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, *ends]))
        self._calls, self._arguments_as_text = TAGGED, False
        """How the template writes tool calls, and whether it takes arguments as JSON text. Most take an object."""
        self.handles_tools = tokenizer.template.handles_tools and self._find_call_format()
        self.with_kwargs = variants(self.template_kwargs, build)

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        return self.tokenizer.encode(self._text(messages, tools, opening=True), add_special_tokens=False)

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        opened = self._text(messages[:-1], tools, opening=True)
        whole = self._text(messages, tools, opening=False)
        if not whole.startswith(opened) or self._turn_end_id is None:
            return None
        end = whole.rfind(self._turn_end, len(opened))  # tool calls may end with another token
        answer = whole[len(opened) : end + len(self._turn_end)] if end >= 0 else whole[len(opened) :].rstrip()
        return self.tokenizer.encode(without_empty_reasoning(answer), add_special_tokens=False)

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        turn_end, turn_end_id = self._end_of(turn)
        if turn_end_id is None:
            return Branch("template_without_turn_end")
        if any(message["role"] == "assistant" for message in new_messages):
            return Branch("history_continues_elsewhere")
        if self._keep_reasoning is False and has_reasoning(turn.messages):
            return Branch("reasoning_dropped")
        before = self._text(turn.messages, tools, opening=False)
        after = self._text(turn.messages + new_messages, tools, opening=True)
        added = extend_text(before, after, turn_end, keep_reasoning=self._keep_reasoning is True)
        if isinstance(added, Branch):
            return added
        # Tokenise together with the turn end, as in the whole text.
        tail = self.tokenizer.encode(turn_end + added, add_special_tokens=False)
        if tail[0] != turn_end_id:
            return Branch("template_without_turn_end")
        return self._close_turn(turn, turn_end_id) + tail[1:]

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        if self._is_harmony:
            return harmony.HarmonyParser(self.tokenizer, parse_tools=parse_tools)
        if self._calls.opening is None and not tools:  # without tools, a JSON object is an ordinary answer
            parse_tools = False
        in_reasoning = self.tags.opens_reasoning(prompt_ids)
        return TaggedParser(
            self.tokenizer, self.tags, in_reasoning=in_reasoning, parse_tools=parse_tools, calls=self._calls
        )

    def _find_call_format(self) -> bool:
        """Set the format in which a tool call that the template writes is parsed back. False if tools cannot be used.

        If none passes but the vocabulary has the tags, the tagged grammar is assumed, and `art doctor` reports it.
        """
        formats = [TAGGED] if self._is_harmony else [one for one in CALL_FORMATS if one.is_in(self.tokenizer)]
        for self._calls, self._arguments_as_text in itertools.product(formats, (False, True)):
            if self._reads_its_calls():
                return True
        self._calls, self._arguments_as_text = TAGGED, False
        return TAGGED.is_in(self.tokenizer)

    def _reads_its_calls(self) -> bool:
        asked: list[Message] = [{"role": "user", "content": "hi"}]
        call = ToolCall("zq_probe", '{"key": "zq"}')
        calls = [tool_call("call_zq", call.name, call.arguments)]
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        tools: list[Tool] = [{"type": "function", "function": {"name": call.name, "description": "", "parameters": {}}}]
        try:
            prompt = self.render(asked, tools)
            completion = self.completion([*asked, answer], tools, prompt)
        except InvalidRequestError:
            return False
        parsed = parse(self, prompt, completion or [], tools)
        return parsed.tool_calls == [call]

    def _end_of(self, turn: RecordedTurn) -> tuple[str, int | None]:
        """Text and id of the token that the template writes after the answer of `turn`."""
        if self._is_harmony and turn.messages[-1].get("tool_calls"):
            return harmony.CALL_END, self.tokenizer.token_id(harmony.CALL_END)
        return self._turn_end, self._turn_end_id

    def _close_turn(self, turn: RecordedTurn, turn_end_id: int) -> list[int]:
        """Exact tokens of a turn, with the end tokens added that a truncated completion lacks."""
        ids = turn.prompt_token_ids + turn.completion_token_ids
        if turn.completion_token_ids and ids[-1] in self.stop_token_ids:
            return ids
        if (
            self.tags.think_close is not None
            and parse(self, turn.prompt_token_ids, turn.completion_token_ids).reasoning_open
        ):
            ids.append(self.tags.think_close)
        ids.append(turn_end_id)
        return ids

    def _text(self, messages: list[Message], tools: list[Tool] | None, *, opening: bool) -> str:
        prepared = template_messages(messages, drop_reasoning=self._keep_reasoning is False)
        if self._is_harmony:
            prepared = harmony.harmony_messages(prepared)
        if tools or any(message.get("tool_calls") for message in prepared):
            prepared = with_call_ids(prepared, self._calls)
            if self._arguments_as_text:
                prepared = [_with_text_arguments(message) for message in prepared]
        return self.tokenizer.render_text(prepared, tools, add_generation_prompt=opening, **self.template_kwargs)


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


_PROBE = "zq probe zq"


def _find_turn_end(tokenizer: Tokenizer, kwargs: TemplateKwargs) -> tuple[str, int | None]:
    """Text and id of the token that the template writes right after an answer; ("", None) if it is no single token."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.render_text(messages, None, add_generation_prompt=False, **kwargs)
    except InvalidRequestError:
        return "", None
    _, probe, tail = text.rpartition(_PROBE)
    ids = tokenizer.encode(tail, add_special_tokens=False) if probe and tail else []
    if not ids or ids[0] not in tokenizer.backend.get_added_tokens_decoder():
        return "", None
    turn_end = tokenizer.text(ids[:1])
    return (turn_end, ids[0]) if tail.startswith(turn_end) else ("", None)
