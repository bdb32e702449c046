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
from typing import Any, Literal, Protocol, Self, TypeVar, cast

from art.backend_checkpoints import CheckpointMethods, NamedModel
from art.client import ArtClient
from art.config import ModelSettings, OptimizerConfig, TrainConfig, TrainSFTConfig
from art.config.base_models import find_folder
from art.dev import LossName, train_config
from art.errors import ArtError, ConfigError, NothingTrainableError, TrainingError, TrajectoryError
from art.interrupt import forget_steps, note_step
from art.messages import is_choice, parse_item
from art.protocol.checkpoints import BEST_METRIC, MetricsRow
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutStatus, RolloutUpdate
from art.protocol.training import (
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
    WireGroup,
    WireHistory,
    WireTrajectory,
)
from art.rollouts import RolloutCollector, load_trajectory
from art.trajectory import History, Trajectory, TrajectoryGroup, infra_fault, is_policy_fault, to_plain

logger = logging.getLogger(__name__)

REMIND_AFTER_STEPS = 20
"""A finding that is made step after step is logged once in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    step: int
    """Of the checkpoint that was made; its weights are served now."""
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
        self._models: set[str] = set()
        """Registered ones, as `project/name`."""
        self._logged: dict[tuple[str, str], int] = {}
        """The step at which a finding was last logged, by model and by what it says whatever the numbers."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a connection is shared by the copies of a model

    async def close(self) -> None:
        """Close all connections of this event loop, those of the registered models too."""
        forget_steps(self._models)
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
        self._models.add(name)
        note_step(name, None)
        client = await self._connection()
        same_files = client.is_local if self.shares_files is None else self.shares_files
        status = await client.register(_registration_request(trainable, same_files=same_files))
        note_step(name, status.step)
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
        verbose: bool = False,
        **further: Any,
    ) -> TrainResult:
        """One step of reinforcement learning; returns when the new weights are served.

        Args:
            config: settings as a whole; single ones may be added where they do not overlap. What is not given keeps
                the default of `TrainConfig`.
            loss_fn: a loss, or an algorithm, which is a preset of `TrainConfig` (`grpo`, `dapo`, ...).
            loss_fn_config: the loss's own settings, see `DppoConfig`, `PpoConfig` and the others.
            scale_rewards: `True` is "group"; older name: `normalize_advantages`.
            verbose: show a progress bar: place in the queue, micro-batches.
            further: any other setting of `TrainConfig` by its name, or one of older code: `epsilon` and `epsilon_high`
                are clips, `kl_penalty_coef` and `kl_penalty_reference_step` a KL in the reward, `beta` one in the loss,
                `importance_sampling_level="sequence"` is gspo, `truncated_importance_sampling` is `mismatch.truncate`,
                `allow_training_without_logprobs` makes answers that ART has not recorded an error.

        Raises:
            ConfigError: a setting is unknown, out of range, or cannot be honoured.
            NothingTrainableError: no group gives anything to learn from.
            TrajectoryError: a reward is not a number, or a conversation is not what was sampled.
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
        without_logprobs = further.pop("allow_training_without_logprobs", False)
        config = _with_optimizer(train_config(config, settings | further), model)
        request = TrainRequest(job_id=uuid.uuid4().hex, groups=wire_groups(trajectory_groups), config=config)
        if without_logprobs:
            check_recorded(request.groups)
        client = await self._connection()
        return self._result(model, await client.train(model.project, model.name, request, show=verbose))

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
            NothingTrainableError: there is no trajectory.
            JobCancelledError: somebody cancelled the job, as for `train`.
        """
        wired = [wire_trajectory(item, f"trajectory {i}") for i, item in enumerate(trajectories)]
        if not wired:
            raise NothingTrainableError("no trajectory to train on; got an empty list")
        config = _with_optimizer(config or TrainSFTConfig(), model)
        request = TrainSFTRequest(job_id=uuid.uuid4().hex, trajectories=wired, config=config)
        client = await self._connection()
        return self._result(model, await client.train_sft(model.project, model.name, request, show=verbose))

    def _result(self, model: BackendModel, status: JobStatus) -> TrainResult:
        if status.step is None:
            raise TrainingError(f"job {status.job_id} ended without a checkpoint; the server's log says more")
        note_step(f"{model.project}/{model.name}", status.step)
        self._log_findings(f"{model.project}/{model.name}", status.step, status.findings)
        return TrainResult(
            step=status.step, metrics=status.metrics, findings=status.findings, checkpoint_path=status.checkpoint_path
        )

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


