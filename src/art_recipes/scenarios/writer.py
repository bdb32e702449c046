"""Has a language model write texts. Answers are checked; after a bad one it is asked again, and told what was wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from art.errors import BudgetError, ContextLengthError, GenerationError, JudgeError
from art.model import Model
from art.rewards.judge import JudgeSettings
from art.rewards.judge_client import JudgeClient
from art_recipes.scenarios.written import without_twins

logger = logging.getLogger(__name__)

T = TypeVar("T")
Messages = list[dict[str, Any]]
WriteMessages = Callable[[int, Sequence[str], str | None], Messages]
"""A function that writes a request, from the number of texts to ask for, the texts that exist already, and what was
wrong with the last answer."""

OPENROUTER_URL = "https://openrouter.ai/api/v1"
PER_REQUEST = 25
"""Texts per request. With more, models repeat themselves, and answers are cut short."""
MAX_COMPLETION_TOKENS = 8000
"""Most tokens of an answer. A scenario has about 60."""
_MAX_QUOTED = 200


class Writer:
    """A language model that writes texts, e.g. scenarios. Costs are booked as `generator` in the settings' budget."""

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
            model: an `art.Model`, the name of a model at `base_url`, or without `base_url` a model as litellm names it.
            base_url: address of an OpenAI-compatible server.
            api_key: by default `OPENROUTER_API_KEY` for OpenRouter, and `OPENAI_API_KEY` for other addresses.
            extra_litellm_params: more arguments of each request: `temperature`, ...
            settings: time-outs, attempts, prices and budget.

        Raises:
            ValueError: there is no key for OpenRouter.
        """
        self.settings = settings or JudgeSettings()
        self._own: Model[Any, Any] | None = None
        """Model that was made here, from a name and an address."""
        params = {"max_completion_tokens": MAX_COMPLETION_TOKENS, **(extra_litellm_params or {})}
        if isinstance(model, str) and base_url is None:
            params |= {"api_key": api_key} if api_key else {}
        elif isinstance(model, str):
            at_openrouter = base_url == OPENROUTER_URL
            key = api_key or os.environ.get("OPENROUTER_API_KEY" if at_openrouter else "OPENAI_API_KEY")
            if at_openrouter and not key:
                raise ValueError(
                    "OpenRouter wants a key: set OPENROUTER_API_KEY or pass `generator_api_key`; or pass "
                    "`generator_base_url` of another OpenAI-compatible server, or None to go through litellm"
                )
            # A `Model` sends the name unchanged. litellm would interpret the provider in OpenRouter's names.
            model = self._own = Model(
                name="generator", project="generator", inference_model_name=model,
                inference_base_url=base_url, inference_api_key=key or "none",
            )  # fmt: skip
        self._client = JudgeClient(model, params, self.settings, source="generator")

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._client.name

    async def write(
        self, ask: Callable[[str | None], Messages], read: Callable[[str], T], response_format: Mapping[str, Any]
    ) -> T:
        """Ask the model for an answer until `read` accepts one, and return what that reads.

        Args:
            ask: writes the messages, from what was wrong with the last answer.
            read: reads an answer; raises `GenerationError` if it cannot be used.

        Raises:
            GenerationError: the model failed, or no answer could be used.
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
            f"none of {self.settings.max_answers} answers of the generator could be used: {complaint}. {_quote(text)}. "
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
        """Have the model write exactly `count` items whose texts differ from each other and from `known`.

        Each request asks for a part of them. Duplicates and unusable items are replaced by new requests, which list the
        texts that exist.

        Raises:
            GenerationError: the model failed, or wrote nothing new several times in a row.
            BudgetError: the budget is spent.
        """
        items: list[T] = []
        num_useless, complaint = 0, None
        while len(items) < count:
            asked = min(count - len(items), PER_REQUEST)
            exist = [*known, *map(text_of, items)]
            text = await self._complete(ask(asked, exist, complaint), response_format)
            complaint = None
            try:
                written = read(text)
            except GenerationError as error:
                written, complaint = [], error.message
            new = [written[i] for i in without_twins(map(text_of, written), exist)][:asked]
            items += new
            num_useless = 0 if new else num_useless + 1
            if not new and complaint is None:
                complaint = "each of its scenarios existed already, or differed from one by a few words only"
            if num_useless == self.settings.max_answers:
                raise GenerationError(
                    f"the generator wrote {len(items)} of {count} scenarios; then {num_useless} answers brought "
                    f"nothing new: {complaint}. {_quote(text)}. Ask for fewer, tell it more, or take a stronger model"
                )
            logger.info("%d of %d scenarios", len(items), count)
        return items

    async def _complete(self, messages: Messages, response_format: Mapping[str, Any]) -> str:
        try:
            answer = await self._client.complete(messages, response_format)
        except BudgetError:
            raise
        except (JudgeError, ContextLengthError) as error:
            raise GenerationError(error.message) from error
        finally:  # nobody closes a writer, and the next answer takes seconds anyway
            await self._client.close()
            if self._own is not None:
                await self._own.close()
        return answer.text


def _quote(text: str) -> str:
    """The beginning of an answer, for people: a refusal is not JSON, but it says the reason."""
    words = " ".join(text.split())
    return f"The last began: {words[:_MAX_QUOTED]!r}" if words else "The last was empty"
