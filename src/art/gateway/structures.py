"""Makes the grammar of a request, proves that it fits the model, and checks what the engine has sampled.

    request --what it asks for--> AnswerShape --write_grammar--> text --compile in a thread--> AnswerGrammar
    answer  --its tokens--> matcher: a token that the grammar refuses is an error

A model's style is found out at its first request that needs a grammar, and proved there: answers that the chat template
writes must match the grammar, token by token. Otherwise such requests are refused.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import re
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLMatcher

from art.engine import Engine
from art.errors import ArtError, ConfigError, InvalidRequestError, ProcessError
from art.gateway.answer_style import AnswerStyle, answer_tokens, find_style, opening_of
from art.gateway.grammar import AnswerGrammar, AnswerShape, regex, schema, write_grammar
from art.gateway.renderer import Renderer, parse
from art.gateway.tokenizer import Tokenizer
from art.kernels.grammar import Vocabulary
from art.protocol.chat import Tool, invalid, tool_call
from art.protocol.chat_completions import CallRule, ChatRequest, ContentForm

logger = logging.getLogger(__name__)

_STRICT = "tools"
"""Asked for where only strict tools want a grammar. They are kept to their schema where that is possible.

Many clients mark every tool as strict, and refusing would stop them. The log says where it is not possible.
"""


@dataclass(frozen=True, slots=True)
class _Model:
    """What grammars need of one model: its tokens, its style, and why the style may not be used."""

    vocabulary: Vocabulary
    style: AnswerStyle
    content_problem: str | None
    calls_problem: str | None


class Structures:
    """The grammars of a server's answers."""

    def __init__(self) -> None:
        self._vocabularies: WeakKeyDictionary[Tokenizer, dict[int, Vocabulary]] = WeakKeyDictionary()
        self._models: WeakKeyDictionary[Renderer, asyncio.Task[_Model]] = WeakKeyDictionary()
        self._warned: set[str] = set()
        """Models whose strict tools have been served without a grammar."""

    async def prepare(
        self, request: ChatRequest, renderer: Renderer, prompt_token_ids: list[int], engine: Engine, *, model_name: str
    ) -> AnswerGrammar | None:
        """Make the grammar of a request; `None` if it asks for no form.

        Strict tools that a model is free to call are served without a grammar where there can be none; the log says so
        once for each `model_name`. Raises `InvalidRequestError` if the engine, the model's call format or llguidance
        cannot keep the form, or the engine cannot honour `top_k` or `min_p`.
        """
        asked = _asked(request)
        cut = "top_k" if (request.top_k or 0) > 0 else "min_p" if request.min_p else None
        if asked is None and cut is None:
            return None
        info = await engine.info()
        if cut is not None and not info.reports_kept:
            raise InvalidRequestError(f"this model's engine cannot honour `{cut}`; leave it out", param=cut)
        if asked is None:
            return None
        problem: str | None = "its engine does not sample under a grammar"
        if info.grammars:
            model = await self._model(renderer, info.vocab_size)
            problem = model.content_problem if request.call_rule.mode == "none" else model.calls_problem
            if problem is None:
                return await asyncio.to_thread(_compile, request, renderer, prompt_token_ids, model, asked)
        if asked != _STRICT:
            needs = "needs an engine that samples under a grammar"
            raise invalid(asked, f"{'cannot be enforced for this model' if info.grammars else needs}: {problem}")
        if model_name not in self._warned:
            self._warned.add(model_name)
            served = "strict tools are served as if they were not strict, so the arguments of calls may not match"
            logger.warning("%s: %s their schemas: %s", model_name, served, problem)
        return None

    async def check(self, grammar: AnswerGrammar, renderer: Renderer, token_ids: list[int]) -> None:
        """Check that the tokens of an answer match its grammar. Else the engine has not honoured it."""
        vocabulary = (await self._models[renderer]).vocabulary

        def count_matched() -> int:
            try:
                matcher = vocabulary.matcher(grammar.text, grammar.stop_token_ids)
            except ArtError as error:
                raise ProcessError(f"the grammar of an answer can no longer be compiled: {error.message}") from error
            return sum(1 for _ in itertools.takewhile(matcher.advance, token_ids))

        if (num_matched := await asyncio.to_thread(count_matched)) < len(token_ids):
            fact = f"token {num_matched} of {len(token_ids)} is not allowed there. Nothing was recorded"
            todo = "send the request again, and report it if it happens again"
            raise ProcessError(f"the engine's answer does not match its grammar: {fact}; {todo}")

    async def _model(self, renderer: Renderer, vocab_size: int) -> _Model:

        def load() -> _Model:
            sizes = self._vocabularies.setdefault(renderer.tokenizer, {})
            if vocab_size not in sizes:
                sizes[vocab_size] = Vocabulary(renderer.tokenizer.backend.to_str(), vocab_size)
            style = find_style(renderer)
            return _Model(sizes[vocab_size], style, *find_problems(renderer, style, sizes[vocab_size]))

        task = self._models.get(renderer)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._models[renderer] = asyncio.create_task(asyncio.to_thread(load))
        try:
            return await asyncio.shield(task)  # it is shared: a client that hangs up must not cancel it
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="model") from error


