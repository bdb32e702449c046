"""The renderer of a model: messages to tokens and back, by the model's own chat template.

It extends recorded tokens by new messages, after checking on the text of the template that this is correct: `before` is
the text for the recorded conversation, `after` that with the new messages and the opening of the next answer. If
`after` begins with `before`, the text that it adds follows the recorded tokens. With | for the turn end:

    before            user: hi|  assistant: hello|
    after             user: hi|  assistant: hello|  user: bye|  assistant:
    next prompt       recorded tokens up to the sampled |, then the tokens of "  user: bye|  assistant:"

The cut is at the token that ends a turn, so nothing before it is ever tokenised again.

A trial shows how the model writes tool calls: calls
are rendered and parsed again, and the first format that gives the same calls back is the model's. A template may write
every call, only a single one of a message (Llama 3), or none (Falcon-H1); what it does not write, ART writes into the
message's content, in the format that the template itself describes or writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from art.config import RenderConfig
from art.errors import ConfigError, InvalidRequestError
from art.gateway import harmony
from art.gateway.calls import CallFormat, parameter_schemas, with_call_ids, with_written_calls
from art.gateway.parse import MessageParser, ParsedMessage, TaggedParser, Tags
from art.gateway.tokenizer import NO_TEMPLATE, Tokenizer
from art.gateway.tool_calls import CALL_FORMATS, TAGGED
from art.protocol.answers import Branch
from art.protocol.chat import Message, Tool, tool_call

TemplateKwargs: TypeAlias = Mapping[str, Any]
"""Settings of a chat template by name: booleans, numbers and strings."""
_MAX_VARIANTS = 32
"""Largest number of renderers with other template settings that are cached per model."""


def load_renderer(source: str | Path, config: RenderConfig | None = None) -> Renderer:
    """Load the renderer of a model from a local directory or a hub id. Reads files; takes up to a second. Without a
    usable tokenizer or chat template, or with a setting that the template does not know, it is a `ConfigError`."""
    config = config or RenderConfig()
    return Renderer(Tokenizer.load(source), config.chat_template_kwargs, keep_reasoning=config.keep_reasoning)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A request and its answer, as messages and as exact tokens."""

    messages: list[Message]
    """The messages of the request with the recorded reasoning of earlier answers, and the answer at the end."""
    prompt_token_ids: list[int]
    completion_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class CallWriting:
    """How the tool calls of messages get into a prompt."""

    format: CallFormat
    text_arguments: bool = False
    """Whether the template takes arguments as JSON text. Most take an object."""
    written_from: int | None = None
    """Number of calls in a message from which ART writes them into its content. `None`: the template writes all."""
    is_parallel: bool = True
    """Whether a message may have several calls."""
    end: tuple[str, int] | None = None
    """Text and id of the token that ends an answer with calls, where it is not the usual one."""


