"""`Backend`: training and serving, as a user's code sees them. `RemoteBackend` is one for a server elsewhere.

A backend is a client of an ART server. Kinds of backends differ only in where that server runs and how its address is
found: they override `_connection`. Training is the same everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args, overload

from art.client.arguments import check_groups, check_trajectories
from art.client.checkpoint_client import CheckpointMethod, Checkpoints, NamedModel
from art.client.client import REGISTER_TIMEOUT_S, ServerClient, Submit, model_path
from art.client.terminal import JobView, announce_wait, describe_job
from art.client.training import (
    BackendModel,
    ModelRegistration,
    ModelSteps,
    TrainableBackendModel,
    TrainJob,
    TrainResult,
    absolute_path,
    check_job_id,
    name_of,
    with_optimizer,
)
from art.config import TrainConfig, TrainSFTConfig
from art.config.base import LEFT
from art.config.training import OnNothing, sft_config, train_config
from art.errors import ArtError, ConfigError, NotFoundError, NothingTrainableError
from art.plugins import find_older
from art.protocol.checkpoint_calls import Logged, LogRequest, MetricsRow, Recorded
from art.protocol.rollouts import RolloutStatus, RolloutUpdate
from art.protocol.training import (
    ExchangeIds,
    JobKind,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TokenCounts,
    TrainRequest,
    TrainSFTRequest,
)
from art.storage.local_key import find_local_key
from art.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art.client.collector import RolloutCollector
    from art.protocol.training import PreflightReport, PreflightRequest

logger = logging.getLogger(__name__)

__all__ = [
    "Backend", "BackendModel", "ModelRegistration", "RemoteBackend", "TrainJob", "TrainResult", "TrainableBackendModel",
]  # fmt: skip


class Backend:
    """A client of an ART server at a known address. `LocalBackend` and others start or find their server themselves."""

    data_dir: Path | None = None
    """Data directory of the server, if it is on this machine. Models then keep their log there too."""
    shares_files: bool | None = None
    """Whether a path here names the same file for the server. `None`: yes if the server is on this machine."""
    keeps_record: bool = True
    """Whether the server records each answer with its exact tokens, so that `art.capture` and training find it there.
    If not, what the client receives is all that there is."""
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
        self._client = ServerClient(base_url, api_key) if base_url is not None else None
        self._closers: dict[int, Callable[[], Awaitable[None]]] = {}
        self._steps = ModelSteps()

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """List, promote, delete, download, fork, export, push and pull the checkpoints of models."""
        return Checkpoints(self._connection, lambda model, step: self._steps.note(name_of(model), step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_experimental_") and (older := find_older()) is not None:
                return older.find_experimental(name, self.checkpoints)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a connection is shared by the copies of a model

    def for_worker(self, server_url: str | None, api_key: str | None) -> Backend:
        """Return a plain client of the same server, for a copy of a registered model in another process.

        Args:
            server_url: address that the model was registered at.
        """
        return Backend(server_url, api_key)

    def __reduce__(self) -> Any:
        """Pickle what `for_worker` returns.

        Raises:
            ConfigError: it is a backend that owns something here.
        """
        if type(self) is not Backend:
            raise ConfigError(f"a {type(self).__name__} cannot go to a worker: pass a registered model instead")
        client = self._client
        return Backend, (None, None) if client is None else (client.base_url, client.api_key)

    async def close(self) -> None:
        """Close all connections of this event loop, including those of registered models."""
        self._steps.forget()
        closers, self._closers = self._closers, {}
        async with contextlib.AsyncExitStack() as stack:  # if one fails to close, the others are closed all the same
            if self._client is not None:
                stack.push_async_callback(self._client.close)
            for close in closers.values():
                stack.push_async_callback(close)

    async def _connection(self) -> ServerClient:
        """The client of a running server. Subclasses override this to start or find the server."""
        if self._client is None:
            raise ConfigError("this backend has no server: pass its base_url, or use LocalBackend")
        return self._client

    def close_with(self, owner: object, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close` when the backend is closed. A second call for the same `owner` replaces the first."""
        self._closers[id(owner)] = close

    async def register(self, model: BackendModel) -> ModelRegistration | None:
        """Register `model` with the server, which then serves it and accepts its training steps.

        Returns:
            Where to reach the model; `None` for a model that is not trainable, which is not registered.
        """
        if not model.trainable:
            return None
        trainable = cast(TrainableBackendModel, model)
        if self.shares_files:
            absolute_path(trainable.base_model)  # raises before a server is started
        self._steps.expect(name_of(model))
        client = await self._connection()
        same_files = client.is_local if self.shares_files is None else self.shares_files
        base_model = absolute_path(trainable.base_model) if same_files else trainable.base_model
        request = RegisterRequest(
            project=model.project, name=model.name, base_model=base_model, settings=trainable.model_settings()
        )
        status = await client.register(request)
        self._steps.note(name_of(model), status.step)
        return ModelRegistration(server_url=client.base_url, api_key=client.api_key, status=status)

    async def preflight(self, model: BackendModel, request: PreflightRequest | None = None) -> PreflightReport:
        """Check what training `model` needs: devices, disk space, chat format, and memory by a trial step.

        Nothing is trained or published. `art doctor` shows the same for a base model.
        """
        from art.protocol.training import PreflightReport, PreflightRequest

        client, path = await self._connection(), model_path(model.project, model.name, "preflight")
        return await client.typed(
            PreflightReport, "POST", path, body=request or PreflightRequest(), read_timeout_s=REGISTER_TIMEOUT_S,
            what=f"the checks of {name_of(model)}",
        )  # fmt: skip

    @overload
    async def train(
        self, model: BackendModel, trajectory_groups: Iterable[TrajectoryGroup], config: TrainConfig | None = None, *,
        sft: Iterable[Trajectory] | None = None, verbose: bool = False, wait: Literal[True] = True,
        on_nothing: OnNothing = "skip", job_id: str | None = None, **settings: Any,
    ) -> TrainResult: ...  # fmt: skip

    @overload
    async def train(
        self, model: BackendModel, trajectory_groups: Iterable[TrajectoryGroup], config: TrainConfig | None = None, *,
        sft: Iterable[Trajectory] | None = None, verbose: bool = False, wait: Literal[False],
        on_nothing: OnNothing = "skip", job_id: str | None = None, **settings: Any,
    ) -> TrainJob: ...  # fmt: skip

    async def train(
        self,
        model: BackendModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        sft: Iterable[Trajectory] | None = None,
        verbose: bool = False,
        wait: bool = True,
        on_nothing: OnNothing = "skip",
        job_id: str | None = None,
        **settings: Any,
    ) -> TrainResult | TrainJob:
        """Make one step of reinforcement learning; returns when the new weights are served.

        Groups whose rewards are all equal teach nothing and are left out. If no group is left, and there is no other
        data to learn from, the result has `trained=False` and the model's current step, and a finding says why. So it
        does if there is no trajectory at all, for example because a judge failed.

        Args:
            config: settings as a whole.
            sft: supervised data: trajectories whose assistant messages are learnt in the same step, with the weight
                `sft_weight`. With an empty list the step is one without such data.
            verbose: show a progress bar: place in the queue, micro-batches.
            wait: with `False`, return a `TrainJob` as soon as the server has stored the job. What is wrong with the
                groups or settings is raised here all the same; what the step itself raises, when the job is awaited.
            job_id: name of the job, of 8 to 64 characters. The same call with the same name, also from another process,
                is the same job: it trains once. By default each call is a job of its own.
            on_nothing: what to do when no group can be learnt from: "skip" returns a result with `trained=False`,
                "raise" raises `NothingTrainableError`.
            settings: single settings by name: any field of `TrainConfig` that `config` does not set. Words of older
                code are translated; see docs/older_code.md.

        Raises:
            ConfigError: a setting is unknown, out of range, given twice, or cannot be honoured.
            NothingTrainableError: this model has sampled none of the trajectories; or no group can be learnt from and
                `on_nothing` is "raise"; or there is no trajectory at all and `wait` is false.
            TrajectoryError: these are not groups, a reward is not a number, or a conversation was changed after it was
                sampled.
            ConflictError: `job_id` is the name of a job with other groups or settings.
            JobCancelledError: somebody cancelled the job.
            TrainingError, PublishError: the step failed; the policy is unchanged.
        """
        from art.client.submission import wire_groups, wire_trajectories

        if on_nothing not in get_args(OnNothing):
            raise ConfigError(f'`on_nothing` is "skip" or "raise", got {on_nothing!r}', param="on_nothing")
        groups, config = check_groups(trajectory_groups), with_optimizer(_read_settings(config, settings), model)
        if sft is None and config.sft_weight != TrainConfig.model_fields["sft_weight"].default:
            raise ConfigError("`sft_weight` does nothing without `sft`, trajectories to learn from", param="sft_weight")
        try:
            wired = wire_groups(groups, with_texts=False)
        except NothingTrainableError as error:
            if on_nothing == "raise" or not wait:
                raise
            return self._steps.skip(name_of(model), await self.get_step(model), str(error))
        wired_sft = wire_trajectories(sft or (), "sft")
        request = TrainRequest(job_id=check_job_id(job_id), groups=wired, config=config, sft=wired_sft)
        await model.record_settings({"training": config.model_dump(mode="json")})

        def instead() -> TrainRequest:
            return request.model_copy(update={"groups": wire_groups(groups)})

        return await self._make_step(model, request, groups, instead, verbose=verbose, wait=wait, on_nothing=on_nothing)

    @overload
    async def train_sft(
        self, model: BackendModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None, *,
        verbose: bool = False, wait: Literal[True] = True, job_id: str | None = None, **settings: Any,
    ) -> TrainResult: ...  # fmt: skip

    @overload
    async def train_sft(
        self, model: BackendModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None, *,
        verbose: bool = False, wait: Literal[False], job_id: str | None = None, **settings: Any,
    ) -> TrainJob: ...  # fmt: skip

    async def train_sft(
        self,
        model: BackendModel,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        *,
        verbose: bool = False,
        wait: bool = True,
        job_id: str | None = None,
        **settings: Any,
    ) -> TrainResult | TrainJob:
        """Fine-tune on the assistant messages of `trajectories`; returns when the new weights are served.

        The arguments are those of `train`; the settings are fields of `TrainSFTConfig`.

        Raises:
            NothingTrainableError: there is no trajectory, or no assistant message in them.
            TrajectoryError: these are not trajectories.
            ConfigError: a setting is unknown, out of range or given twice.
            JobCancelledError: somebody cancelled the job.
            TrainingError, PublishError: the step failed; the policy is unchanged.
        """
        from art.client.submission import wire_trajectories

        trajectories = check_trajectories(trajectories)
        wired = wire_trajectories(trajectories, "trajectories")
        if not wired:
            raise NothingTrainableError("no trajectory to train on; got an empty list")
        if settings.pop("_config", None):
            raise ConfigError("train_sft has no options in `_config`; use art.TrainSFTConfig(...)", param="_config")
        config = with_optimizer(sft_config(config, settings), model)
        request = TrainSFTRequest(job_id=check_job_id(job_id), trajectories=wired, config=config)
        await model.record_settings({"sft": config.model_dump(mode="json")})
        return await self._make_step(model, request, trajectories, verbose=verbose, wait=wait)

    async def follow_train_job(self, model: BackendModel, job_id: str) -> TrainJob:
        """Return a training job that this or an earlier process has submitted, to await its result.

        Raises:
            NotFoundError: the server has no such job, or it trains another model. A job that was never stored can be
                submitted again under its id.
        """
        client = await self._connection()
        status = await client.job_status(job_id)
        if (status.project, status.name) != (model.project, model.name) or status.kind not in ("train", "train_sft"):
            raise NotFoundError(f"job {job_id} is {status.kind} of {status.project}/{status.name}", param="job_id")
        return TrainJob(client, job_id, self._follow(client, status, None, wait=False))

    async def _make_step(
        self,
        model: BackendModel,
        request: TrainRequest | TrainSFTRequest,
        source: Sequence[TrajectoryGroup] | Sequence[Trajectory],
        instead: Callable[[], TrainRequest] | None = None,
        *,
        verbose: bool,
        wait: bool,
        on_nothing: OnNothing = "skip",
    ) -> TrainResult | TrainJob:
        """Submit a step that was checked. A subclass that trains elsewhere overrides this.

        Args:
            source: what `request` was made from: the groups, or the trajectories to fine-tune on.
            instead: makes the request in a longer form, for a server that refuses `request`.
        """
        client = await self._connection()
        kind: JobKind = "train" if isinstance(request, TrainRequest) else "train_sft"
        submit = client.submission(kind, model.project, model.name, request, instead)
        result = self._follow(client, await submit(), submit, wait=wait, verbose=verbose, on_nothing=on_nothing)
        return await result if wait else TrainJob(client, request.job_id, result)

    async def _follow(
        self, client: ServerClient, status: JobStatus, submit: Submit | None, *, wait: bool, verbose: bool = False,
        on_nothing: OnNothing = "skip",
    ) -> TrainResult:  # fmt: skip
        """Follow a training job to its end.

        Args:
            submit: submits the job again if the server has lost it.
            wait: whether somebody waits, who is told from time to time how far it is.
        """
        what = describe_job(status.kind, status.project, status.name)
        with JobView(what, show=verbose) as view, announce_wait(view.describe) if wait else contextlib.nullcontext():
            status = await client.follow_job(status, view, submit)
        return self._steps.conclude(f"{status.project}/{status.name}", status, on_nothing)

    async def page_link(self) -> str:
        """Return an address that opens the live page of the server in a browser, once and within 15 minutes.

        The page has the rights of this backend's key. A browser that has opened it stays logged in.
        """
        return await (await self._connection()).page_link()

    async def get_rollout(self, rollout_id: str, *, project: str | None = None) -> Trajectory:
        """Return a rollout of another program as a trajectory, made from the requests under the rollout's base URL."""
        from art.client.collector import load_trajectory

        return load_trajectory(await (await self._connection()).get_rollout(rollout_id, project=project))

    async def put_rollout(self, rollout_id: str, update: RolloutUpdate) -> RolloutStatus:
        """Set the group, reward or outcome of a rollout that another program runs; see `RolloutUpdate`."""
        return await (await self._connection()).put_rollout(rollout_id, update)

    def rollout_collector(self, model: BackendModel) -> RolloutCollector:
        """Make a collector of the finished rollouts of `model` that other programs ran."""
        from art.client.collector import RolloutCollector

        return RolloutCollector(self._connection, model.project, model.name)

    async def get_step(self, model: NamedModel) -> int:
        """Return the step of the checkpoint of `model` that the server serves now."""
        return (await self.get_status(model)).step

    async def get_status(self, model: NamedModel) -> ModelStatus:
        """Return what the server says about `model`: its step, its tokens, the steps that its engine serves at once."""
        return await (await self._connection()).model_status(model.project, model.name)

    async def missing_exchanges(self, model: NamedModel, exchange_ids: list[str]) -> list[str]:
        """Return those of some exchanges (recorded answers) that the server of `model` does not have."""
        client, path = await self._connection(), model_path(model.project, model.name, "exchanges/missing")
        asked = ExchangeIds(exchange_ids=exchange_ids)
        return (await client.typed(ExchangeIds, "POST", path, body=asked)).exchange_ids

    async def token_counts(self, model: NamedModel) -> TokenCounts | None:
        """Return how many tokens `model` has read and sampled; `None` if no server is connected or answers."""
        if self._client is None:
            return None
        try:
            return (await self._client.model_status(model.project, model.name)).tokens
        except ArtError as error:
            logger.warning("the server did not report its token counts; they are booked later: %s", error)
            return None

    async def log_metrics(
        self, model: NamedModel, step: int, row: dict[str, float], *, row_id: str | None = None
    ) -> None:
        """Send the metrics of a step to the server, which chooses the best checkpoint by them.

        Args:
            row_id: name of the row. The server keeps one row of a name.

        Does nothing while no server is connected. A failure is logged, because the caller has a log of its own.
        """
        if self._client is None:
            return
        try:
            metrics = MetricsRow(row_id=row_id or uuid.uuid4().hex, step=step, metrics=row)
            await self._client.typed(Recorded, "POST", model_path(model.project, model.name, "metrics"), body=metrics)
        except ArtError as error:
            logger.warning("the server did not get the metrics of step %d: %s", step, error)

    async def send_log(self, model: NamedModel, make_requests: Callable[[], Sequence[LogRequest]]) -> None:
        """Send a row of the history with its groups to a server that keeps its files elsewhere, for its page.

        The server keeps what it does not have yet. A failure is logged and not raised: the script has its own log.
        """
        if self._client is None or self.data_dir is not None or not self.shares_log:
            return
        path = model_path(model.project, model.name, "log")
        for request in await asyncio.to_thread(make_requests):
            try:
                await self._client.typed(Logged, "POST", path, body=request)
            except ArtError as error:
                lost = f"{len(request.groups)} groups of step {request.step}"
                logger.warning("the server did not get %s for its page: %s", lost, error)

    def name_of_step(self, inference_name: str, step: int | Literal["promoted"]) -> str:
        """Return the name to send as `model` in a request that one checkpoint answers.

        Args:
            inference_name: name of the model, whose newest checkpoint answers.
        """
        return f"{inference_name}@{step}"


