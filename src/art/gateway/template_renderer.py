"""Any model with a chat template: renders with it, and bridges by comparing its texts."""

from __future__ import annotations

from collections.abc import Callable

from art.errors import ConfigError, InvalidRequestError
from art.gateway.bridge import Branch, extend_text
from art.gateway.parse import MessageParser, TaggedParser, Tags
from art.gateway.renderer import (
    RecordedTurn,
    Renderer,
    TemplateKwargs,
    Variants,
    has_reasoning,
    parse,
    stop_token_ids,
    template_messages,
    without_empty_reasoning,
)
from art.gateway.tokenizer import Tokenizer
from art.protocol.chat import Message, Tool


class TemplateRenderer:
    """Any model with a chat template. Parses the tagged grammar as far as the vocabulary has its tags."""

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
            keep_reasoning: of earlier turns; `None` does as the template does.

        Raises:
            ConfigError: the model has no chat template, or a setting is none of it.
        """
        if tokenizer.template is None:
            raise ConfigError(
                f"{tokenizer.name_or_path} has no chat template (chat_template.jinja, or `chat_template` in "
                "tokenizer_config.json); use an instruction-tuned model, or add a template"
            )
        if unknown := sorted(kwargs.keys() - tokenizer.template.settings):
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} has no setting {unknown}; it has "
                f"{sorted(tokenizer.template.settings) or 'none'}",
                param="chat_template_kwargs",
            )
        self.tokenizer = tokenizer
        self.template_kwargs: TemplateKwargs = dict(kwargs)
        self.tags = Tags.of(tokenizer)
        self.handles_tools = tokenizer.template.handles_tools and self.tags.has_tool_calls
        self._keep_reasoning = keep_reasoning
        self._turn_end, self._turn_end_id = _find_turn_end(tokenizer, self.template_kwargs)
        self.stop_token_ids = stop_token_ids(tokenizer, self._turn_end_id)
        self._variants = Variants(self.template_kwargs, build)

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        return self.tokenizer.encode(self._text(messages, tools, opening=True), add_special_tokens=False)

    def completion(self, messages: list[Message], tools: list[Tool] | None, prompt_ids: list[int]) -> list[int] | None:
        opened = self._text(messages[:-1], tools, opening=True)
        whole = self._text(messages, tools, opening=False)
        if not whole.startswith(opened) or self._turn_end_id is None:
            return None
        end = whole.rfind(self._turn_end) + len(self._turn_end)
        learnt = without_empty_reasoning(whole[len(opened) : end])
        return self.tokenizer.encode(learnt, add_special_tokens=False)

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        if self._turn_end_id is None:
            return Branch("template_without_turn_end")
        if any(message["role"] == "assistant" for message in new_messages):
            return Branch("history_continues_elsewhere")
        if self._keep_reasoning is False and has_reasoning(turn.messages):
            return Branch("reasoning_dropped")
        before = self._text(turn.messages, tools, opening=False)
        after = self._text(turn.messages + new_messages, tools, opening=True)
        added = extend_text(before, after, self._turn_end, keep_reasoning=self._keep_reasoning is True)
        if isinstance(added, Branch):
            return added
        # Tokenised behind the turn end, as it would be in the whole text.
        tail = self.tokenizer.encode(self._turn_end + added, add_special_tokens=False)
        if tail[0] != self._turn_end_id:
            return Branch("template_without_turn_end")
        return self._close_turn(turn, self._turn_end_id) + tail[1:]

    def parser(self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool) -> MessageParser:
        in_reasoning = self.tags.opens_reasoning(prompt_ids)
        return TaggedParser(self.tokenizer, self.tags, in_reasoning=in_reasoning, parse_tools=parse_tools)

    def with_kwargs(self, kwargs: TemplateKwargs) -> Renderer:
        return self._variants.get(kwargs)

    def _close_turn(self, turn: RecordedTurn, turn_end_id: int) -> list[int]:
        """Exact tokens of a turn, with the end that a completion lacks which was cut off."""
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
        return self.tokenizer.render_text(prepared, tools, add_generation_prompt=opening, **self.template_kwargs)


_PROBE = "zq probe zq"


def _find_turn_end(tokenizer: Tokenizer, kwargs: TemplateKwargs) -> tuple[str, int | None]:
    """The token that the template puts right behind an answer, as text and id; ("", None) if it is no single token."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.render_text(messages, None, add_generation_prompt=False, **kwargs)
    except InvalidRequestError:
        return "", None
    _, found, tail = text.rpartition(_PROBE)
    ids = tokenizer.encode(tail, add_special_tokens=False) if found and tail else []
    if not ids or ids[0] not in tokenizer.backend.get_added_tokens_decoder():
        return "", None
    turn_end = tokenizer.text(ids[:1])
    return (turn_end, ids[0]) if tail.startswith(turn_end) else ("", None)
