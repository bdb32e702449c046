"""Runs the rollouts of one model that are not kept yet, a few at once, until all have ended or it is given up."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import openai
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from art.costs import Prices, TokenPrice
from art.errors import BudgetError, ConfigError
from art.metrics.scores import score_difference, score_scenarios
from art.model import Model
from art.storage.jsonl import append_lines, read_lines
from art.storage.logs import clean, known_secrets
from art.task import Scenario, Task
from art.trajectory import History, cancel_and_wait, infra_fault, is_policy_fault, within
from art_recipes.comparing.compared_models import CompareConfig
from art_recipes.comparing.metered_http import (
    Asking,
    CallSums,
    MeteredBlockingHttp,
    MeteredHttp,
    count_calls,
    current_calls,
)
from art_recipes.comparing.model_comparison import ModelRow, Quantiles
from art_recipes.training.training_loop import headline_value


def by_scenario(rows: Sequence[KeptRollout], field: str) -> dict[str, list[float]]:
    """Return a value of the scored rollouts (`headline` or `reward`) by scenario, in the order of their indices."""
    values: dict[str, list[float]] = {}
    for _, row in sorted(scored(rows).items()):
        values.setdefault(row.scenario, []).append(float(getattr(row, field)))
    return values


def measure(row: ModelRow, rows: Sequence[KeptRollout], num_planned: int) -> ModelRow:
    """Return a model's row with what its rollouts say, without differences and costs.

    Args:
        num_planned: number of rollouts that every model should have.
    """
    good = list(scored(rows).values())
    tried = {one.place for one in rows}
    errors = [one for one in rows if one.error is not None and one.place not in scored(rows)]
    update: dict[str, Any] = {
        "num_rollouts": len(good), "num_failed_rollouts": len(tried) - len(good),
        "num_rollouts_left": num_planned - len(tried), "problem": errors[-1].error if errors else row.problem,
    }  # fmt: skip
    calls = [one.calls for one in rows if one.calls is not None]
    update["calls"] = count_calls(calls) if calls else None
    if good:
        sums = [one.calls for one in good if one.calls is not None]
        seconds = [second for one in sums for second in one.answer_seconds]
        is_reported = bool(seconds) and not any(one.num_without_usage for one in sums)
        update |= {
            "headline": score_scenarios(list(by_scenario(rows, "headline").values())),
            "reward": score_scenarios(list(by_scenario(rows, "reward").values())),
            "policy_fault_rate": statistics.fmean(one.is_policy_fault for one in good),
            "turns": statistics.fmean(one.num_turns for one in good),
            "rollout_latency_s": quantiles([one.seconds for one in good]),
            "turn_latency_s": quantiles(seconds) if seconds else None,
            "prompt_tokens": sum(one.prompt_tokens for one in sums) / len(good) if is_reported else None,
            "completion_tokens": sum(one.completion_tokens for one in sums) / len(good) if is_reported else None,
        }
    return row.model_copy(update=update)


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return median and 95th percentile: the smallest value that 95 % of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-95 * len(ordered) // 100)  # rounded up
    return Quantiles(median=statistics.median(ordered), p95=ordered[rank - 1])


def price_rollouts(
    rows: Sequence[KeptRollout], price: TokenPrice | None, machine: Prices | None
) -> tuple[float | None, str]:
    """Return USD for 1,000 scored rollouts, and where the price comes from or why there is none.

    What failed rollouts cost is part of it: it has to be paid to get the others.

    Args:
        price: the price that the user gave.
        machine: price of this machine, for a model that runs on it.
    """
    num_scored = len(scored(rows))
    calls = [one.calls for one in rows if one.calls is not None]
    if not num_scored:
        return None, "no rollout has a score"
    num_answers = sum(one.num_answers for one in calls)
    if price is None and num_answers and sum(one.num_charged for one in calls) == num_answers:
        return 1000 * sum(one.charged_usd for one in calls) / num_scored, "the provider's own statement"
    if price is None and machine is not None and (usd := machine.device_usd(_busy_s(rows))) is not None:
        return 1000 * usd / num_scored, "the price of this machine for the time of the rollouts"
    if price is None:
        return None, "no price"
    if (missing := sum(one.num_without_usage for one in calls)) or not num_answers:
        return None, f"no tokens reported for {missing} of {num_answers} answers"
    usd = price.usd(
        prompt_tokens=sum(one.prompt_tokens for one in calls), cached_tokens=sum(one.cached_tokens for one in calls),
        completion_tokens=sum(one.completion_tokens for one in calls),
    )  # fmt: skip
    return 1000 * usd / num_scored, "the price that was given"


def _busy_s(rows: Sequence[KeptRollout]) -> float:
    """Seconds in which at least one of the rollouts ran."""
    # Counted from the first start: added to a Unix time, seconds would be rounded to 0.24 microseconds.
    first = min((one.started_at for one in rows), default=0.0)
    total = end = 0.0
    for start, stop in sorted((one.started_at - first, one.started_at - first + one.seconds) for one in rows):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def compare_with(row: ModelRow, rows: Sequence[KeptRollout], reference: Sequence[KeptRollout]) -> ModelRow:
    """Return a model's row with its difference to the reference, on the scenarios and rollouts that both have."""
    common = scored(rows).keys() & scored(reference).keys()
    if not common:
        return row
    mine, theirs = ([one for one in side if one.place in common] for side in (rows, reference))
    values, against = by_scenario(mine, "headline"), by_scenario(theirs, "headline")
    scenarios = sorted(values)
    difference = score_difference([against[one] for one in scenarios], [values[one] for one in scenarios])
    return row.model_copy(update={"difference": difference})


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class KeptRollout(BaseModel):
    """One rollout as it is kept: its score or its error, its requests and its conversation."""

    model_config = ConfigDict(extra="forbid")

    scenario: str
    """Id of the scenario, and a hash of its content and of the task's code."""
    index: int
    """Number of the rollout among those of its scenario."""
    started_at: float
    """Seconds since the epoch."""
    seconds: float
    error: str | None = None
    """Why there is no score; `None` if there is one."""
    reward: float | None = None
    headline: float | None = None
    is_policy_fault: bool = False
    num_turns: int = 0
    """Answers of the model in the rollout."""
    calls: CallSums | None = None
    """`None` for a model whose requests do not go over HTTP."""
    trajectory: dict[str, Any] = Field(default_factory=dict)
    """The rollout, as the log of a training has it."""

    @property
    def place(self) -> tuple[str, int]:
        return self.scenario, self.index


