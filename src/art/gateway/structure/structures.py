"""Makes the grammar of a request, proves that it fits the model, and checks what the engine has sampled.

    request --what it asks for--> AnswerShape --write_grammar--> text --compile in a thread--> AnswerGrammar
    answer  --its tokens--> matcher: a token that the grammar refuses is an error

A model's style is found out at its first request that needs a grammar, and proved there: answers that the chat template
writes must match the grammar, token by token. Otherwise such requests are refused.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakKeyDictionary

from art.engine import Engine
from art.errors import ArtError, ConfigError, InvalidRequestError, ProcessError
from art.gateway.format.renderer import Renderer
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.structure.grammar import AnswerGrammar, AnswerShape, write_grammar
from art.gateway.structure.proof import find_problems
from art.gateway.structure.schemas import arguments_schema, complaint, form_complaint, kept_arguments
from art.gateway.structure.style import AnswerStyle, find_style, opening_of
from art.kernels.grammar import Vocabulary
from art.protocol.dialects.chat_completions import ChatRequest

logger = logging.getLogger(__name__)

_STRICT = "tools"
"""Asked for where only strict tools want a grammar. They are kept to their schema where that is possible.

Many clients mark every tool as strict, and refusing would stop them. The log says where it is not possible.
"""


class _Model:
    """What grammars need of one model: its tokens, its style, and why the style may not be used."""

    def __init__(self, renderer: Renderer, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.style: AnswerStyle = find_style(renderer)
        self.content_problem, self.calls_problem = find_problems(renderer, self.style, vocabulary)


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
        once for each model.

        Args:
            model_name: the model as the log shall call it.

        Raises:
            InvalidRequestError: the engine, the model's call format or llguidance cannot keep the form, or the engine
                cannot honour `top_k` or `min_p`.
        """
        asked, cut = _asked(request), _truncation(request)
        if asked is None and cut is None:
            return None
        info = await engine.info()
        if cut is not None and not info.reports_kept:
            raise InvalidRequestError(f"this model's engine cannot honour `{cut}`; leave it out", param=cut)
        if asked is None:
            return None
        if not info.grammars:
            if asked == _STRICT:
                self._warn_of_strict(model_name, "its engine does not sample under a grammar")
                return None
            raise InvalidRequestError(
                f"`{asked}` needs an engine that samples under a grammar, which this model's engine does not; leave it "
                "out",
                param=asked,
            )
        model = await self._model(renderer, info.vocab_size)
        problem = model.content_problem if request.call_rule.mode == "none" else model.calls_problem
        if problem is None:
            return await asyncio.to_thread(_compile, request, renderer, prompt_token_ids, model, asked)
        if asked == _STRICT:
            self._warn_of_strict(model_name, problem)
            return None
        raise InvalidRequestError(f"`{asked}` cannot be enforced for this model: {problem}", param=asked)

    def _warn_of_strict(self, model_name: str, problem: str) -> None:
        if model_name not in self._warned:
            self._warned.add(model_name)
            logger.warning(
                "%s: strict tools are served as if they were not strict, so the arguments of calls may not match their "
                "schemas: %s",
                *(model_name, problem),
            )

    async def check(self, grammar: AnswerGrammar, renderer: Renderer, token_ids: list[int]) -> None:
        """Check that the tokens of an answer match its grammar.

        Raises:
            ProcessError: they do not, so the engine has not honoured the grammar.
        """
        vocabulary = (await self._models[renderer]).vocabulary
        num_matched = await asyncio.to_thread(_num_matched, vocabulary, grammar, token_ids)
        if num_matched < len(token_ids):
            raise ProcessError(
                f"the engine's answer does not match its grammar: token {num_matched} of {len(token_ids)} is not "
                "allowed there. Nothing was recorded; send the request again, and report it if it happens again"
            )

    async def _model(self, renderer: Renderer, vocab_size: int) -> _Model:
        task = self._models.get(renderer)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._models[renderer] = asyncio.create_task(asyncio.to_thread(self._load, renderer, vocab_size))
        try:
            return await asyncio.shield(task)  # it is shared: a client that hangs up must not cancel it
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="model") from error

    def _load(self, renderer: Renderer, vocab_size: int) -> _Model:
        sizes = self._vocabularies.setdefault(renderer.tokenizer, {})
        if vocab_size not in sizes:
            sizes[vocab_size] = Vocabulary(renderer.tokenizer.backend.to_str(), vocab_size)
        return _Model(renderer, sizes[vocab_size])


def _asked(request: ChatRequest) -> str | None:
    """The parameter that asks for a form, if one does."""
    rule = request.call_rule
    if rule.mode == "required" or (rule.mode == "auto" and rule.names is not None):
        return "tool_choice"
    if request.content_form is not None:
        return request.content_form.param
    if rule.mode == "auto":
        if rule.single:
            return "parallel_tool_calls"
        return _STRICT if request.strict_tools else None
    return None


def _truncation(request: ChatRequest) -> str | None:
    """The parameter that restricts sampling to likely tokens, besides `top_p`."""
    if (request.top_k or 0) > 0:
        return "top_k"
    return "min_p" if request.min_p else None


def _compile(
    request: ChatRequest, renderer: Renderer, prompt_token_ids: list[int], model: _Model, asked: str
) -> AnswerGrammar:
    form, rule = request.content_form, request.call_rule
    if form is not None and (problem := form_complaint(form)) is not None:
        raise InvalidRequestError(f"`{form.param}` cannot be enforced: {problem}", param=form.param)
    arguments: dict[str, dict[str, Any]] = {}
    calls = model.style.calls
    for i, tool in enumerate(request.tools or ()):
        function, param = tool["function"], f"tools.{i}"
        name, strict = function["name"], function["name"] in request.strict_tools
        if rule.mode == "none" or (rule.names is not None and name not in rule.names):
            continue
        if calls is not None and calls.tags is not None:
            arguments[name] = kept_arguments(function, param, strict=strict, style=calls)
        else:
            arguments[name] = arguments_schema(function.get("parameters"), param, strict=strict)
    opening = opening_of(renderer, prompt_token_ids)
    grammar = write_grammar(model.style, AnswerShape(opening=opening, form=form, rule=rule, arguments=arguments))
    try:
        model.vocabulary.matcher(grammar.text, grammar.stop_token_ids)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"`{asked}` cannot be enforced: {complaint(error.message)}", param=asked) from error
    return grammar


def _num_matched(vocabulary: Vocabulary, grammar: AnswerGrammar, token_ids: list[int]) -> int:
    try:
        matcher = vocabulary.matcher(grammar.text, grammar.stop_token_ids)
    except ArtError as error:
        raise ProcessError(f"the grammar of an answer can no longer be compiled: {error.message}") from error
    for token_id in token_ids:
        if not matcher.advance(token_id):
            break
    return matcher.num_tokens
