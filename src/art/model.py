"""`Model` and `TrainableModel`: a named policy, the client to talk to it, and its log.

    model = art.TrainableModel(name="agent-1", project="tic-tac-toe", base_model="Qwen/Qwen3-0.6B")
    await model.register(backend)
    client = model.openai_client()

A model owns no process. Its log (`history.jsonl`, trajectories, `state.json`) lies under `base_path`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextvars import Token
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from typing_extensions import TypeVar

from art.backend import Backend, OnNothing, Registration, TrainResult
from art.capture.clients import async_hooks, remember, sync_hooks
from art.client.arguments import check_groups, check_logged
from art.client.collector import RolloutCollector
from art.client.loops import PerLoop
from art.client.openai_client import (
    BlockingClients,
    check_address,
    load_openai,
    make_blocking_openai_client,
    make_openai_client,
)
from art.compat.metrics import MetricsBuilder
from art.config import ModelSettings, OptimizerConfig, TrainConfig, TrainSFTConfig
from art.costs import Ledger, Prices
from art.costs.meter import CostCalculator, PolicyMeter, close_row
from art.dev import (
    InternalModelConfig,
    in_older_names,
    optimizer_from_internal_config,
    settings_from_internal_config,
)
from art.errors import ArtError, ConfigError
from art.metrics.groups import (
    as_groups,
    check_metrics,
    check_split,
    count_groups,
    name_metrics,
    summarize_groups,
    take_costs,
)
from art.protocol.keys import check_api_key
from art.protocol.rollouts import Outcome, RolloutStatus, RolloutUpdate
from art.storage import state as state_file
from art.storage.history import append_row, means_by_step
from art.storage.layout import DataDir, ModelPaths, validate_name
from art.storage.totals import Totals
from art.storage.trajectories import append_groups
from art.trajectory import MetadataValue, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", default=Any)
StateT = TypeVar("StateT", default=dict[str, Any])


async def _close_openai(client: AsyncOpenAI) -> None:
    await client.close()


class Model(BaseModel, Generic[ConfigT, StateT]):
    """A model to prompt: an API of somebody else's, or the base of `TrainableModel`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_assignment=True)

    name: str
    project: str
    entity: str | None = None
    """Whose project it is, for sinks that know owners."""
    id: str | None = None
    config: ConfigT | None = None
    """Anything that the user's rollout wants to know."""
    inference_api_key: str | None = Field(default=None, repr=False)
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = ".art"
    """Root of the local log; a backend on this machine sets it to its own data directory."""
    report_metrics: list[str] | None = None
    prices: Prices = Prices()
    """Of its tokens and of the machine that it lives on."""
    budget_usd: float | None = None
    """What all that is booked in `costs` may come to; `model.costs.check()` raises from there on."""

    _ledgers: dict[Path, Ledger] = PrivateAttr(default_factory=dict)
    _totals: dict[Path, Totals] = PrivateAttr(default_factory=dict)
    _pending_metrics: dict[str, float] = PrivateAttr(default_factory=dict)
    """What metrics builders have for the next row."""
    _backend: Backend | None = PrivateAttr(default=None)
    _server_url: str | None = PrivateAttr(default=None)
    _openai: PerLoop[Any] = PrivateAttr(default_factory=lambda: PerLoop(_close_openai))
    _blocking_openai: BlockingClients = PrivateAttr(default_factory=BlockingClients)

    @property
    def trainable(self) -> bool:
        return False

    @field_validator("name", "project")
    @classmethod
    def _safe_name(cls, value: str, info: Any) -> str:
        return validate_name(value, param=info.field_name)

    @field_validator("report_metrics")
    @classmethod
    def _known_sinks(cls, value: list[str] | None) -> list[str] | None:
        if value:
            raise ConfigError(
                f"report_metrics={value!r}: no sink of this name exists. Metrics are always written to history.jsonl; "
                "pass [] or nothing"
            )
        return value

    # --- registration and inference ---

    def backend(self) -> Backend:
        if self._backend is None:
            raise ConfigError(f"model {self.name!r} has no backend yet: call `await model.register(backend)` first")
        return self._backend

    async def register(self, backend: Backend) -> None:
        """Tie the model to a backend; a trainable one is served from then on."""
        registration, _ = await asyncio.gather(backend.register(self), asyncio.to_thread(load_openai))
        self._backend = backend
        if backend.data_dir is not None:
            self.base_path = str(backend.data_dir)
        if self.prices.device_usd_per_hour is None:
            self.prices = self.prices.model_copy(update={"device_usd_per_hour": backend.device_usd_per_hour})
        if registration is not None:
            self._adopt(registration)
        backend.close_with(self, self.close)

    def _adopt(self, registration: Registration) -> None:
        self._server_url = registration.server_url
        self.inference_base_url = f"{registration.server_url}/projects/{self.project}/v1"
        self.inference_api_key = registration.api_key
        self.inference_model_name = registration.status.inference_name

    async def close(self) -> None:
        """Close the OpenAI client of this event loop, and the one of code that blocks."""
        self._blocking_openai.close()
        await self._openai.close()

    def openai_client(self) -> AsyncOpenAI:
        """An `AsyncOpenAI` for this model: the same one for every call in an event loop.

        Outside of a running loop each call gives a new client, which the caller closes. Inside of `art.capture` what is
        said through it is recorded.

        Raises:
            ConfigError: the model is not registered, or has no address.
        """
        base_url, api_key = self._address()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return make_openai_client(base_url, api_key, async_hooks(self))
        # A copy shares these clients, and may have been renamed; a capture tells models apart by their names.
        key = base_url, api_key, self.project, self.name
        client = self._openai.get(lambda: make_openai_client(base_url, api_key, async_hooks(self)), key)
        return cast("AsyncOpenAI", client)

    def blocking_openai_client(self) -> OpenAI:
        """The same for code that blocks, such as graphs of LangGraph that are run by `invoke`: one for all threads.

        In the thread of an event loop it would hold up all other rollouts: run such code by `asyncio.to_thread`.
        """
        base_url, api_key = self._address()
        key = base_url, api_key, self.project, self.name
        return self._blocking_openai.get(lambda: make_blocking_openai_client(base_url, api_key, sync_hooks(self)), key)

    def _address(self) -> tuple[str, str]:
        """Base URL and key of its endpoint."""
        base_url, api_key = self.inference_base_url, self.inference_api_key
        if base_url is None or api_key is None:
            how = "call `await model.register(backend)` first" if self.trainable else (
                "pass `inference_base_url` and `inference_api_key`"
            )  # fmt: skip
            raise ConfigError(f"model {self.name!r} has no inference address yet: {how}")
        return check_address(base_url), check_api_key(api_key)

    def get_inference_name(self, step: int | None = None) -> str:
        """What to send as `model`.

        Args:
            step: of a trainable model, to stay on one checkpoint; by default the newest serves each request.
        """
        if step is not None:
            raise ConfigError(f"model {self.name!r} is not trainable and has no step {step}")
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Keyword arguments for `litellm.completion` and `litellm.acompletion`."""
        name = self.get_inference_name(step)
        return {
            "model": f"hosted_vllm/{name}" if self.trainable else name,
            "base_url": self.inference_base_url,
            "api_key": self.inference_api_key,
            "temperature": 1,
        }

    def rollout_base_url(self, rollout_id: str) -> str:
        """The base URL under which a rollout in any language is recorded as `rollout_id`; see `get_rollout`."""
        if self._server_url is None:
            raise ConfigError(f"model {self.name!r} is not registered: call `await model.register(backend)` first")
        rollout_id = validate_name(rollout_id, param="rollout_id")
        return f"{self._server_url}/projects/{self.project}/rollouts/{rollout_id}/v1"

    async def get_rollout(self, rollout_id: str) -> Trajectory:
        """What was said under `rollout_base_url(rollout_id)`, as a trajectory to reward and train on."""
        return await self.backend().get_rollout(rollout_id, project=self.project)

    async def get_step(self) -> int:
        return 0

    def default_optimizer(self) -> OptimizerConfig | None:
        return None

    # --- the local log ---

    def _paths(self) -> ModelPaths:
        return DataDir(Path(self.base_path)).model(self.project, self.name)

    @property
    def costs(self) -> Ledger:
        """What was spent on this model, in this run and in earlier ones; kept beside its history.

        Give it to judges as `JudgeSettings(budget=model.costs)`, after the model is registered: then it is known where.
        """
        path = self._paths().costs
        if path not in self._ledgers:  # a copy may have another name
            self._ledgers[path] = Ledger(path=path)
        self._ledgers[path].max_usd = self.budget_usd
        return self._ledgers[path]

    def metrics_builder(self, cost_context: str | None = None) -> MetricsBuilder:
        """Takes metrics and costs of the user's own for the next row of the history; all of them share one buffer.

        Args:
            cost_context: first part of the names of costs, `train` or `eval`; by default `train`.
        """
        return MetricsBuilder(cost_context or "train", lambda: self.costs, self._pending_metrics)

    def activate_metrics_context(self, cost_context: str) -> Token[MetricsBuilder | None]:
        """Let `art.metrics.track_api_cost` book with this model, until `token.var.reset(token)`."""
        return self.metrics_builder(cost_context).activate()

    async def book_costs(self, *, trainer_s: float = 0.0, split: str = "train") -> None:
        """Book the policy's tokens and the device time since the last time. `log` does so before it writes a row."""

    def read_state(self) -> StateT | None:
        """What was last saved by the methods below, `None` if nothing was."""
        return cast("StateT | None", state_file.read_state(self._paths().state))

    def overwrite_state(self, state: StateT) -> None:
        state_file.overwrite_state(self._paths().state, cast(dict[str, Any], state))

    def merge_state(self, state: StateT) -> StateT:
        """Save `state` over what is there, key by key, and return the result."""
        return cast(StateT, state_file.merge_state(self._paths().state, cast(dict[str, Any], state)))

    def write_state(self, state: StateT) -> None:
        """The older name of `overwrite_state`."""
        self.overwrite_state(state)

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Append one row to the history, and the trajectories to the file of their split and step.

        Args:
            trajectories: groups, or loose trajectories and exceptions, which become one group.
            split: prefix of the metrics: `val/reward`. Any name for a file will do, but not one of the metrics' own
                sections, such as `costs`.
            metrics: further numbers for the row; they win over computed ones of the same name. `costs/...` are USD that
                go into `costs`, like those of trajectories and groups. Of `time/step_x` and `data/step_x` the row also
                gets the sum over all rows, `time/cum/x` and `data/cum/x`.
            step: by default the current one.

        Raises:
            InvalidRequestError: `split` is no such name.
            TrajectoryError: these are no trajectories, or a reward or metric is not a number; nothing is logged.
        """
        check_split(split)
        groups = as_groups(() if trajectories is None else check_logged(trajectories))
        metrics = check_metrics(metrics or {})
        step = await self.get_step() if step is None else step
        summary, reported = take_costs(summarize_groups(groups))
        metrics = await self.metrics_builder().flush() | dict(metrics)
        await self.book_costs(trainer_s=metrics.get("time/step_trainer_s", 0.0), split=split)
        metrics, also_reported = take_costs(metrics)
        costs = await asyncio.to_thread(close_row, self.costs, reported | also_reported, split, step)
        row = name_metrics(summary, split) | costs
        if groups and split == "train":
            row |= count_groups(groups)
        row |= name_metrics(metrics, split)
        paths = self._paths()
        totals = self._totals.setdefault(paths.history, Totals(paths.history))
        await asyncio.to_thread(_write_log, paths, totals, groups, split, row, step)
        if self.trainable and self._backend is not None:  # the server keeps the best checkpoint, and so has to know it
            await self._backend._log_metrics(self, step, row)


class TrainableModel(Model[ConfigT, StateT], Generic[ConfigT, StateT]):
    """A model that learns: a base model and, per step, an adapter."""

    base_model: str
    """Hub id or local path; a path is one on the server's machine."""
    settings: ModelSettings | None = None
    """Of adapter, engine, trainer and rendering. They are fixed at the first registration."""
    run_id: str | None = None

    _internal_config: InternalModelConfig | None = PrivateAttr(default=None)
    """The older way to give settings, see `art.dev`."""
    _registered_as: tuple[str, str] | None = PrivateAttr(default=None)
    _collector: RolloutCollector | None = PrivateAttr(default=None)
    _meter: PolicyMeter = PrivateAttr(default_factory=PolicyMeter)

    def __init__(self, *, _internal_config: InternalModelConfig | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        self._internal_config = _internal_config

    @property
    def trainable(self) -> bool:
        return True

    def model_settings(self) -> ModelSettings:
        """The settings to register with.

        Raises:
            ConfigError: they are given twice, or the older form asks for something that cannot be honoured.
        """
        if self.settings is not None and self._internal_config:
            raise ConfigError(f"model {self.name!r} has both `settings` and `_internal_config`: keep one")
        return self.settings or settings_from_internal_config(self._internal_config)

    def default_optimizer(self) -> OptimizerConfig | None:
        """What `trainer_args` of older code say of the optimiser; holds where a step's own settings do not."""
        return optimizer_from_internal_config(self._internal_config)

    async def register(self, backend: Backend) -> None:
        """Tie the model to a backend, which serves it from then on."""
        started = time.monotonic()
        try:
            await super().register(backend)
        except ArtError as error:
            raise in_older_names(error, self._internal_config) from error.__cause__
        self._meter.start(started)

    def _adopt(self, registration: Registration) -> None:
        super()._adopt(registration)
        self._collector = None
        self._registered_as = (self.project, self.name)
        remember(self)

    def get_inference_name(self, step: int | None = None) -> str:
        # A copy may have been renamed since: then the name that the server gave is not its own.
        known = self.inference_model_name if self._registered_as == (self.project, self.name) else None
        name = known or f"{self.project}/{self.name}"
        return name if step is None else f"{name}@{step}"

    async def get_step(self) -> int:
        """The newest published step."""
        return await self.backend()._get_step(self)

    @property
    def cost_calculator(self) -> CostCalculator | None:
        return self._meter.calculator

    def set_cost_calculator(self, calculator: CostCalculator | None) -> None:
        """Price the policy's tokens by a function of prompt tokens, completion tokens and `train` or `eval`.

        It gives USD by name, and takes the place of `prices.policy`.
        """
        self._meter.calculator = calculator

    async def book_costs(self, *, trainer_s: float = 0.0, split: str = "train") -> None:
        """Book the policy's tokens and the device time since the last time. `log` does so before it writes a row.

        Args:
            trainer_s: what of that time the trainer worked; the rest are rollouts, their rewards, and waiting.
            split: of what was sampled.
        """
        if self._backend is None or not self._meter.is_running:
            return
        counters = await self._backend._token_counts(self)
        passed_s, book = self._meter.lap(), self._meter.book
        await asyncio.to_thread(
            book, self.costs, self.prices, counters, passed_s=passed_s, trainer_s=trainer_s, split=split
        )

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        on_nothing: OnNothing = "skip",
    ) -> TrainResult:
        """Train one step and log groups and metrics under `train`; see `Backend.train` for the errors.

        Args:
            _config: options of older code, one by one.
            on_nothing: "skip" returns a result with `trained=False` when no group can be learnt from; "raise" raises
                NothingTrainableError then.
        """
        groups = check_groups(trajectory_groups)
        options = {"verbose": verbose, "on_nothing": on_nothing, **(_config or {})}
        result = await self.backend().train(self, groups, config=config, **options)
        await self.log(groups, split="train", metrics=result.metrics, step=result.step)
        return result

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> TrainResult:
        """Fine-tune on the assistant messages of `trajectories` and log the metrics under `train`.

        Args:
            _config: of older code, which has no options in it.

        Raises:
            ConfigError: `_config` holds an option.
        """
        if _config:
            raise ConfigError(
                f"train_sft has no options in `_config`, got {dict(_config)}; use art.TrainSFTConfig(...)"
            )
        result = await self.backend().train_sft(self, trajectories, config, verbose=verbose)
        await self.log(split="train", metrics=result.metrics, step=result.step)
        return result

    async def put_rollout(
        self,
        rollout_id: str,
        *,
        group_id: str | None = None,
        scenario_id: str | None = None,
        reward: float | None = None,
        outcome: Outcome | None = None,
        error: str | None = None,
        metrics: dict[str, float] | None = None,
        metadata: dict[str, MetadataValue] | None = None,
    ) -> RolloutStatus:
        """Announce or finish a rollout of another program, as it can itself with `PUT /api/rollouts/{rollout_id}`.

        Once announced, requests under its base URL that name a model nobody has registered are answered by this one.

        Args:
            group_id: the same for the rollouts of one group, and for no others.
            outcome: finishes it; `ok` if only a reward is given.
            error: what went wrong outside of the policy, with outcome `infra_fault`.

        Raises:
            ConflictError: it is finished, and this would change it.
        """
        update = RolloutUpdate(
            project=self.project, model=f"{self.project}/{self.name}", group_id=group_id, scenario_id=scenario_id,
            reward=reward, outcome=outcome, error=error, metrics=metrics, metadata=metadata,
        )  # fmt: skip
        return await self.backend().put_rollout(rollout_id, update)

    async def collect_trajectory_groups(
        self,
        num_groups: int,
        rollouts_per_group: int,
        *,
        timeout_s: float | None = None,
        pbar_desc: str | None = "collect",
    ) -> list[TrajectoryGroup]:
        """Wait until other programs have finished so many groups of rollouts, and take them, each once.

        After a restart those come again that no training job has taken in.

        Raises:
            ProcessError: `timeout_s` seconds have passed; says what is missing.
        """
        if self._collector is None:
            self._collector = self.backend().rollout_collector(self)
        return await self._collector.collect(num_groups, rollouts_per_group, timeout_s=timeout_s, pbar_desc=pbar_desc)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints but the newest and the best, the one with the highest mean of the metric.

        While the history cannot be read as a whole nothing is deleted: the best could be in the missing part.
        """
        path = self._paths().history
        means, num_unreadable = await asyncio.to_thread(means_by_step, path, best_checkpoint_metric)
        if num_unreadable:
            why = "lines are damaged, so the best checkpoint is not known. Remove those lines"
            logger.warning("no checkpoint is deleted: %d %s from %s", num_unreadable, why, path)
            return
        keep = {await self.get_step()}
        if means:
            keep.add(max(means, key=lambda step: (means[step], step)))
        else:
            logger.info("%s was never logged: only the newest checkpoint is kept", best_checkpoint_metric)
        deleted = await self.backend()._delete_checkpoint_files(self, sorted(keep), best_checkpoint_metric)
        logger.info("kept checkpoints %s, deleted %s", sorted(keep), deleted)


def _write_log(
    paths: ModelPaths, totals: Totals, groups: list[TrajectoryGroup], split: str, row: dict[str, float], step: int
) -> None:
    if groups:
        append_groups(paths.trajectories(split, step), groups)
    with totals.lock:
        append_row(paths.history, totals.of(row) | row, step=step)