class RemoteBackend(Backend):
    """Trains and serves on a server that already runs. Training is the same as with `LocalBackend`.

    Only rollouts run on this machine. The connection may be lost and the server restarted at any time: calls are
    repeated, and a training job continues under its id. Logs of models (`history.jsonl`, trajectories) are kept on this
    machine, and sent to the server, whose page shows them; checkpoints are kept on the server.
    """

    shares_files = False

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, share_log: bool = True) -> None:
        """
        Args:
            base_url: address of the server, like `http://gpu-machine:5000`; by default the variable ART_SERVER_URL.
            api_key: API key; by default the variable ART_API_KEY, or the key that a server on this machine made.
            share_log: whether the server gets what `model.log` writes: metrics, and trajectories with the texts of
                judges. If not, they are on this machine only, and `art view` shows them here.

        Raises:
            ConfigError: there is no address, or it is not valid.
        """
        base_url = base_url or os.environ.get("ART_SERVER_URL")
        if not base_url:
            raise ConfigError(
                "RemoteBackend needs the address of an `art-server`: pass base_url, or set ART_SERVER_URL"
            )
        self.shares_log = share_log
        super().__init__(base_url, api_key or os.environ.get("ART_API_KEY") or find_local_key(base_url))


def _read_settings(config: TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """The settings of a step. Words of older code are translated."""
    known = TrainConfig.model_fields.keys() | LEFT["TrainConfig"].keys()
    is_known = settings.keys() <= known and not isinstance(settings.get("scale_rewards"), bool)
    if is_known or (older := find_older()) is None:
        return train_config(config, settings)
    translated: TrainConfig = older.train_config(config, older.with_nested(settings))
    return translated
