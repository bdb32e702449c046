"""`Model`: a named model, the clients to talk to it, and its log."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Token
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator
from typing_extensions import TypeVar

from art.capture import current_capture, hooks_of
from art.client.arguments import check_logged
from art.client.connections import ModelAddress, ModelClients, check_address, load_openai
from art.client.http import Hooks
from art.config import OptimizerConfig
from art.costs import Ledger, Prices
from art.errors import ConfigError
from art.plugins import find_older, load_plugin
from art.storage import history
from art.storage.layout import DataDir, ModelPaths, validate_name
from art.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from art.backend import Backend, ModelRegistration
    from art.metrics.delivery import Reporting
    from art.model.run_log import RunLog
    from art.protocol.checkpoint_calls import LogRequest


ConfigT = TypeVar("ConfigT", default=Any)
StateT = TypeVar("StateT", default=dict[str, Any])
ReportMetrics = Sequence[str | Callable[[], Any]] | None


class ModelSinks:
    """Sinks by folder of the log: a copy of a model may be renamed, and then has a log and sinks of its own.

    They are started at `register` or at the first `log`, and closed by `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_folder: dict[Path, Reporting | None] = {}

    def __deepcopy__(self, memo: Any) -> ModelSinks:
        return self  # copies of a model write to the same log

    async def start(
        self, paths: ModelPaths, report_metrics: ReportMetrics, config: Callable[[], dict[str, Any]]
    ) -> Reporting | None:
        """Start the sinks that feed on a log, unless they run; `None` if the model has none.

        Raises:
            Exception: a tracker cannot start.
        """

        def start_once() -> None:
            from art.metrics.delivery import Reporting, choose_sinks

            with self._lock:
                if paths.root in self._by_folder:
                    return
                reporting = None
                if choices := choose_sinks(report_metrics):
                    reporting = Reporting(paths, config(), choices)
                self._by_folder[paths.root] = reporting

        if paths.root not in self._by_folder:
            await asyncio.to_thread(start_once)
        return self._by_folder.get(paths.root)

    def running(self, paths: ModelPaths) -> Reporting | None:
        """Return what reports a log, if it was started."""
        return self._by_folder.get(paths.root)

    async def close(self) -> None:
        """Deliver what is left and close the sinks."""

        def close_all() -> None:
            with self._lock:
                running = [reporting for reporting in self._by_folder.values() if reporting is not None]
                self._by_folder.clear()
                for reporting in running:
                    reporting.close()

        if self._by_folder:
            await asyncio.to_thread(close_all)


_NOT_PICKLED = frozenset({"_run_log", "_sinks", "_clients", "_by_loop", "_collector", "_meter"})
"""Private attributes that an unpickled model has of its own: its log, trackers, clients and counters."""
PART_BYTES = 4 * 2**20
"""Size of the groups in one request. A larger group is sent alone."""


def log_requests(split: str, step: int, row: dict[str, Any], groups: Sequence[TrajectoryGroup]) -> list[LogRequest]:
    """Make the requests that send a row of the history with its groups. Without groups there is one.

    Args:
        row: the row as it was written.
    """
    from art.protocol.checkpoint_calls import LogRequest

    parts: list[list[dict[str, Any]]] = [[]]
    size = 0
    for group in groups:
        dumped = group.model_dump(mode="json")
        length = len(json.dumps(dumped))
        if parts[-1] and size + length > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(dumped)
        size += length
    return [LogRequest(split=split, step=step, row=row, groups=part) for part in parts]


class Model(BaseModel, Generic[ConfigT, StateT]):
    """A named model that can be prompted, for example by another provider's API. `TrainableModel` extends it."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_assignment=True)

    name: str
    """Name within the project; also the name of its folder."""
    project: str
    """Name of the project; models of different projects are independent."""
    config: ConfigT | None = None
    """Anything that the user's rollouts need."""
    inference_api_key: str | None = Field(default=None, repr=False)
    """API key of the endpoint; set by `register` for a trainable model."""
    inference_base_url: str | None = None
    """Address of the endpoint, like `http://host:8000/v1`; set by `register` for a trainable model."""
    inference_model_name: str | None = None
    """Name to send as `model`; by default `name`."""
    base_path: str = ".art"
    """Root folder of the local log. A backend on this machine sets it to its own data directory."""
    prices: Prices = Prices()
    """Prices of tokens and devices, for the ledger in `costs`."""
    budget_usd: float | None = None
    """Limit in USD of everything that is booked in `costs`; above it `model.costs.check()` raises."""
    report_metrics: list[str | Callable[[], Any]] | None = None
    """Trackers that get metrics, and rollouts if they show traces: names such as `"wandb"`, or subclasses of
    `art.sinks.Sink`. `None`: those that the environment names, e.g. by `WANDB_API_KEY`; `[]`: none."""

    _run_log: RunLog = PrivateAttr(default_factory=lambda: importlib.import_module("art.model.run_log").RunLog())
    _sinks: ModelSinks = PrivateAttr(default_factory=ModelSinks)
    _clients: ModelClients = PrivateAttr(default_factory=ModelClients)
    _backend: Backend | None = PrivateAttr(default=None)
    _server_url: str | None = PrivateAttr(default=None)
    _asks_logprobs: bool = PrivateAttr(default=False)
    _recorded: dict[str, Any] = PrivateAttr(default_factory=dict)
    """What `record_settings` was given."""

    @property
    def trainable(self) -> bool:
        return False

    def __getstate__(self) -> dict[Any, Any]:
        """Return what a rollout in another process needs: the settings, and how to reach the server."""
        state = super().__getstate__()
        private = {name: value for name, value in (self.__pydantic_private__ or {}).items() if name not in _NOT_PICKLED}
        if self._backend is not None:
            private["_backend"] = self._backend.for_worker(self._server_url, self.inference_api_key)
        return state | {"__dict__": self.__dict__ | {"report_metrics": []}, "__pydantic_private__": private}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        for name in _NOT_PICKLED & self.__private_attributes__.keys():
            make: Any = self.__private_attributes__[name].default_factory
            setattr(self, name, None if make is None else make())

    @field_validator("name", "project")
    @classmethod
    def _safe_name(cls, value: str, info: Any) -> str:
        return validate_name(value, param=info.field_name)

    @model_validator(mode="before")
    @classmethod
    def _drop_older_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.keys() - cls.model_fields.keys() and (older := find_older()) is not None:
            return older.drop_older_fields(data)
        return data

    # --- registration and inference ---

    @property
    def is_recorded(self) -> bool:
        """Whether a server keeps the exact tokens of this model's answers: that of a trainable model does."""
        return self.trainable and (self._backend is None or self._backend.keeps_record)

    def backend(self) -> Backend:
        if self._backend is None:
            raise ConfigError(f"model {self.name!r} has no backend yet: call `await model.register(backend)` first")
        return self._backend

    async def register(self, backend: Backend) -> None:
        """Connect the model to a backend, and to its trackers. A trainable model is served from then on.

        Raises:
            ConfigError: a tracker of `report_metrics` is not installed, or cannot be reached.
        """
        from art.metrics.delivery import choose_sinks

        choose_sinks(self.report_metrics)  # raises before anything is started
        registration, _ = await asyncio.gather(backend.register(self), asyncio.to_thread(load_openai))
        self._backend = backend
        if backend.data_dir is not None:
            self.base_path = str(backend.data_dir)
        self._paths().check_spelling()
        if self.prices.device_usd_per_hour is None:
            self.prices = self.prices.model_copy(update={"device_usd_per_hour": backend.device_usd_per_hour})
        if registration is not None:
            self._adopt(registration)
        backend.close_with(self, self.close)
        if self.trainable:
            from art.model.run_settings import describe_machine, describe_program

            about = {"program": describe_program, "machine": describe_machine}
            await self.record_settings({name: await asyncio.to_thread(part) for name, part in about.items()})
        await self._sinks.start(self._paths(), self.report_metrics, self._run_config)

    def _adopt(self, registration: ModelRegistration) -> None:
        self._server_url, self._asks_logprobs = registration.server_url, registration.asks_logprobs
        own = f"{registration.server_url}/projects/{self.project}/v1"
        self.inference_base_url = registration.inference_base_url or own
        self.inference_api_key = registration.api_key
        self.inference_model_name = registration.status.inference_name

    async def close(self) -> None:
        """Close the OpenAI client of this event loop, the client for code that blocks, and the trackers.

        Trackers get what they do not have yet, for up to 30 seconds. A later `log` opens them again.
        """
        try:
            await self._clients.close()
        finally:
            await self._sinks.close()

    def openai_client(self) -> AsyncOpenAI:
        """An `AsyncOpenAI` for this model; every call in one event loop returns the same client.

        With aiohttp and orjson, plain chat requests skip most of OpenAI's package, unless `ART_STOCK_CLIENT=1` is set.
        Outside a running loop each call returns a new client, which the caller closes. Inside `art.capture`, requests
        through it are recorded.

        Raises:
            ConfigError: the model is not registered, or has no address.
        """
        address = self._address()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            from art.client.openai_client import make_openai_client

            return make_openai_client(*address[:2], self._hooks(), address.model, logprobs=address.logprobs)
        return self._clients.get(address, self._hooks)

    def _hooks(self) -> Hooks:
        return Hooks(hooks_of(self, blocking=False), lambda: current_capture() is not None)

    def blocking_openai_client(self) -> OpenAI:
        """An `OpenAI` client for code that blocks, such as LangGraph's `invoke`; one client for all threads.

        In the thread of an event loop it would stop all other rollouts: run such code by `asyncio.to_thread`.
        """
        return self._clients.get_blocking(self._address(), lambda: hooks_of(self, blocking=True))

    def _address(self) -> ModelAddress:
        from art.protocol.keys import check_api_key

        base_url, api_key = self.inference_base_url, self.inference_api_key
        if base_url is None or api_key is None:
            how = "call `await model.register(backend)` first" if self.trainable else (
                "pass `inference_base_url` and `inference_api_key`"
            )  # fmt: skip
            raise ConfigError(f"model {self.name!r} has no inference address yet: {how}")
        name = f"{self.project}/{self.name}"
        return ModelAddress(check_address(base_url), check_api_key(api_key), name, self._asks_logprobs)

    def get_inference_name(self, step: int | Literal["promoted"] | None = None) -> str:
        """Return the name to send as `model` in a request.

        Args:
            step: checkpoint of a trainable model that answers, "promoted" for the one that was promoted. By default it
                is the newest at the time of each request, and inside a rollout of `art.pipeline` the checkpoint that
                the rollout began with.
        """
        if step is not None:
            raise ConfigError(f"model {self.name!r} is not trainable and has no step {step}")
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | Literal["promoted"] | None = None) -> dict[str, Any]:
        """Return keyword arguments for `litellm.completion` and `litellm.acompletion` that ask this model."""
        name = self.get_inference_name(step)
        return {
            "model": f"hosted_vllm/{name}" if self.trainable else name,
            "base_url": self.inference_base_url,
            "api_key": self.inference_api_key,
            "temperature": 1,
        }

    def rollout_base_url(self, rollout_id: str) -> str:
        """Return a base URL for any program. The server records requests under it as the rollout `rollout_id`."""
        if self._backend is not None and not self._backend.keeps_record:
            raise ConfigError(
                f"the backend of model {self.name!r} records no requests of other programs: let the agent ask "
                "through `model.openai_client()`, or use a backend with an ART server"
            )
        if self._server_url is None:
            raise ConfigError(f"model {self.name!r} is not registered: call `await model.register(backend)` first")
        rollout_id = validate_name(rollout_id, param="rollout_id")
        return f"{self._server_url}/projects/{self.project}/rollouts/{rollout_id}/v1"

    async def get_rollout(self, rollout_id: str) -> Trajectory:
        """Return what was recorded under `rollout_base_url(rollout_id)`, as a trajectory to reward and train on."""
        return await self.backend().get_rollout(rollout_id, project=self.project)

    async def get_step(self) -> int:
        """Return the step of the checkpoint that is served; always 0, because this model is not trainable."""
        return 0

    def default_optimizer(self) -> OptimizerConfig | None:
        """Return the optimiser settings for training steps that set none; `None` for ART's default."""
        return None

    # --- the local log ---

    def _paths(self) -> ModelPaths:
        return DataDir(Path(self.base_path)).model(self.project, self.name)

    async def record_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep settings of the run by sections, for its page and the trackers: `{"data": {"file": "train.jsonl"}}`.

        ART records the sections `program`, `machine`, `task`, `training` and `pipeline`. A section replaces the one of
        the same name. Values that look like secrets are replaced.
        """
        if all(name in self._recorded and self._recorded[name] == part for name, part in settings.items()):
            return
        self._recorded |= settings
        if self._paths().root.is_dir():  # otherwise the first row of the log writes them
            await self._keep_settings()
        if (reporting := self._sinks.running(self._paths())) is not None:
            await asyncio.to_thread(reporting.configure, self._run_config())

    def set_labels(self, *, tags: list[str] | None = None, notes: str | None = None) -> None:
        """Give the run tags and notes, which its page shows, in place of earlier ones. `None` keeps those.

        Raises:
            InvalidRequestError: a tag is empty, too long or has a comma, or there are too many of them.
        """
        from art.storage.labels import set_labels

        set_labels(self._paths(), tags=tags, notes=notes)

    async def _keep_settings(self) -> None:
        from art.storage.logs import plain_config

        own = ("project", "name", "config")  # `config` may hold anything, and the folder has the names
        settings = plain_config({name: part for name, part in self._run_config().items() if name not in own})
        await asyncio.to_thread(self._run_log.keep_settings, self._paths(), settings)

    def _run_config(self) -> dict[str, Any]:
        """Return what trackers are told about the run."""
        return {"project": self.project, "name": self.name, "config": self.config, **self._recorded}

    def update_wandb_config(self, config: Mapping[str, Any]) -> None:
        """Add values to what trackers are told about the run, W&B among them. Older code calls this."""
        self._recorded |= config
        if (reporting := self._sinks.running(self._paths())) is not None:
            reporting.configure(self._run_config())

    @property
    def costs(self) -> Ledger:
        """The ledger of what was spent on this model in USD, in this run and in earlier ones, kept in a file.

        Register the model before you pass this to judges as `JudgeSettings(budget=model.costs)`: registration may move
        the file.
        """
        return self._run_log.ledger(self._paths(), self.budget_usd)

    def metrics_builder(self, cost_context: str | None = None) -> Any:
        """Make an object that takes the user's own metrics and costs for the next row of the history.

        Args:
            cost_context: first part of the names of costs, by default `train`. Other metrics wait for a row of it:
                `train`, `eval` for the splits `val` and `test`, or another split; by default for the next row.
        """
        builder = load_plugin("art.names", "metrics.MetricsBuilder")
        context = "train" if cost_context is None else cost_context
        return builder(context, lambda: self.costs, self._run_log.pending, cost_context or "")

    def activate_metrics_context(self, cost_context: str) -> Token[Any]:
        """Make `art.metrics.track_api_cost` book its costs on this model, until `token.var.reset(token)` is called."""
        token: Token[Any] = self.metrics_builder(cost_context).activate()
        return token

    async def book_costs(self, *, trainer_s: float = 0.0) -> None:
        """Do nothing: only a `TrainableModel` has tokens and device time to book. `log` calls this for every model."""

    def read_state(self) -> StateT | None:
        """Return the state that was last saved by `overwrite_state` or `merge_state`; `None` if nothing was saved."""
        return cast("StateT | None", history.read_state(self._paths().state))

    def overwrite_state(self, state: StateT) -> None:
        """Save `state` in place of the state that was saved before."""
        history.overwrite_state(self._paths().state, cast(dict[str, Any], state))

    def merge_state(self, state: StateT) -> StateT:
        """Save `state` over what was saved before, nested dictionaries key by key, and return the result."""
        return cast(StateT, history.merge_state(self._paths().state, cast(dict[str, Any], state)))

    def write_state(self, state: StateT) -> None:
        """Save `state`. This is an older name of `overwrite_state`."""
        self.overwrite_state(state)

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
        row_id: str | None = None,
    ) -> None:
        """Append one row to the history, and the trajectories to the file of their split and step.

        Args:
            trajectories: groups, or loose trajectories and exceptions, which become one group.
            split: prefix of the metrics, as in `val/reward`. It must be a valid file name and not one of the metrics'
                own sections, such as `costs`.
            metrics: further numbers for the row; they replace computed ones of the same name. `costs/...` are USD and
                are booked in `costs`, like those of trajectories and groups. For `time/step_x` and `data/step_x` the
                row also has the sum over all rows, `time/cum/x` and `data/cum/x`.
            step: step of the row; by default the current one.
            row_id: name of the row, of 8 to 64 characters. A row that is there under this name is not logged again, and
                one that was interrupted by a kill is completed, so a program may repeat the call after a restart.

        Raises:
            ConfigError: `row_id` is too short or too long.
            InvalidRequestError: `split` is not a valid name.
            TrajectoryError: these are not trajectories, or a reward or metric is not a number; nothing is logged.
        """
        from art.metrics.groups import as_groups, check_metrics, check_split

        check_split(split)
        groups = as_groups(() if trajectories is None else check_logged(trajectories))
        metrics = check_metrics(metrics or {})
        if row_id is not None and not 8 <= len(row_id) <= 64:
            raise ConfigError(f"`row_id` must have 8 to 64 characters, got {row_id!r}", param="row_id")
        step = await self.get_step() if step is None else step
        known = None if row_id is None else await self._run_log.find(self._paths(), row_id)
        row, written = known or await self._append_to_log(groups, metrics, split, step, row_id)
        if not self.trainable or (backend := self._backend) is None:
            return
        await backend.log_metrics(self, step, row, row_id=row_id)  # the server keeps the best checkpoint by them
        await backend.send_log(self, partial(log_requests, split, step, written, groups))

    async def _append_to_log(
        self, groups: list[TrajectoryGroup], metrics: Mapping[str, float], split: str, step: int, row_id: str | None
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Add a row to the local log, from which the trackers take it. Returns what `RunLog.append` returns."""
        reporting = await self._sinks.start(self._paths(), self.report_metrics, self._run_config)
        metrics = self._run_log.take_pending(split) | dict(metrics)
        await self.book_costs(trainer_s=metrics.get("time/step_trainer_s", 0.0))
        if self._recorded and not self._run_log.has_settings(self._paths()):
            await self._keep_settings()
        row = await self._run_log.append(self._paths(), self.costs, groups, metrics, split, step, row_id=row_id)
        if reporting is not None:
            reporting.wake()
        return row
