"""The renderer for any model with a chat template: renders with it, and extends recorded tokens by comparing its texts.

A trial (`call_trial.py`) shows how the model writes tool calls.
"""

from __future__ import annotations

from collections.abc import Callable

from art.errors import ConfigError, InvalidRequestError
from art.gateway.format.bridge import Branch, extend_text
from art.gateway.format.call_trial import CallWriting, Side, find_call_writing, prepare_calls
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
from art.gateway.parsing.calls import parameter_schemas
from art.gateway.parsing.parse import MessageParser, TaggedParser, Tags
from art.gateway.parsing.tool_calls import TAGGED
from art.protocol.chat import Message, Tool


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
        self.writing = CallWriting(TAGGED)
        """How tool calls are written. It counts only where `handles_tools`."""
        self.side = Side(tokenizer, self.tags, self._turn_end, self._text)
        self._call_end = (harmony.CALL_END, tokenizer.token_id(harmony.CALL_END)) if self._is_harmony else None
        self.handles_tools = tokenizer.template.handles_tools and self._find_call_format()
        self.with_kwargs = variants(self.template_kwargs, build)

    @property
    def call_format(self) -> str:
        """Name of the format of tool calls."""
        return "harmony" if self._is_harmony else self.writing.format.name

    def render(self, messages: list[Message], tools: list[Tool] | None, *, opening: bool = True) -> list[int]:
        return self.tokenizer.encode(self._text(messages, tools, opening), add_special_tokens=False)

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        opened = self._text(messages[:-1], tools, True)
        whole = self._text(messages, tools, False)
        turn_end, turn_end_id = self._end_of(messages[-1])
        if not whole.startswith(opened) or turn_end_id is None:
            return None
        end = whole.rfind(turn_end, len(opened))
        answer = whole[len(opened) : end + len(turn_end)] if end >= 0 else whole[len(opened) :].rstrip()
        return self.tokenizer.encode(without_empty_reasoning(answer), add_special_tokens=False)

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        turn_end, turn_end_id = self._end_of(turn.messages[-1])
        if turn_end_id is None:
            return Branch("template_without_turn_end")
        if any(message["role"] == "assistant" for message in new_messages):
            return Branch("history_continues_elsewhere")
        if self._keep_reasoning is False and has_reasoning(turn.messages):
            return Branch("reasoning_dropped")
        before = self._text(turn.messages, tools, False)
        after = self._text(turn.messages + new_messages, tools, True)
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
        calls = self.writing.format
        if calls.opening is None and not tools:  # without tools, a JSON object is an ordinary answer
            parse_tools = False
        schemas = parameter_schemas(tools) if parse_tools else None
        in_reasoning = self.tags.opens_reasoning(prompt_ids)
        return TaggedParser(self.tokenizer, self.tags, in_reasoning=in_reasoning, schemas=schemas, calls=calls)

    def _find_call_format(self) -> bool:
        """Find out how the template writes tool calls. False if tools cannot be used."""
        writing = find_call_writing(self.side, self._is_harmony)
        if writing is None:
            return False
        self.writing = writing
        if writing.end is not None:
            self._call_end = writing.end
            self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, writing.end[1]]))
        return True

    def _end_of(self, answer: Message) -> tuple[str, int | None]:
        """Text and id of the token that the template writes after an answer."""
        if self._call_end is not None and answer.get("tool_calls"):
            return self._call_end
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

    def _text(
        self, messages: list[Message], tools: list[Tool] | None, opening: bool, writing: CallWriting | None = None
    ) -> str:
        prepared = template_messages(messages, drop_reasoning=self._keep_reasoning is False)
        if self._is_harmony:
            prepared = harmony.harmony_messages(prepared)
        if tools or any(message.get("tool_calls") for message in prepared):
            prepared = prepare_calls(prepared, writing or self.writing)
        return self.tokenizer.render_text(prepared, tools, add_generation_prompt=opening, **self.template_kwargs)


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
