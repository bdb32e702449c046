"""`Backend`: training and serving, as a user's code sees them.

A backend is a client of an ART server. Kinds of backends differ only in where that server runs and how its address is
found: they override `_connection`. Training is the same everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack, cast, get_args

from art.client import ArtClient
from art.client.arguments import check_groups
from art.client.checkpoint_client import CheckpointMethod, Checkpoints, NamedModel
from art.client.steps import ModelSteps
from art.config import ModelSettings, OptimizerConfig, TrainConfig, TrainSFTConfig
from art.config.algorithms import SETTINGS, OnNothing, TrainSettings, sft_config, train_config
from art.errors import ArtError, ConfigError, NothingTrainableError, TrainingError
from art.protocol.checkpoint_calls import MetricsRow
from art.protocol.job_states import JobKind
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutStatus, RolloutUpdate
from art.protocol.training import ModelStatus, RegisterRequest, TokenCounts, TrainRequest, TrainSFTRequest
from art.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art.client.collector import RolloutCollector

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a training step made: a checkpoint, which is served now, and numbers about the step."""

    step: int
    """Step (number) of the checkpoint."""
    trained: bool = True
    """False if there was nothing to learn from. Then `step` and `checkpoint_path` are unchanged, and the first of
    `findings` says why."""
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """Remarks about the step in plain words: groups that were left out and why, numbers out of range."""
    checkpoint_path: str | None = None
    """Folder of the checkpoint on the server's disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Address, key and state of a model on the server, as `register` returns them."""

    server_url: str
    api_key: str | None
    status: ModelStatus


class BackendModel(NamedModel, Protocol):
    """Interface of a model, with the attributes that a backend reads."""

    @property
    def trainable(self) -> bool: ...

    def default_optimizer(self) -> OptimizerConfig | None:
        """Return the optimiser settings for training steps that set none; `None` for ART's default."""
        ...


class TrainableBackendModel(BackendModel, Protocol):
    """Interface of a model that a backend can train."""

    @property
    def base_model(self) -> str: ...

    def model_settings(self) -> ModelSettings:
        """Return the settings of adapter, engine, trainer and rendering to register the model with."""
        ...


