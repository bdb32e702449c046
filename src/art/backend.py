"""`Backend`: training and serving, as a user's code sees them.

A backend is a client of an ART server. Kinds of backends differ only in where that server runs and how its address is
found: they override `_connection`. What is trained, and how, is the same everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, cast, get_args

from art.client import ArtClient
from art.client.arguments import check_trajectories
from art.client.backend_checkpoints import CheckpointMethods, NamedModel
from art.client.collector import RolloutCollector, load_trajectory
from art.client.interrupt import forget_steps, note_step
from art.client.submission import check_recorded, wire_groups, wire_trajectory
from art.config import ModelSettings, OptimizerConfig, TrainConfig, TrainSFTConfig
from art.config.base_models import find_folder
from art.dev import LossName, check_config, train_config
from art.errors import ArtError, ConfigError, NothingTrainableError, TrainingError
from art.protocol.checkpoint_calls import BEST_METRIC, MetricsRow
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutStatus, RolloutUpdate
from art.protocol.training import (
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

OnNothing = Literal["skip", "raise"]
"""What `train` does with groups none of which can be learnt from."""

REMIND_AFTER_STEPS = 20
"""A finding that is made step after step is logged once in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    step: int
    """Of the checkpoint that was made; its weights are served now."""
    trained: bool = True
    """False if there was nothing to learn from: then `step` and `checkpoint_path` are those of before, and the first
    of `findings` says why."""
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """What is worth knowing of the step, in plain words: groups that were left out and why, numbers out of range."""
    checkpoint_path: str | None = None
    """On the server's disk."""


LocalTrainResult = TrainResult
"""The older name of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a model needs to know of the server that it was registered with."""

    server_url: str
    api_key: str | None
    status: ModelStatus


class BackendModel(NamedModel, Protocol):
    """What a backend asks of a model."""

    @property
    def trainable(self) -> bool: ...

    def default_optimizer(self) -> OptimizerConfig | None:
        """The optimiser of steps whose settings do not name one."""
        ...


class TrainableBackendModel(BackendModel, Protocol):
    @property
    def base_model(self) -> str: ...

    def model_settings(self) -> ModelSettings: ...