# --- what is sent ---


def wire_groups(groups: Iterable[TrajectoryGroup]) -> list[WireGroup]:
    """Groups as they are sent.

    Raises:
        NothingTrainableError: there is no trajectory at all.
        TrajectoryError: a reward is not a number, or a trajectory is empty.
    """
    groups = list(groups)
    wired = [
        WireGroup(
            trajectories=[
                wire_trajectory(trajectory, f"trajectory {j} of group {i}")
                for j, trajectory in enumerate(group)
                if infra_fault(trajectory) is None  # said so after the group was made
            ]
        )
        for i, group in enumerate(groups)
    ]
    if not any(len(group) > 0 for group in groups):
        num_failed = sum(len(group.exceptions) for group in groups)
        last = next((e for group in reversed(groups) for e in reversed(group.exceptions)), None)
        reason = f"; the last of them: {last.type}: {last.message}" if last else ""
        raise NothingTrainableError(
            f"nothing to train on: {len(groups)} groups with no trajectory and {num_failed} failed rollouts{reason}. "
            "Check the rollout, or leave this step out"
        )
    return wired


def check_recorded(groups: Iterable[WireGroup]) -> None:
    """
    Raises:
        TrajectoryError: an answer whose tokens and log-probs the server has no record of.
    """
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group.trajectories):
            for item in (item for history in trajectory.histories for item in history.items):
                choice = item.get("choice")
                if (item.get("role") == "assistant") if choice is None else choice.get("exchange_id") is None:
                    raise TrajectoryError(
                        f"allow_training_without_logprobs=True: trajectory {j} of group {i} holds an answer that "
                        "ART has no record of, so its tokens are not known. Append the `Choice` objects that "
                        "`model.openai_client()` returned, whose log-probs are always recorded; answers from elsewhere "
                        "can be learnt by `train_sft`"
                    )


def wire_trajectory(trajectory: Trajectory, what: str) -> WireTrajectory:
    """A trajectory as it is sent; `what` names it in errors.

    Raises:
        TrajectoryError: a reward is not a number, or there are no messages.
    """
    histories = [history for history in (trajectory, *trajectory.additional_histories) if history.messages_and_choices]
    if not histories:
        raise TrajectoryError(f"{what} has no messages; append the messages and choices of its conversation")
    if histories[0] is not trajectory:
        histories.insert(0, trajectory)  # the first one is what turn and token rewards are about, empty or not
    return WireTrajectory(
        reward=_number(trajectory.reward, what),
        turn_rewards=[_number(value, what) for value in _list(trajectory.turn_rewards, what)],
        token_rewards=[
            [_number(value, what) for value in _list(values, what)] for values in _list(trajectory.token_rewards, what)
        ],
        histories=[_wire_history(history) for history in histories],
        policy_fault=is_policy_fault(trajectory),
    )


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise TrajectoryError(f"{what} has reward {value!r}; it must be a finite number. Check the reward function")
    return number


def _list(value: Any, what: str) -> list[Any]:
    plain = to_plain(value)
    if not isinstance(plain, list):
        raise TrajectoryError(
            f"{what} has rewards {value!r}; turn_rewards is a list with a number per choice, token_rewards one with a "
            "list of numbers per choice"
        )
    return plain


def _wire_history(history: History) -> WireHistory:
    items = [_wire_item(item) for item in history.messages_and_choices]
    return WireHistory(items=items, tools=cast(list[dict[str, Any]] | None, history.tools))


def _wire_item(item: Any) -> dict[str, Any]:
    """A message stays as it is. Log-probs of a recorded choice stay behind: the server has the exact ones."""
    item = parse_item(item)
    if not is_choice(item):
        return cast(dict[str, Any], item)
    recorded = getattr(item, "exchange_id", None) is not None
    return {"choice": item.model_dump(mode="json", exclude={"logprobs"} if recorded else None, warnings=False)}