def _asked(request: ChatRequest) -> str | None:
    """The parameter that asks for a form, if one does."""
    rule = request.call_rule
    if rule.mode == "required":
        return "tool_choice"
    if request.content_form is not None:
        return request.content_form.param
    if rule.mode == "auto" and rule.single:
        return "parallel_tool_calls"
    return _STRICT if rule.mode == "auto" and request.strict_tools else None


def _compile(
    request: ChatRequest, renderer: Renderer, prompt_token_ids: list[int], model: _Model, asked: str
) -> AnswerGrammar:
    form, rule = request.content_form, request.call_rule
    if form is not None and form.kind != "choice":
        is_json = form.kind == "json"
        problem = _schema_complaint(form.value) if is_json else _complaint_about(f"start: {regex(form.value)}")
        if problem is not None:
            raise invalid(form.param, f"cannot be enforced: {problem}")
    arguments: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(request.tools or ()):
        name, parameters = tool["function"]["name"], tool["function"].get("parameters")
        if rule.mode == "none" or rule.name not in (None, name):
            continue
        own, kind = _OBJECT, "object"
        if isinstance(parameters, dict):
            own, kind = {**parameters, "type": "object"}, parameters.get("type", "object")
        problem = f"its type is {kind!r}, but arguments are an object" if kind != "object" else _schema_complaint(own)
        if problem is not None and name in request.strict_tools:
            raise invalid(f"tools.{i}.function.parameters", f"of a strict tool cannot be enforced: {problem}")
        # The arguments of a function that is not strict may be any object if llguidance cannot keep its schema.
        arguments[name] = own if problem is None else _OBJECT
    opening = opening_of(renderer, prompt_token_ids)
    grammar = write_grammar(model.style, AnswerShape(opening=opening, form=form, rule=rule, arguments=arguments))
    try:
        model.vocabulary.matcher(grammar.text, grammar.stop_token_ids)
    except InvalidRequestError as error:
        raise invalid(asked, f"cannot be enforced: {complaint(error.message)}") from error
    return grammar


# -- which schemas and forms llguidance can keep, asked before they are part of a grammar, so that errors name them --

_ANY = (", ", ": ")
MAX_ITEMS = 1024
"""Largest `minItems` and `maxItems` of a schema. llguidance makes a rule for each item; 10**9 take all memory."""
_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are data, not schemas."""
_OBJECT: dict[str, Any] = {"type": "object"}


def _schema_complaint(value: dict[str, Any]) -> str | None:
    return _items_complaint(value) or _complaint_about(f"start: {schema(value, _ANY)}")


def _items_complaint(schema: Any) -> str | None:
    """Complain of an array with too many items, anywhere in a schema."""
    if isinstance(schema, list):
        return next(filter(None, map(_items_complaint, schema)), None)
    if not isinstance(schema, dict):
        return None
    for key, value in schema.items():
        if key in ("minItems", "maxItems") and isinstance(value, int | float) and value > MAX_ITEMS:
            return f"`{key}` is {value:.4g}; at most {MAX_ITEMS:,} can be kept"
    return next(filter(None, (_items_complaint(value) for key, value in schema.items() if key not in _DATA)), None)


@functools.lru_cache(maxsize=1024)
def _complaint_about(grammar: str) -> str | None:
    problem = LLMatcher.validate_grammar(grammar)
    return complaint(problem) if problem else None


def complaint(text: str) -> str:
    """llguidance's explanation without the place in the grammar, which the client has not written."""
    text = re.split(r"\n\s*\d+ \| |\s\d+ \| ", text)[0]
    return " ".join(re.sub(r"^(at )?\d+\(\d+\): ", "", text).split())[:600]