class Backend(CheckpointMethods):
    """An ART server that runs at a known address. `LocalBackend` and others find or start theirs themselves."""

    data_dir: Path | None = None
    """Where the server keeps its data, if that is on this machine. Models then keep their log there too."""
    shares_files: bool | None = None
    """Whether the server sees the same files, so that a path here is one there. `None`: if it is on this machine."""

    device_usd_per_hour: float | None = None
    """What the server's machine costs, for models that have no such price of their own."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        self._client = ArtClient(base_url, api_key) if base_url is not None else None
        self._closers: dict[int, Callable[[], Awaitable[None]]] = {}
        self._logged: dict[tuple[str, str], int] = {}
        """The step at which a finding was last logged, by model and by what it says whatever the numbers."""
        self._known_steps: dict[str, int | None] = {}
        """Where each `project/name` was when this backend registered, trained or changed it last; `None` until then."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a connection is shared by the copies of a model

    async def close(self) -> None:
        """Close all connections of this event loop, those of the registered models too."""
        forget_steps(self._known_steps)
        closers, self._closers = self._closers, {}
        async with contextlib.AsyncExitStack() as stack:  # the failure of one keeps no other open
            if self._client is not None:
                stack.push_async_callback(self._client.close)
            for close in closers.values():
                stack.push_async_callback(close)

    async def _connection(self) -> ArtClient:
        """The client of a server that answers; kinds of backends start or find it here."""
        if self._client is None:
            raise ConfigError("this backend has no server: pass its base_url, or use LocalBackend")
        return self._client

    def close_with(self, owner: object, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close` when the backend is closed; once per `owner`."""
        self._closers[id(owner)] = close

    async def register(self, model: BackendModel) -> Registration | None:
        """Make the server serve and train `model`; a model that is not trainable has nothing to register."""
        if not model.trainable:
            return None
        trainable = cast(TrainableBackendModel, model)
        if self.shares_files:
            _absolute(trainable.base_model)  # what is wrong with it is said before a server is started
        name = f"{model.project}/{model.name}"
        note_step(name, self._known_steps.setdefault(name, None))
        client = await self._connection()
        same_files = client.is_local if self.shares_files is None else self.shares_files
        status = await client.register(_registration_request(trainable, same_files=same_files))
        self._note_step(model, status.step)
        return Registration(server_url=client.base_url, api_key=client.api_key, status=status)

    async def preflight(self, model: BackendModel, request: PreflightRequest | None = None) -> PreflightReport:
        """Look at what training `model` needs: versions, devices, disk space, chat format, and memory by a trial step.

        Nothing is trained or published. `art doctor` shows the same for a base model.
        """
        client = await self._connection()
        return await client.preflight(model.project, model.name, request or PreflightRequest())

    async def train(
        self,
        model: BackendModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        *,
        config: TrainConfig | None = None,
        learning_rate: float | None = None,
        loss_fn: LossName | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        scale_rewards: bool | Literal["none", "group", "batch", "mean"] | None = None,
        normalize_advantages: bool | None = None,
        num_minibatches: int | None = None,
        on_nothing: OnNothing = "skip",
        verbose: bool = False,
        **further: Any,
    ) -> TrainResult:
        """One step of reinforcement learning; returns when the new weights are served.

        Groups whose rewards are all equal teach nothing and are left out. If that leaves no group, the result has
        `trained=False` and the step that the model is at, and a finding says why.

        Args:
            config: settings as a whole; single ones may be added where they do not overlap. What is not given keeps
                the default of `TrainConfig`.
            loss_fn: a loss, or an algorithm, which is a preset of `TrainConfig` (`grpo`, `dapo`, ...).
            loss_fn_config: the loss's own settings, see `DppoConfig`, `PpoConfig` and the others.
            scale_rewards: `True` is "group"; older name: `normalize_advantages`.
            on_nothing: "skip" returns a result with `trained=False` when no group can be learnt from; "raise" raises
                NothingTrainableError then.
            verbose: show a progress bar: place in the queue, micro-batches.
            further: any other setting of `TrainConfig` by its name, or one of older code: `epsilon` and `epsilon_high`
                are clips, `kl_penalty_coef` and `kl_penalty_reference_step` a KL in the reward, `beta` one in the loss,
                `importance_sampling_level="sequence"` is gspo, `truncated_importance_sampling` is `mismatch.truncate`,
                `allow_training_without_logprobs` makes answers that ART has not recorded an error.

        Raises:
            ConfigError: a setting is unknown, out of range, or cannot be honoured.
            NothingTrainableError: there is no trajectory at all, or none that this model sampled; or no group can be
                learnt from and `on_nothing` is "raise".
            TrajectoryError: these are no groups, a reward is not a number, or a conversation is not what was sampled.
            TrainingError, PublishError: the step failed; the policy is as it was before.
        """
        settings = {
            "learning_rate": learning_rate,
            "loss_fn": loss_fn,
            "loss_fn_config": loss_fn_config,
            "scale_rewards": scale_rewards,
            "normalize_advantages": normalize_advantages,
            "num_minibatches": num_minibatches,
        }
        if on_nothing not in get_args(OnNothing):
            raise ConfigError(f'`on_nothing` is "skip" or "raise", got {on_nothing!r}', param="on_nothing")
        without_logprobs = further.pop("allow_training_without_logprobs", False)
        config = _with_optimizer(train_config(config, settings | further), model)
        request = TrainRequest(job_id=uuid.uuid4().hex, groups=wire_groups(trajectory_groups), config=config)
        if without_logprobs:
            check_recorded(request.groups)
        client = await self._connection()
        result = self._result(model, await client.train(model.project, model.name, request, show=verbose))
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
    ) -> TrainResult:
        """Supervised fine-tuning on the assistant messages of `trajectories`.

        Raises:
            NothingTrainableError: there is no trajectory, or no assistant message in them.
            TrajectoryError: these are no trajectories.
            ConfigError: `config` is of another kind, or wrong.
            JobCancelledError: somebody cancelled the job, as for `train`.
        """
        wired = [wire_trajectory(item, f"trajectory {i}") for i, item in enumerate(check_trajectories(trajectories))]
        if not wired:
            raise NothingTrainableError("no trajectory to train on; got an empty list")
        config = _with_optimizer(check_config(config or TrainSFTConfig(), TrainSFTConfig), model)
        request = TrainSFTRequest(job_id=uuid.uuid4().hex, trajectories=wired, config=config)
        client = await self._connection()
        return self._result(model, await client.train_sft(model.project, model.name, request, show=verbose))

    def _result(self, model: BackendModel, status: JobStatus) -> TrainResult:
        if status.step is None:
            raise TrainingError(f"job {status.job_id} ended without a checkpoint; the server's log says more")
        trained = status.trained is not False  # a server that does not say so trained, or its job failed
        findings = [*status.findings, *self._notice_moved(model, status.step, trained=trained)]
        self._log_findings(f"{model.project}/{model.name}", status.step, findings)
        return TrainResult(
            step=status.step,
            trained=trained,
            metrics=status.metrics,
            findings=findings,
            checkpoint_path=status.checkpoint_path,
        )

    def _note_step(self, model: NamedModel, step: int) -> int:
        name = f"{model.project}/{model.name}"
        self._known_steps[name] = step
        note_step(name, step)
        return step

    def _notice_moved(self, model: BackendModel, step: int, *, trained: bool) -> list[str]:
        """A finding if the model did not come from the step where this backend last saw it."""
        name, before = f"{model.project}/{model.name}", step - trained
        known = self._known_steps.get(name)
        self._note_step(model, step)
        if known is None or before <= known:
            return []
        return [
            f"{name} was at step {before}, and this script had left it at step {known}: another job moved it. Does a "
            "second script train the same model, or was a call of `train` given up while its job went on? Give each "
            "script a model `name` of its own"
        ]

    def _log_findings(self, model: str, step: int, findings: Sequence[str]) -> None:
        """Log what is new. A finding is "what was seen: what it means"."""
        for finding in findings:
            seen, _, meaning = finding.partition(": ")
            if "[" in seen:
                continue  # it names groups: some are left out in most steps, and the result has them
            if step - self._logged.get((model, meaning), -math.inf) >= REMIND_AFTER_STEPS:
                self._logged[model, meaning] = step
                logger.warning("%s step %d: %s", model, step, finding)

    async def get_rollout(self, rollout_id: str, *, project: str | None = None) -> Trajectory:
        """What was recorded under a rollout's own base URL, its longest conversation first."""
        client = await self._connection()
        return load_trajectory(await client.get_rollout(rollout_id, project=project))

    async def put_rollout(self, rollout_id: str, update: RolloutUpdate) -> RolloutStatus:
        """Set group, reward or end of a rollout; see `RolloutUpdate`."""
        client = await self._connection()
        return await client.put_rollout(rollout_id, update)

    def rollout_collector(self, model: BackendModel) -> RolloutCollector:
        """What hands out the finished rollouts of `model` that other programs ran."""
        return RolloutCollector(self._connection, model.project, model.name)

    def _model_inference_name(self, model: BackendModel, step: int | None = None) -> str:
        name = f"{model.project}/{model.name}"
        return name if step is None else f"{name}@{step}"

    async def _get_step(self, model: BackendModel) -> int:
        client = await self._connection()
        return (await client.model_status(model.project, model.name)).step

    async def _token_counts(self, model: BackendModel) -> tuple[int, int, int] | None:
        """Prompt, cached and completion tokens of a model so far; `None` while there is no server to tell."""
        if self._client is None:
            return None
        try:
            tokens = (await self._client.model_status(model.project, model.name)).tokens
        except ArtError as error:
            logger.warning("the server was not asked for its tokens, which are booked later: %s", error)
            return None
        return None if tokens is None else (tokens.prompt, tokens.cached, tokens.completion)

    async def _log_metrics(self, model: BackendModel, step: int, row: dict[str, float]) -> None:
        """Tell the server, while there is one, what was logged at a step: it keeps the best checkpoint. That is no
        reason to fail for a script, which has its own log."""
        if self._client is None:
            return
        try:
            metrics = MetricsRow(row_id=uuid.uuid4().hex, step=step, metrics=row)
            await self._client.log_metrics(model.project, model.name, metrics)
        except ArtError as error:
            logger.warning("the server was not told of the metrics of step %d: %s", step, error)

    async def _delete_checkpoint_files(
        self, model: BackendModel, steps_to_keep: Sequence[int], best_metric: str = BEST_METRIC
    ) -> list[int]:
        return await self.delete_checkpoints(model, keep_steps=steps_to_keep, best_metric=best_metric)


def _registration_request(model: TrainableBackendModel, *, same_files: bool) -> RegisterRequest:
    base_model = _absolute(model.base_model) if same_files else model.base_model
    return RegisterRequest(
        project=model.project, name=model.name, base_model=base_model, settings=model.model_settings()
    )


def _absolute(base_model: str) -> str:
    """A directory by its whole path, so that it is the same model from every working directory.

    Raises:
        ConfigError: it is empty, or a path to something else than a model.
    """
    folder = find_folder(base_model)
    return base_model if folder is None else os.path.abspath(folder)


_C = TypeVar("_C", TrainConfig, TrainSFTConfig)


def _with_optimizer(config: _C, model: BackendModel) -> _C:
    optimizer = model.default_optimizer()
    if optimizer is None or "optimizer" in config.model_fields_set:
        return config
    return config.model_copy(update={"optimizer": optimizer})