def scored(rows: Iterable[KeptRollout]) -> dict[tuple[str, int], KeptRollout]:
    """Return the rollouts that have a score, by scenario and index."""
    return {row.place: row for row in rows if row.error is None}


def file_of(folder: Path, label: str, identity: str) -> Path:
    """Return the file of a model's rollouts. A model that is asked in another way has another file."""
    digest = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
    return folder / "rollouts" / f"{_NOT_IN_NAMES.sub('-', label)[:60].strip('-.')}-{digest}.jsonl"


def scenario_names(task: Task, scenarios: Iterable[Scenario]) -> list[str]:
    """Name scenarios by their id and a hash of their content, and of the file that has the task's code.

    A rollout that was made with other rules or another reward is therefore not taken for one of these.
    """
    try:
        path = Path(inspect.getfile(type(task)))
        is_folder = (path.parent / "__init__.py").is_file() and path.stem.endswith("task")
        files = sorted(path.parent.glob("*.py")) if is_folder else [path]
        code = "".join(file.read_text(encoding="utf-8") for file in files)
    except (TypeError, OSError):  # a class of a notebook or of an interactive session
        code = type(task).__qualname__

    def digest(scenario: Scenario) -> str:
        return hashlib.blake2b(f"{code}{scenario.model_dump_json()}".encode(), digest_size=6).hexdigest()

    return [f"{scenario.id}#{digest(scenario)}" for scenario in scenarios]


logger = logging.getLogger(__name__)

GIVE_UP_FIRST = 8
"""A model whose first rollouts all fail is given up after this number of them."""
GIVE_UP_LATER = 24
"""A model that has worked is given up after this number of failures in a row."""
_SHOWN = 300
"""Characters of an error that is kept."""


