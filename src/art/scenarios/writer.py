"""A language model that writes: asked in parts, checked, told what was wrong, and asked again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from art.errors import BudgetError, ContextLengthError, GenerationError, JudgeError
from art.model import Model
from art.rewards.asking.completion import JudgeClient
from art.rewards.settings import JudgeSettings
from art.scenarios.words import without_twins

logger = logging.getLogger(__name__)

T = TypeVar("T")
Messages = list[dict[str, Any]]

OPENROUTER_URL = "https://openrouter.ai/api/v1"
PER_REQUEST = 25
"""Texts to ask for at once: with more, models repeat themselves, and answers are cut short."""
MAX_COMPLETION_TOKENS = 8000
"""Of one answer; a scenario has about 60."""
_MAX_QUOTED = 200


class WriteMessages(Protocol):
    def __call__(self, count: int, *, known: Sequence[str], complaint: str | None) -> Messages:
        """The messages that ask for `count` texts.

        Args:
            known: texts that exist already.
            complaint: what was wrong with the answer before.
        """
        ...


class Writer:
    """One model that writes. What it costs is booked as `generator` in the ledger of the settings."""

    def __init__(
        self,
        model: str | Model[Any, Any],
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        extra_litellm_params: Mapping[str, Any] | None = None,
        settings: JudgeSettings | None = None,
    ) -> None:
        """
        Args:
            model: an `art.Model`, the name of a model at `base_url`, or without that a model as litellm names it.
            base_url: of an OpenAI-compatible server.
            api_key: by default that of `OPENROUTER_API_KEY` for OpenRouter, of `OPENAI_API_KEY` for other addresses.
            extra_litellm_params: further arguments of each request, as for judges.
            settings: time-outs, attempts, prices and budget.

        Raises:
            ValueError: no key for OpenRouter.
        """
        self.settings = settings or JudgeSettings()
        self._own: Model[Any, Any] | None = None
        """Made here, for a model that has only a name and an address."""
        params = {"max_completion_tokens": MAX_COMPLETION_TOKENS, **(extra_litellm_params or {})}
        if isinstance(model, str) and base_url is None:
            params |= {"api_key": api_key} if api_key else {}
        elif isinstance(model, str):
            # As a `Model` the name is sent as it is: OpenRouter's names begin with a provider too.
            model = self._own = Model(
                name="generator", project="generator", inference_model_name=model,
                inference_base_url=base_url, inference_api_key=_key_for(base_url, api_key),
            )  # fmt: skip
        self._client = JudgeClient(model, params, self.settings, source="generator")

    @property
    def name(self) -> str:
        """Of the model."""
        return str(self._client.identity["model"])

    async def write(
        self, ask: Callable[[str | None], Messages], read: Callable[[str], T], response_format: Mapping[str, Any]
    ) -> T:
        """What `read` makes of an answer. One that it refuses is asked for again, with its complaint.

        Args:
            ask: the messages, given what was wrong with the answer before.
            read: raises `GenerationError` for an answer of no use.

        Raises:
            GenerationError: the model failed, or no answer was of use.
            BudgetError: the budget is spent.
        """
        complaint = None
        for _ in range(self.settings.max_answers):
            text = await self._complete(ask(complaint), response_format)
            try:
                return read(text)
            except GenerationError as error:
                complaint = error.message
        raise GenerationError(
            f"{self.settings.max_answers} answers of the generator were of no use: {complaint}. {_quote(text)}. "
            "Say it in other words, or take another model"
        )

    async def write_many(
        self,
        count: int,
        ask: WriteMessages,
        read: Callable[[str], Sequence[T]],
        text_of: Callable[[T], str],
        response_format: Mapping[str, Any],
        known: Sequence[str] = (),
    ) -> list[T]:
        """Exactly `count` items whose texts differ from each other and from those of `known`.

        They are asked for in parts. In place of duplicates and of what `read` cannot use others are asked for, with a
        list of those that exist.

        Raises:
            GenerationError: the model failed, or found nothing new several times in a row.
            BudgetError: the budget is spent.
        """
        found: list[T] = []
        in_vain, complaint = 0, None
        while len(found) < count:
            asked = min(count - len(found), PER_REQUEST)
            exist = [*known, *map(text_of, found)]
            text = await self._complete(ask(asked, known=exist, complaint=complaint), response_format)
            complaint = None
            try:
                written = read(text)
            except GenerationError as error:
                written, complaint = [], error.message
            new = [written[i] for i in without_twins(map(text_of, written), exist)][:asked]
            found += new
            in_vain = 0 if new else in_vain + 1
            if not new and complaint is None:
                complaint = "each of its scenarios existed already, or differed from one by a few words only"
            if in_vain == self.settings.max_answers:
                raise GenerationError(
                    f"the generator wrote {len(found)} of {count} scenarios; then {in_vain} answers brought nothing "
                    f"new: {complaint}. {_quote(text)}. Ask for fewer, tell it more, or take a stronger model"
                )
            logger.info("%d of %d scenarios", len(found), count)
        return found

    async def _complete(self, messages: Messages, response_format: Mapping[str, Any]) -> str:
        try:
            answer = await self._client.complete(messages, response_format)
        except BudgetError:
            raise
        except (JudgeError, ContextLengthError) as error:
            raise GenerationError(error.message) from error
        finally:  # a writer has no end that anybody would tell, and the next answer is seconds away
            await self._client.close()
            if self._own is not None:
                await self._own.close()
        return answer.text


def _key_for(base_url: str | None, api_key: str | None) -> str:
    at_openrouter = base_url == OPENROUTER_URL
    key = api_key or os.environ.get("OPENROUTER_API_KEY" if at_openrouter else "OPENAI_API_KEY")
    if at_openrouter and not key:
        raise ValueError(
            "OpenRouter wants a key: set OPENROUTER_API_KEY or pass `generator_api_key`; or pass "
            "`generator_base_url` of another OpenAI-compatible server, or None to go through litellm"
        )
    return key or "none"


def _quote(text: str) -> str:
    """How an answer began, for people: what a model says when it refuses is not JSON, but it is the reason."""
    words = " ".join(text.split())
    return f"The last began: {words[:_MAX_QUOTED]!r}" if words else "The last was empty"