class Backend:
    """A client of an ART server at a known address. `LocalBackend` and others start or find their server themselves."""

    data_dir: Path | None = None
    """Data directory of the server, if it is on this machine. Models then keep their log there too."""
    shares_files: bool | None = None
    """Whether a path here names the same file for the server. `None`: yes if the server is on this machine."""

    shares_log: bool = True
    """Whether what `model.log` writes here is also sent to a server that keeps its files elsewhere."""

    device_usd_per_hour: float | None = None
    """Price of the server's machine in USD, for models that have no such price of their own."""

    list_checkpoints = CheckpointMethod(Checkpoints.list)
    delete_checkpoints = CheckpointMethod(Checkpoints.delete)
    download_checkpoint = CheckpointMethod(Checkpoints.download)
    fork = CheckpointMethod(Checkpoints.fork)
    export = CheckpointMethod(Checkpoints.export)
    push = CheckpointMethod(Checkpoints.push)
    pull = CheckpointMethod(Checkpoints.pull)

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        self._client = ArtClient(base_url, api_key) if base_url is not None else None
        self._closers: dict[int, Callable[[], Awaitable[None]]] = {}
        self._steps = ModelSteps()

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """List, promote, delete, download, fork, export, push and pull the checkpoints of models."""
        return Checkpoints(self._connection, lambda model, step: self._steps.note(_name_of(model), step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_experimental_"):
                from art.compat import checkpoint_names

                return partial(getattr(checkpoint_names, name[1:]), self.checkpoints)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a connection is shared by the copies of a model

    async def close(self) -> None:
        """Close all connections of this event loop, including those of registered models."""
        self._steps.forget()
        closers, self._closers = self._closers, {}
        async with contextlib.AsyncExitStack() as stack:  # if one fails to close, the others are closed all the same
            if self._client is not None:
                stack.push_async_callback(self._client.close)
            for close in closers.values():
                stack.push_async_callback(close)

    async def _connection(self) -> ArtClient:
        """The client of a running server. Subclasses override this to start or find the server."""
        if self._client is None:
            raise ConfigError("this backend has no server: pass its base_url, or use LocalBackend")
        return self._client

    def close_with(self, owner: object, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close` when the backend is closed. A second call for the same `owner` replaces the first."""
        self._closers[id(owner)] = close

    async def register(self, model: BackendModel) -> Registration | None:
        """Register `model` with the server, which then serves it and accepts its training steps.

        Returns:
            Where to reach the model; `None` for a model that is not trainable, which is not registered.
        """
        if not model.trainable:
            return None
        trainable = cast(TrainableBackendModel, model)
        if self.shares_files:
            _absolute(trainable.base_model)  # raises before a server is started
        self._steps.expect(_name_of(model))
        client = await self._connection()
        same_files = client.is_local if self.shares_files is None else self.shares_files
        base_model = _absolute(trainable.base_model) if same_files else trainable.base_model
        request = RegisterRequest(
            project=model.project, name=model.name, base_model=base_model, settings=trainable.model_settings()
        )
        status = await client.register(request)
        self._steps.note(_name_of(model), status.step)
        return Registration(server_url=client.base_url, api_key=client.api_key, status=status)

    async def preflight(self, model: BackendModel, request: PreflightRequest | None = None) -> PreflightReport:
        """Check what training `model` needs: versions, devices, disk space, chat format, and memory by a trial step.

        Nothing is trained or published. `art doctor` shows the same for a base model.
        """
        client = await self._connection()
        return await client.preflight(model.project, model.name, request or PreflightRequest())

    async def train(
        self,
        model: BackendModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        sft: Iterable[Trajectory] | None = None,
        verbose: bool = False,
        **settings: Unpack[TrainSettings],
    ) -> TrainResult:
        """Make one step of reinforcement learning; returns when the new weights are served.

        Groups whose rewards are all equal teach nothing and are left out. If no group is left, and there is no other
        data to learn from, the result has `trained=False` and the model's current step, and a finding says why.

        Args:
            config: settings as a whole.
            sft: supervised data: trajectories whose assistant messages are learnt in the same step, with the weight
                `sft_weight`. With an empty list the step is one without such data.
            verbose: show a progress bar: place in the queue, micro-batches.
            settings: single settings by name, see `TrainSettings`: any field of `TrainConfig` that `config` does not
                set, `loss_fn`, `loss_fn_config` and `on_nothing`. Words of older code are translated by `art.compat`.

        Raises:
            ConfigError: a setting is unknown, out of range, given twice, or cannot be honoured.
            NothingTrainableError: there is no trajectory at all, or none that this model sampled; or no group can be
                learnt from and `on_nothing` is "raise".
            TrajectoryError: these are not groups, a reward is not a number, or a conversation was changed after it was
                sampled.
            JobCancelledError: somebody cancelled the job.
            TrainingError, PublishError: the step failed; the policy is unchanged.
        """
        from art.client.submission import check_recorded, wire_groups, wire_trajectories

        on_nothing = settings.pop("on_nothing", "skip")
        if on_nothing not in get_args(OnNothing):
            raise ConfigError(f'`on_nothing` is "skip" or "raise", got {on_nothing!r}', param="on_nothing")
        config, only_recorded = _read_settings(config, settings)
        groups, config = check_groups(trajectory_groups), _with_optimizer(config, model)
        if sft is None and config.sft_weight != TrainConfig.model_fields["sft_weight"].default:
            raise ConfigError("`sft_weight` does nothing without `sft`, trajectories to learn from", param="sft_weight")
        request = TrainRequest(
            job_id=uuid.uuid4().hex,
            groups=wire_groups(groups, with_texts=False),
            config=config,
            sft=wire_trajectories(sft or (), "sft"),
        )
        if only_recorded:
            check_recorded(request.groups)
        result = await self._make_step(
            "train",
            model,
            request,
            verbose,
            instead=lambda: request.model_copy(update={"groups": wire_groups(groups)}),
        )
        if not result.trained and on_nothing == "raise":
            raise NothingTrainableError(result.findings[0])
        return result

    async def train_sft(
        self,
        model: BackendModel,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        *,
        verbose: bool = False,
        **settings: Any,
    ) -> TrainResult:
        """Fine-tune on the assistant messages of `trajectories`; returns when the new weights are served.

        Args:
            config: settings as a whole.
            verbose: show a progress bar.
            settings: single fields of `TrainSFTConfig` that `config` does not set.

        Raises:
            NothingTrainableError: there is no trajectory, or no assistant message in them.
            TrajectoryError: these are not trajectories.
            ConfigError: a setting is unknown, out of range or given twice.
            JobCancelledError: somebody cancelled the job.
            TrainingError, PublishError: the step failed; the policy is unchanged.
        """
        from art.client.submission import wire_trajectories

        wired = wire_trajectories(trajectories, "trajectories")
        if not wired:
            raise NothingTrainableError("no trajectory to train on; got an empty list")
        if settings.pop("_config", None):
            raise ConfigError("train_sft has no options in `_config`; use art.TrainSFTConfig(...)", param="_config")
        config = _with_optimizer(sft_config(config, settings), model)
        request = TrainSFTRequest(job_id=uuid.uuid4().hex, trajectories=wired, config=config)
        return await self._make_step("train_sft", model, request, verbose)

    async def _make_step(
        self,
        kind: JobKind,
        model: BackendModel,
        request: TrainRequest | TrainSFTRequest,
        show: bool,
        instead: Callable[[], TrainRequest] | None = None,
    ) -> TrainResult:
        client = await self._connection()
        status = await client.run_job(kind, model.project, model.name, request, instead=instead, show=show)
        if status.step is None:
            raise TrainingError(f"job {status.job_id} ended without a checkpoint; see the server's log")
        trained = status.trained is not False  # `None`: a server of an older version, which always trained
        findings = [*status.findings, *self._steps.note_training(_name_of(model), status.step, trained=trained)]
        self._steps.log_findings(_name_of(model), status.step, findings)
        return TrainResult(
            step=status.step,
            trained=trained,
            metrics=status.metrics,
            findings=findings,
            checkpoint_path=status.checkpoint_path,
        )

    async def page_link(self) -> str:
        """Return an address that opens the live page of the server in a browser, once and within 15 minutes.

        The page has the rights of this backend's key. A browser that has opened it stays logged in.
        """
        return await (await self._connection()).page_link()

    async def get_rollout(self, rollout_id: str, *, project: str | None = None) -> Trajectory:
        """Return a rollout of another program as a trajectory, made from the requests under the rollout's base URL."""
        from art.client.collector import load_trajectory

        client = await self._connection()
        return load_trajectory(await client.get_rollout(rollout_id, project=project))

    async def put_rollout(self, rollout_id: str, update: RolloutUpdate) -> RolloutStatus:
        """Set the group, reward or outcome of a rollout that another program runs; see `RolloutUpdate`."""
        client = await self._connection()
        return await client.put_rollout(rollout_id, update)

    def rollout_collector(self, model: BackendModel) -> RolloutCollector:
        """Make a collector of the finished rollouts of `model` that other programs ran."""
        from art.client.collector import RolloutCollector

        return RolloutCollector(self._connection, model.project, model.name)

    async def get_step(self, model: NamedModel) -> int:
        """Return the step of the checkpoint of `model` that the server serves now."""
        client = await self._connection()
        return (await client.model_status(model.project, model.name)).step

    async def token_counts(self, model: NamedModel) -> TokenCounts | None:
        """Return how many tokens `model` has read and sampled; `None` if no server is connected or answers."""
        if self._client is None:
            return None
        try:
            return (await self._client.model_status(model.project, model.name)).tokens
        except ArtError as error:
            logger.warning("the server did not report its token counts; they are booked later: %s", error)
            return None

    async def log_metrics(self, model: NamedModel, step: int, row: dict[str, float]) -> None:
        """Send the metrics of a step to the server, which chooses the best checkpoint by them.

        Does nothing while no server is connected. A failure is logged and not raised, because the caller has a log of
        its own.
        """
        if self._client is None:
            return
        try:
            metrics = MetricsRow(row_id=uuid.uuid4().hex, step=step, metrics=row)
            await self._client.log_metrics(model.project, model.name, metrics)
        except ArtError as error:
            logger.warning("the server did not get the metrics of step %d: %s", step, error)

    @property
    def log_client(self) -> ArtClient | None:
        """The client to which logs are sent; `None` if the server has the same files, or is to get none."""
        return self._client if self.data_dir is None and self.shares_log else None


def _read_settings(config: TrainConfig | None, settings: TrainSettings) -> tuple[TrainConfig, bool]:
    """The settings of a step, and whether answers that ART has not recorded are an error (an older word)."""
    if settings.keys() <= SETTINGS and not isinstance(settings.get("scale_rewards"), bool):
        return train_config(config, settings), False
    from art.compat import settings as older

    words = older.with_nested(settings)
    return older.train_config(config, words), bool(words.get("allow_training_without_logprobs"))


def _name_of(model: NamedModel) -> str:
    return f"{model.project}/{model.name}"


def _absolute(base_model: str) -> str:
    """The absolute path of a folder, so that it names the same model from every working directory.

    Raises:
        ConfigError: `base_model` is empty, or a path to something else than a model.
    """
    from art.config.base_models import find_folder

    folder = find_folder(base_model)
    return base_model if folder is None else os.path.abspath(folder)


_C = TypeVar("_C", TrainConfig, TrainSFTConfig)


def _with_optimizer(config: _C, model: BackendModel) -> _C:
    optimizer = model.default_optimizer()
    if optimizer is None or "optimizer" in config.model_fields_set:
        return config
    return config.model_copy(update={"optimizer": optimizer})