class ModelRun:
    """The rollouts of one model, and the file in a comparison's folder that keeps them."""

    def __init__(
        self,
        task: Task,
        scenarios: Mapping[str, Scenario],
        config: CompareConfig,
        path: Path,
        *,
        is_metered: bool,
        on_rollout: Callable[[], None],
    ) -> None:
        """
        Args:
            scenarios: by the names that `scenario_names` gives them.
            path: the file.
            is_metered: whether the requests of the model are counted.
            on_rollout: called after each rollout.
        """
        self._task, self._scenarios, self._config, self._path = task, scenarios, config, path
        self._kept: list[KeptRollout] = []
        for _, content in read_lines(path):
            with suppress(ValidationError):  # a line of another version of ART
                self._kept += [] if content is None else [KeptRollout.model_validate_json(json.dumps(content))]
        self._is_metered, self._on_rollout = is_metered, on_rollout
        self._in_a_row = 0
        self._has_worked = bool(scored(self.rows()))
        self.is_given_up = False

    def rows(self) -> list[KeptRollout]:
        """Return the rollouts that this and earlier runs have made, failures included, as they ended."""
        rollouts = self._config.rollouts
        return [row for row in self._kept if row.scenario in self._scenarios and row.index < rollouts]

    def left(self) -> list[tuple[str, int]]:
        """Return the rollouts that have no score yet, by name and index. The first of all scenarios come first."""
        done, rollouts = scored(self.rows()), self._config.rollouts
        return [(name, i) for i in range(rollouts) for name in self._scenarios if (name, i) not in done]

    async def run(self, model: Model[Any, Any], slots: asyncio.Semaphore) -> None:
        """Make the rollouts that are left, each once. Those that fail stay without a score until the next run.

        Args:
            slots: shared by the models of one address.
        """
        places = iter(self.left())

        async def work() -> None:
            for name, index in places:
                if self.is_given_up:
                    return
                async with slots:
                    row = await self._roll(model, name, index)
                await asyncio.to_thread(append_lines, self._path, [row.model_dump(mode="json")])
                self._kept.append(row)
                self._in_a_row = 0 if row.error is None else self._in_a_row + 1
                self._has_worked = self._has_worked or row.error is None
                self.is_given_up = self._in_a_row >= (GIVE_UP_LATER if self._has_worked else GIVE_UP_FIRST)
                self._on_rollout()

        await together(work() for _ in range(self._config.concurrency))

    async def _roll(self, model: Model[Any, Any], name: str, index: int) -> KeptRollout:
        """Make one rollout.

        Raises:
            ConfigError: the task is wrong, so no rollout would work.
        """
        task, scenario = self._task, self._scenarios[name]
        calls = CallSums() if self._is_metered else None
        token = current_calls.set(calls)
        started_at, started = time.time(), time.perf_counter()
        error, trajectory = None, None
        try:
            with playing(model, scenario, index) as player:
                rollout = task.rollout(player or model, scenario, rollout_index=index)
                trajectory = await within(rollout, self._config.rollout_timeout)
            if (fault := infra_fault(trajectory)) is not None:
                raise fault
            if task.needs_judge:
                score: Any = task.score_messages(trajectory.messages())
                trajectory.reward = float(score[0] if isinstance(score, tuple) else score)
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
        histories: list[History] = [trajectory, *trajectory.additional_histories]
        answers = [m for history in histories for m in history.messages() if m["role"] == "assistant"]
        return row.model_copy(
            update={
                "reward": trajectory.reward, "headline": headline, "is_policy_fault": is_policy_fault(trajectory),
                "num_turns": len(answers), "trajectory": trajectory.for_logging(),
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


_CONNECT_S = 10.0


class MeteredModel(Model[Any, Any]):
    """A model at an address, asked as a comparison says. Its clients are for the event loop of the comparison."""

    _client: openai.AsyncOpenAI = PrivateAttr()
    _blocking: openai.OpenAI = PrivateAttr()

    def __init__(self, asking: Asking, **fields: Any) -> None:
        super().__init__(**fields)
        address = self._address()
        timeout = openai.Timeout(asking.timeout_s, connect=min(_CONNECT_S, asking.timeout_s))
        options: dict[str, Any] = {
            "base_url": address.base_url, "api_key": address.api_key, "max_retries": asking.attempts - 1,
            "timeout": timeout,
        }  # fmt: skip
        self._client = openai.AsyncOpenAI(**options, http_client=MeteredHttp(asking, timeout=timeout))
        self._blocking = openai.OpenAI(**options, http_client=MeteredBlockingHttp(asking, timeout=timeout))

    def openai_client(self) -> openai.AsyncOpenAI:
        return self._client

    def blocking_openai_client(self) -> openai.OpenAI:
        return self._blocking

    async def close(self) -> None:
        """Close the clients."""
        self._blocking.close()
        await self._client.close()


def playing(model: Model[Any, Any], scenario: Scenario, index: int) -> AbstractContextManager[Any]:
    """Return the context of one rollout. A scripted player is told there which scenario it plays."""
    tell = getattr(model, "playing", None)
    context: AbstractContextManager[Any] = nullcontext() if tell is None else tell(scenario, index)
    return context
