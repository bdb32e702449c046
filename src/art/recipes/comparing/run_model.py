"""Runs the rollouts of one model that are not kept yet, a few at once, until all have ended or it is given up."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from art.errors import BudgetError, ConfigError
from art.model import Model
from art.recipes.comparing.metered_http import (
    Asking,
    CallSums,
    MeteredBlockingHttp,
    MeteredHttp,
    RateLimit,
    current_calls,
)
from art.recipes.comparing.scoring import KeptRollout, KeptRollouts, scored
from art.recipes.training_loop import headline_value
from art.storage.log_lines import clean, known_secrets
from art.task import Scenario, Task
from art.trajectory import History, Trajectory, cancel_and_wait, infra_fault, is_policy_fault, within

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


logger = logging.getLogger(__name__)

GIVE_UP_FIRST = 8
"""A model whose first rollouts all fail is given up after this number of them."""
GIVE_UP_LATER = 24
"""A model that has worked is given up after this number of failures in a row."""
_SHOWN = 300
"""Characters of an error that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The rollouts that every model of a comparison makes."""

    task: Task
    scenarios: Sequence[Scenario]
    names: Sequence[str]
    """Names of the scenarios, in the same order."""
    rollouts: int
    """Rollouts of each scenario."""
    timeout_s: float
    """Time limit of a rollout."""

    def places(self) -> list[tuple[str, int]]:
        """Return name and index of every rollout. The first rollouts of all scenarios come first."""
        return [(name, index) for index in range(self.rollouts) for name in self.names]


class ModelRun:
    """The rollouts of one model."""

    def __init__(
        self, plan: RolloutPlan, kept: KeptRollouts, *, is_metered: bool, on_rollout: Callable[[], None]
    ) -> None:
        """
        Args:
            is_metered: whether the requests of the model are counted.
            on_rollout: called after each rollout.
        """
        self._plan, self._kept = plan, kept
        self._is_metered, self._on_rollout = is_metered, on_rollout
        self._scenarios = dict(zip(plan.names, plan.scenarios, strict=True))
        self._in_a_row = 0
        self._has_worked = bool(scored(self.rows()))
        self.is_given_up = False

    def rows(self) -> list[KeptRollout]:
        """Return the rollouts that this and earlier runs have made."""
        return self._kept.of(self._plan.names, self._plan.rollouts)

    def left(self) -> list[tuple[str, int]]:
        """Return the rollouts that have no score yet."""
        done = scored(self.rows())
        return [place for place in self._plan.places() if place not in done]

    async def run(self, model: Model[Any, Any], slots: asyncio.Semaphore, concurrency: int) -> None:
        """Make the rollouts that are left, each once. Those that fail stay without a score until the next run.

        Args:
            slots: shared by the models of one address.
            concurrency: rollouts at once.
        """
        places = iter(self.left())

        async def work() -> None:
            for name, index in places:
                if self.is_given_up:
                    return
                async with slots:
                    row = await self._roll(model, name, index)
                await asyncio.to_thread(self._kept.add, row)
                self._judge(row)
                self._on_rollout()

        await together(work() for _ in range(concurrency))

    def _judge(self, row: KeptRollout) -> None:
        self._in_a_row = 0 if row.error is None else self._in_a_row + 1
        self._has_worked = self._has_worked or row.error is None
        self.is_given_up = self._in_a_row >= (GIVE_UP_LATER if self._has_worked else GIVE_UP_FIRST)

    async def _roll(self, model: Model[Any, Any], name: str, index: int) -> KeptRollout:
        """Make one rollout.

        Raises:
            ConfigError: the task is wrong, so no rollout would work.
        """
        task, scenario = self._plan.task, self._scenarios[name]
        calls = CallSums() if self._is_metered else None
        token = current_calls.set(calls)
        started_at, started = time.time(), time.perf_counter()
        error, trajectory = None, None
        try:
            with playing(model, scenario, index) as player:
                rollout = task.rollout(player or model, scenario, rollout_index=index)
                trajectory = await within(rollout, self._plan.timeout_s)
            if (fault := infra_fault(trajectory)) is not None:
                raise fault
            headline = headline_value(task, trajectory)
            if not (math.isfinite(headline) and math.isfinite(trajectory.reward)):
                raise ValueError(f"the task set {task.headline_metric} {headline} and the reward {trajectory.reward}")
        except (ConfigError, BudgetError):
            raise
        except Exception as failure:
            logger.debug("a rollout failed", exc_info=True)
            text = clean(
                f"{type(failure).__name__}: {' '.join(str(failure).split())}",
                known_secrets([model.inference_api_key or ""]),
            )
            error = text[:_SHOWN]
        finally:
            current_calls.reset(token)
        row = KeptRollout(
            scenario=name, index=index, started_at=started_at, seconds=time.perf_counter() - started, error=error,
            calls=calls,
        )  # fmt: skip
        if error is not None or trajectory is None:
            return row
        return row.model_copy(
            update={
                "reward": trajectory.reward, "headline": headline, "is_policy_fault": is_policy_fault(trajectory),
                "num_turns": _num_answers(trajectory), "trajectory": trajectory.for_logging(),
            }
        )  # fmt: skip


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once. The first error cancels the others and is raised after their end; so does Ctrl-C."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        raise


def _num_answers(trajectory: Trajectory) -> int:
    histories: list[History] = [trajectory, *trajectory.additional_histories]
    return sum(message["role"] == "assistant" for history in histories for message in history.messages())


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
