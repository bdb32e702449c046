"""`AskedModel`: the model that a task's rollouts are given in a comparison. Its clients measure every request."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from art.model import Model
from art.recipes.comparing.metered_http import Asking, MeteredBlockingHttp, MeteredHttp, RateLimit
from art.task import Scenario

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_CONNECT_S = 10.0


class AskedModel(Model[Any, Any]):
    """A model at an address, asked as a comparison says."""

    _asking: Asking = PrivateAttr()
    _limit: RateLimit = PrivateAttr()
    _client: AsyncOpenAI | None = PrivateAttr(default=None)
    _blocking: OpenAI | None = PrivateAttr(default=None)

    def __init__(self, asking: Asking, limit: RateLimit, **fields: Any) -> None:
        super().__init__(**fields)
        self._asking, self._limit = asking, limit

    def openai_client(self) -> AsyncOpenAI:
        """Return the client. It is for the event loop of the comparison, which makes and closes the model."""
        import openai

        if self._client is None:
            options = self._options()
            http = MeteredHttp(self._asking, self._limit, timeout=options["timeout"])
            self._client = openai.AsyncOpenAI(**options, http_client=http)
        return self._client

    def blocking_openai_client(self) -> OpenAI:
        """Return the client for code that blocks."""
        import openai

        if self._blocking is None:
            options = self._options()
            http = MeteredBlockingHttp(self._asking, self._limit, timeout=options["timeout"])
            self._blocking = openai.OpenAI(**options, http_client=http)
        return self._blocking

    def _options(self) -> dict[str, Any]:
        import openai

        endpoint = self._endpoint()
        return {
            "base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": self._asking.attempts - 1,
            "timeout": openai.Timeout(self._asking.timeout_s, connect=min(_CONNECT_S, self._asking.timeout_s)),
        }  # fmt: skip

    async def close(self) -> None:
        """Close the clients."""
        if self._blocking is not None:
            self._blocking.close()
        if self._client is not None:
            await self._client.close()


def playing(model: Model[Any, Any], scenario: Scenario, index: int) -> AbstractContextManager[Any]:
    """Return the context of one rollout. A scripted player is told there which scenario it plays."""
    tell = getattr(model, "playing", None)
    context: AbstractContextManager[Any] = nullcontext() if tell is None else tell(scenario, index)
    return context