# -- the proof: answers as the chat template writes them match their grammars, token by token, and come back --

_MORE = {"numbers": [1, 2.5, None, True], "text": "b"}
_ARGUMENTS: dict[str, Any] = {"key": 'a "b"\n\u00e9 <c>', "flag": True, "number": 2.5, "more": _MORE}
_CONTENT = '{"key": "a \\"b\\" <c>"}'
_SCHEMA: dict[str, Any] = {"type": "object"}
_TYPES = {"key": "string", "flag": "boolean", "number": "number", "more": "object"}
_PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}, "required": []}
_FUNCTION = {"name": "look_up", "description": "", "parameters": _PARAMETERS}
_TOOLS: list[Tool] = [{"type": "function", "function": _FUNCTION}]


def find_problems(renderer: Renderer, style: AnswerStyle, vocabulary: Vocabulary) -> tuple[str | None, str | None]:
    """Why grammars cannot be used for content, and for answers that may have calls; `None` where they can."""
    ids = answer_tokens(renderer, {"role": "assistant", "content": _CONTENT}, None)
    shape = AnswerShape(opening="closed", form=ContentForm("json", _SCHEMA, "response_format"))
    if ids is None:  # the template's answers cannot be told from its prompts: then content is plain text
        ids = [*renderer.tokenizer.encode(_CONTENT), style.content.ends[0]]
    if not _matches(style, shape, ids, vocabulary):
        problem = "an answer that its chat template writes does not match the grammar of JSON content"
        return problem, problem
    return None, _calls_problem(renderer, style, vocabulary)


def _calls_problem(renderer: Renderer, style: AnswerStyle, vocabulary: Vocabulary) -> str | None:
    if style.calls is None:
        return (
            "its chat template does not write the arguments of a call as one JSON object; let the model choose "
            '(`tool_choice="auto"`), or ask for JSON content (`response_format`) without tools'
        )
    shape = AnswerShape(opening="closed", rule=CallRule("required"), arguments={"look_up": _PARAMETERS})
    several = [] if style.calls.between is None else [[_ARGUMENTS, _ARGUMENTS], [_ARGUMENTS, {}]]
    for arguments in ([_ARGUMENTS], *several):
        texts = [json.dumps(one, ensure_ascii=False) for one in arguments]
        calls = [tool_call(f"call_{i}", "look_up", text) for i, text in enumerate(texts)]
        ids = answer_tokens(renderer, {"role": "assistant", "content": "", "tool_calls": calls}, _TOOLS)
        if ids is None or not _matches(style, shape, ids, vocabulary):
            return "tool calls that its chat template writes do not match their grammar"
        read = parse(renderer, [], ids, _TOOLS).tool_calls  # without a prompt, which may have opened reasoning
        if [(call.name, json.loads(call.arguments)) for call in read] != [("look_up", one) for one in arguments]:
            return "tool calls that its chat template writes are not read back"
    return None


def _matches(style: AnswerStyle, shape: AnswerShape, token_ids: list[int], vocabulary: Vocabulary) -> bool:
    """Whether an answer matches its grammar, by itself or after reasoning: then it may begin with line breaks."""
    if _matches_now(style, shape, token_ids, vocabulary):
        return True
    before = () if style.reasoning is None else style.reasoning.after
    ended = [part for part in before if isinstance(part, int)]
    return len(ended) == 1 and _matches_now(style, replace(shape, opening="open"), ended + token_ids, vocabulary)


def _matches_now(style: AnswerStyle, shape: AnswerShape, token_ids: list[int], vocabulary: Vocabulary) -> bool:
    grammar = write_grammar(style, shape)
    try:
        matcher = vocabulary.matcher(grammar.text, grammar.stop_token_ids)
        return all(map(matcher.advance, token_ids))
    except ArtError:
        return False