class Renderer:
    """Renders messages to tokens, extends recorded tokens, and parses completions, for one model.

    Parses gpt-oss's harmony format, or the tags that the vocabulary has.
    """

    def __init__(
        self, tokenizer: Tokenizer, kwargs: TemplateKwargs | None = None, *, keep_reasoning: bool | None = None
    ) -> None:
        """
        Args:
            kwargs: settings of the template, e.g. `{"enable_thinking": False}`. It must know each.
            keep_reasoning: whether later prompts keep the reasoning of earlier turns; `None` leaves it to the template.
        """
        if tokenizer.template is None:
            raise ConfigError(f"{tokenizer.name_or_path} {NO_TEMPLATE}")
        kwargs = kwargs or {}
        if unknown := sorted(kwargs.keys() - tokenizer.template.settings):
            known = sorted(tokenizer.template.settings) or "none"
            problem = f"the chat template of this model has no setting {unknown}; it has {known}"
            raise ConfigError(problem, param="chat_template_kwargs")
        self.tokenizer = tokenizer
        self.template_kwargs: dict[str, Any] = dict(kwargs)
        self.tags = Tags.of(tokenizer)
        self._is_harmony = harmony.is_in(tokenizer)
        self._keep_reasoning = keep_reasoning
        self.turn_end, self._turn_end_id = _find_turn_end(tokenizer, self.template_kwargs)
        ends = [self._turn_end_id, tokenizer.eos_token_id, *tokenizer.generation_stop_ids]
        ends += map(tokenizer.token_id, harmony.STOPS if self._is_harmony else ())
        self.stop_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        """Sampling one of these ends an answer."""
        if not self.stop_token_ids:
            raise ConfigError(
                f"{tokenizer.name_or_path}: no token ends an answer (no `eos_token` in tokenizer_config.json, no "
                "`eos_token_id` in generation_config.json, and the chat template closes turns with plain text)"
            )
        self._call_end = (harmony.CALL_END, tokenizer.token_id(harmony.CALL_END)) if self._is_harmony else None
        self.writing = CallWriting(TAGGED)
        """How tool calls are written. It counts only where `handles_tools`."""
        writing = _find_call_writing(self) if tokenizer.template.handles_tools else None
        self.handles_tools = writing is not None
        if writing is not None:
            self.writing = writing
            if writing.end is not None:
                self._call_end = writing.end
                self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, writing.end[1]]))
        self._with_json = functools.lru_cache(_MAX_VARIANTS)(
            lambda added: Renderer(tokenizer, self.template_kwargs | json.loads(added), keep_reasoning=keep_reasoning)
        )

    @property
    def call_format(self) -> str:
        """Name of the format of tool calls."""
        return "harmony" if self._is_harmony else self.writing.format.name

    def with_kwargs(self, kwargs: TemplateKwargs) -> Renderer:
        """Return a cached renderer of this model with other template settings, all of which the template must know."""
        return self._with_json(json.dumps(dict(kwargs), sort_keys=True))

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        """Render a conversation to tokens, up to where the next answer begins."""
        return self.tokenizer.encode(self.text(messages, tools, True))

    def completion(self, messages: list[Message], tools: list[Tool] | None) -> list[int] | None:
        """Render the last message as the completion of the prompt before it, up to and including the end of the turn.
        `None` if the rendered conversation does not begin with the prompt."""
        answer = self._answer(messages, tools, self.text(messages[:-1], tools, True))
        return None if answer is None else self.tokenizer.encode(answer)

    def completions(
        self, messages: list[Message], tools: list[Tool] | None
    ) -> Iterator[tuple[int, list[int], list[int] | None]]:
        """Render each assistant message after the first message: its index, its prompt, and its completion as above.
        Text before an answer that the template leaves as it is, is not tokenised again for the next answer."""
        known, known_ids, end = "", list[int](), ("", -2)
        for i in range(1, len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            opened = self.text(messages[:i], tools, True)
            answer = self._answer(messages[: i + 1], tools, opened)
            tail = [-1]
            if known and opened.startswith(known):
                tail = self.tokenizer.encode(end[0] + opened[len(known) :])
            is_known = tail[0] == end[1]
            prompt = known_ids + tail[1:] if is_known else self.tokenizer.encode(opened)
            completion = None if answer is None else self.tokenizer.encode(answer)
            yield i, prompt, completion
            turn_end, turn_end_id = self._end_of(messages[i])
            if answer is not None and completion is not None and turn_end_id is not None and answer.endswith(turn_end):
                known, known_ids, end = opened + answer, prompt + completion, (turn_end, turn_end_id)

    def _answer(self, messages: list[Message], tools: list[Tool] | None, opened: str) -> str | None:
        """The text of the last message after the text of its prompt; `None` if it does not come after it."""
        whole = self.text(messages, tools, False)
        turn_end, turn_end_id = self._end_of(messages[-1])
        if not whole.startswith(opened) or turn_end_id is None:
            return None
        end = whole.rfind(turn_end, len(opened))
        answer = whole[len(opened) : end + len(turn_end)] if end >= 0 else whole[len(opened) :].rstrip()
        return without_empty_reasoning(answer)

    def bridge(self, turn: RecordedTurn, new_messages: list[Message], tools: list[Tool] | None) -> list[int] | Branch:
        """Build the next prompt by extending the exact tokens of `turn`, or return why that is impossible."""
        turn_end, turn_end_id = self._end_of(turn.messages[-1])
        if turn_end_id is None:
            return Branch("template_without_turn_end")
        if any(message["role"] == "assistant" for message in new_messages):
            return Branch("history_continues_elsewhere")
        if self._keep_reasoning is False and any(message.get("reasoning_content") for message in turn.messages):
            return Branch("reasoning_dropped")
        recorded = turn.prompt_token_ids + turn.completion_token_ids
        if not turn.completion_token_ids or recorded[-1] not in self.stop_token_ids:  # the answer was cut off
            close = self.tags.think_close
            if close is not None and parse(self, turn.prompt_token_ids, turn.completion_token_ids).reasoning_open:
                recorded.append(close)
            recorded.append(turn_end_id)
        sampled, after = self.tokenizer.text(recorded), self.text(turn.messages + new_messages, tools, True)
        if after.startswith(sampled):  # the usual case, and a render less: the template writes what was sampled
            added: str | Branch = after[len(sampled) :]
        else:
            before = self.text(turn.messages, tools, False)
            added = extend_text(before, after, turn_end, keep_reasoning=self._keep_reasoning is True)
        if isinstance(added, Branch):
            return added
        # Tokenise together with the turn end, as in the whole text.
        tail = self.tokenizer.encode(turn_end + added)
        if tail[0] != turn_end_id:
            return Branch("template_without_turn_end")
        return recorded + tail[1:]

    def parser(
        self, prompt_ids: list[int], tools: list[Tool] | None, *, parse_tools: bool, calls: CallFormat | None = None
    ) -> MessageParser:
        """Make the parser for one completion of the prompt `prompt_ids`."""
        if self._is_harmony:
            return harmony.HarmonyParser(self.tokenizer, parse_tools=parse_tools)
        calls = calls or self.writing.format
        if calls.opening is None and not tools:  # without tools, a JSON object is an ordinary answer
            parse_tools = False
        schemas = parameter_schemas(tools) if parse_tools else None
        in_reasoning = self.tags.opens_reasoning(prompt_ids)
        return TaggedParser(self.tokenizer, self.tags, in_reasoning=in_reasoning, schemas=schemas, calls=calls)

    def _end_of(self, answer: Message) -> tuple[str, int | None]:
        """Text and id of the token that the template writes after an answer."""
        if self._call_end is not None and answer.get("tool_calls"):
            return self._call_end
        return self.turn_end, self._turn_end_id

    def text(
        self, messages: list[Message], tools: list[Tool] | None, opening: bool, writing: CallWriting | None = None
    ) -> str:
        """Render messages to text, with the opening of the next answer if `opening` is set. Raises
        `InvalidRequestError` if the template does not accept these messages, or writes one call per message, and a
        message has several."""
        writing = writing or self.writing
        most = max((len(message.get("tool_calls") or ()) for message in messages), default=0)
        if tools or most:
            if most > 1 and not writing.is_parallel:
                fact = "this model's chat template writes one call per message"
                todo = "send each call in a message of its own, followed by its result"
                raise InvalidRequestError(f"a message has {most} tool calls, but {fact}; {todo}", param="messages")
            messages = with_call_ids(messages, writing.format)
            if writing.written_from is not None:
                messages = with_written_calls(messages, writing.format, at_least=writing.written_from)
        drop, objects = self._keep_reasoning is False, not writing.text_arguments
        prepared = template_messages(messages, drop_reasoning=drop, object_arguments=objects)
        prepared = harmony.harmony_messages(prepared) if self._is_harmony else prepared
        return self.tokenizer.render_text(prepared, tools, add_generation_prompt=opening, **self.template_kwargs)


_CLOSING = "</think>"
_EMPTY_THINK = re.compile(r"<think>\s*</think>")
THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


def extend_text(before: str, after: str, turn_end: str, *, keep_reasoning: bool) -> str | Branch:
    """Return the text to add after the turn end of the last recorded answer, or a branch if earlier text changed.
    `before` is the text of the recorded conversation, and `after` is its text with new messages. A template that prints
    an empty think block before the last answer and removes it later changes no sampled token, so this is no branch.
    Dropping real reasoning is one, unless `keep_reasoning` is set."""
    cut = before.rfind(turn_end)
    if cut < 0:
        return Branch("template_without_turn_end")
    cut += len(turn_end)
    head, rest = before[:cut], before[cut:]
    if after.startswith(before):
        return after[cut:]
    # The text before the cut may have changed, but the number of turn ends in it has not.
    *ended, _ = after.split(turn_end, head.count(turn_end))
    after_head = "".join(part + turn_end for part in ended)
    after_cut = len(after_head)
    if len(ended) < head.count(turn_end) or not after.startswith(rest, after_cut):
        return Branch("template_rewrites_history")
    if without(_EMPTY_THINK, head) == without(_EMPTY_THINK, after_head):
        return after[after_cut:]
    if without(THINK, head) == without(THINK, after_head):
        return after[after_cut:] if keep_reasoning else Branch("reasoning_dropped")
    return Branch("template_rewrites_history")


def without(blocks: re.Pattern[str], text: str) -> str:
    """Remove what `blocks` matches, and all whitespace, since templates put whitespace around think blocks."""
    # Only up to the last closing tag: from each opening tag without one, the pattern would search to the end.
    end = text.rfind(_CLOSING) + len(_CLOSING) if _CLOSING in text else 0
    return "".join((blocks.sub("", text[:end]) + text[end:]).split())


_PROBE = "zq probe zq"


def _find_turn_end(tokenizer: Tokenizer, kwargs: TemplateKwargs) -> tuple[str, int | None]:
    """Text and id of the token that the template writes right after an answer; ("", None) if it is no single token."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.render_text(messages, None, add_generation_prompt=False, **kwargs)
    except InvalidRequestError:
        return "", None
    _, probe, tail = text.rpartition(_PROBE)
    return (_first_special(tokenizer, tail) if probe else None) or ("", None)


def _first_special(tokenizer: Tokenizer, text: str) -> tuple[str, int] | None:
    """Text and id of the special token with which a text begins; `None` if it begins with anything else."""
    ids = tokenizer.encode(text)
    if not ids or ids[0] not in tokenizer.backend.get_added_tokens_decoder():
        return None
    first = tokenizer.text(ids[:1])
    return (first, ids[0]) if text.startswith(first) else None


# -- the trial --

_NAME = "zq_probe"
_ASKED: list[Message] = [{"role": "user", "content": "hi"}]
_TYPES = {"zqa": "string", "zqb": "integer", "zqc": "boolean", "zqd": "object"}
_ARGUMENTS = {"zqa": "zq '1'\n\"2\" \\3", "zqb": 2, "zqc": True, "zqd": {"zqe": [1, "2"]}}
_PROPERTIES = {name: {"type": kind, "description": "probe"} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["zqa"]}
_FUNCTION = {"name": _NAME, "description": "probe", "parameters": _PARAMETERS}
_TOOLS: list[Tool] = [{"type": "function", "function": _FUNCTION}]


def _find_call_writing(renderer: Renderer) -> CallWriting | None:
    """Return how calls are written; `None` if no known format reads what the template writes."""
    is_harmony = harmony.is_in(renderer.tokenizer)
    formats = [TAGGED] if is_harmony else [one for one in CALL_FORMATS if one.is_in(renderer.tokenizer)]
    for one in formats:
        for text_arguments in (False, True):
            writing = CallWriting(one, text_arguments)
            if _reads_back(renderer, writing, 1):
                return _with_several(renderer, replace(writing, end=_find_end(renderer, writing)))
    if is_harmony:
        return None
    try:
        rendered = renderer.text([*_ASKED, _answer(1)], None, False, CallWriting(TAGGED))
        described = renderer.text(_ASKED, _TOOLS, True, CallWriting(TAGGED))
    except InvalidRequestError:
        return None
    for one in () if _NAME in rendered else formats:  # the template renders a message with calls as if it had none
        writing = CallWriting(one, written_from=1)
        is_described = one.described_by is not None and one.described_by.search(described)
        if is_described and _reads_back(renderer, writing, 1):
            return _with_several(renderer, writing)
    return None


def _with_several(renderer: Renderer, writing: CallWriting) -> CallWriting:
    """Find out how several calls of one message are written."""
    if _reads_back(renderer, writing, 2):
        return writing
    written = replace(writing, written_from=2)
    if writing.format.write is not None and _reads_back(renderer, written, 2):
        return written
    return replace(writing, is_parallel=False)


def _answer(count: int) -> Message:
    arguments = json.dumps(_ARGUMENTS)
    calls = [tool_call(f"call_zq{number}", _NAME, arguments) for number in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _reads_back(renderer: Renderer, writing: CallWriting, count: int) -> bool:
    rendered = render_answer(renderer, writing, [*_ASKED, _answer(count)], _TOOLS)
    if rendered is None:
        return False
    prompt, answer = rendered
    parser = renderer.parser(prompt, _TOOLS, parse_tools=True, calls=writing.format)
    parser.push(answer)
    calls = parser.finish().tool_calls
    return [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, _ARGUMENTS)] * count


def render_answer(
    renderer: Renderer, writing: CallWriting, messages: list[Message], tools: list[Tool]
) -> tuple[list[int], list[int]] | None:
    """Tokens of a prompt, and of its answer (the last message) without the token that ends it.

    Some templates open reasoning in the prompt, and write an answer without reasoning in another way. Such an answer
    is tried with reasoning; then it is cut where the prompt without the opening of the answer ends. `None` if the
    template refuses the messages, or writes them in another way once they are answered.
    """
    asked, answer = messages[:-1], messages[-1]
    try:
        for message in (answer, {**answer, "reasoning_content": "zq thought"}):
            whole = renderer.text([*asked, message], tools, False, writing)
            prompt = renderer.text(asked, tools, True, writing)
            if whole.startswith(prompt):
                break
        else:
            prompt = renderer.text(asked, tools, False, writing)
    except InvalidRequestError:
        return None
    if not whole.startswith(prompt):
        return None
    turn_end = harmony.CALL_END if harmony.is_in(renderer.tokenizer) else renderer.turn_end
    end = whole.rfind(turn_end, len(prompt)) if turn_end else -1
    answered = whole[len(prompt) :] if end < 0 else whole[len(prompt) : end]
    return renderer.tokenizer.encode(prompt), renderer.tokenizer.encode(answered)


def _find_end(renderer: Renderer, writing: CallWriting) -> tuple[str, int] | None:
    """The token that ends an answer with calls, if the template writes another one than after content."""
    closing = writing.format.closing
    if closing is None or harmony.is_in(renderer.tokenizer):
        return None
    whole = renderer.text([*_ASKED, _answer(1)], _TOOLS, False, writing)
    end = _first_special(renderer.tokenizer, whole[whole.rfind(closing) + len(closing) :].lstrip())
    return None if end is None or end[0] == renderer.turn_end else end


def parse(
    renderer: Renderer, prompt_ids: list[int], completion_ids: list[int], tools: list[Tool] | None = None
) -> ParsedMessage:
    """Parse a whole completion, with or without the token that ended it."""
    if completion_ids and completion_ids[-1] in renderer.stop_token_ids:
        completion_ids = completion_ids[:-1]
    parser = renderer.parser(prompt_ids, tools, parse_tools=True)
    parser.push(completion_ids)
    return parser.finish()


_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


def without_empty_reasoning(answer: str) -> str:
    """Remove the empty reasoning block that some templates write before a last message without reasoning. Training on
    it would teach the model to begin with a block that no prompt contains."""
    return _EMPTY_REASONING.sub("", answer, count=1) if _EMPTY_REASONING.match(answer) else answer


def template_messages(
    messages: list[Message], *, drop_reasoning: bool = False, object_arguments: bool = True
) -> list[Message]:
    """Convert messages to what templates expect: tool-call arguments as objects, and no `exchange_id`."""
    result = []
    for message in messages:
        if message["role"] == "assistant" and len(message) > 2:
            message = {key: value for key, value in message.items() if key != "exchange_id"}
            if drop_reasoning:
                message.pop("reasoning_content", None)
            if message["content"] is None:
                message["content"] = ""
            if object_arguments and (calls := message.get("tool_calls")):
                functions = [{**call["function"]} for call in calls]
                for function in functions:
                    with contextlib.suppress(ValueError):  # other text than JSON is left as it is
                        value = json.loads(function["arguments"])
                        function["arguments"] = value if isinstance(value, dict) else function["arguments"]
                pairs = zip(calls, functions, strict=True)
                message["tool_calls"] = [{**call, "function": function} for call, function in pairs]
        result.append(message)
    return result


_SETTING = "enable_thinking"
"""The setting by which chat templates of models with both modes choose one."""


def reasoning_settings(renderer: Renderer, *, reasons: bool) -> TemplateKwargs:
    """Settings of the chat template that make the model reason or not; none if the template leaves no choice. That a
    model should reason, and never does, is an `InvalidRequestError`."""
    template = renderer.tokenizer.template
    if template is not None and _SETTING in template.settings:
        return {_SETTING: reasons}
    if reasons and renderer.tokenizer.token_id("<think>") is None and not harmony.is_in(renderer.tokenizer):
        why = f"its chat template has no setting `{_SETTING}`, and its vocabulary no `<think>`"
        raise InvalidRequestError(f"this model does not reason: {why}; leave `thinking` out", param="thinking")
    return {}
