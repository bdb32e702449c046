"""`ServerlessBackend`: trains and samples at W&B Training (CoreWeave's Serverless Training). It needs the core package.

There is no ART server: answers come from the service's own endpoint, log-probs travel with them, and a step is a job of
the service. What other backends do through their server is refused by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from art.backend import Backend
from art.client.checkpoint_client import Checkpoints, Infos, NamedModel, Steps
from art.client.client import ServerClient
from art.client.training import (
    BackendModel,
    ModelRegistration,
    TrainableBackendModel,
    TrainJob,
    TrainResult,
    name_of,
    with_optimizer,
)
from art.config import TrainConfig, TrainSFTConfig
from art.config.base import check_no_userinfo
from art.config.training import SPREAD_TOLERANCE, OnNothing
from art.errors import ConfigError, ConflictError, NothingTrainableError, ProcessError, TrajectoryError
from art.messages import is_choice, parse_item, to_message
from art.protocol.checkpoint_calls import BEST_METRIC, CheckpointInfo
from art.protocol.keys import check_api_key
from art.protocol.training import ModelStatus, TokenCounts, TrainRequest, TrainSFTRequest
from art.storage.layout import DataDir
from art.trajectory import History, Trajectory, TrajectoryGroup, finite_number, infra_fault, to_plain
from art_cloud.serverless_service import (
    CreateModel,
    CreateRlJob,
    CreateSftJob,
    Patience,
    Service,
    ServiceCheckpoint,
    ServiceModel,
    check_model,
    rl_config,
    sft_config,
    uses_default_loss,
)
from art_cloud.serverless_steps import ServiceTraining, StepWork

BASE_URL = "https://api.training.wandb.ai/v1"
"""Address of the service by its documentation, which also gives https://forge.coreweave.com/api/training/v1."""
_NO_SERVER = "the service is no ART server"
_NO_PROMOTION = "the service has no promoted name; ask a step by `model.get_inference_name(step)`"
_NO_FILES = "the service gives no files; a checkpoint is an artifact in W&B, see docs/serverless.md"


class RefusedMethod:
    """A method that the service has no call for. Calling it raises a `ConfigError`, before anything is sent."""

    def __init__(self, why: str) -> None:
        """
        Args:
            why: what the service lacks and what to do instead, in words that end the message.
        """
        self.why = why

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self._refuse

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"ServerlessBackend has no `{self._name}`: {self.why}")


class ServerlessCheckpoints(Checkpoints):
    """Lists and deletes the checkpoints of models at the service."""

    promote: Any = RefusedMethod(_NO_PROMOTION)
    promotions: Any = RefusedMethod(_NO_PROMOTION)
    download: Any = RefusedMethod(_NO_FILES)
    export: Any = RefusedMethod(_NO_FILES)
    push: Any = RefusedMethod("the service sends no checkpoints elsewhere; each is an artifact in W&B")
    fork: Any = RefusedMethod("every model starts from its base model")
    pull: Any = RefusedMethod("every model starts from its base model")

    def __init__(self, backend: ServerlessBackend) -> None:
        super().__init__(backend._connection, lambda model, step: step)
        self._backend = backend

    async def list(self, model: NamedModel, *, best_metric: str = BEST_METRIC) -> Infos:
        """List checkpoints by step, with the service's metrics, and which is the newest and the best.

        The service does not tell when a checkpoint was made and how large it is: both are 0.
        """
        checkpoints = await self._checkpoints(model)
        best = _best_step(checkpoints, best_metric)
        return [
            CheckpointInfo(
                step=one.step, created_at=0.0, size_bytes=0, full=False, metrics=one.metrics,
                newest=one is checkpoints[-1], best=one.step == best,
            )
            for one in checkpoints
        ]  # fmt: skip

    async def delete(
        self, model: NamedModel, *, keep_steps: Iterable[int] = (), keep_recent: int = 1, best_metric: str = BEST_METRIC
    ) -> Steps:
        """Delete all checkpoints but `keep_steps`, the `keep_recent` newest, and the best by the service's metrics.

        Returns:
            The steps that were deleted.
        """
        if keep_recent < 1:
            raise ConfigError(f"`keep_recent` must be at least 1, got {keep_recent}", param="keep_recent")
        checkpoints = await self._checkpoints(model)
        keep = {*keep_steps, *(one.step for one in checkpoints[-keep_recent:]), _best_step(checkpoints, best_metric)}
        steps = [one.step for one in checkpoints if one.step not in keep]
        if steps:
            await self._backend._service.delete_checkpoints(self._backend._training_of(model).model.id, steps)
        return steps

    async def _checkpoints(self, model: NamedModel) -> Sequence[ServiceCheckpoint]:
        return await self._backend._service.checkpoints(self._backend._training_of(model).model.id)


def _best_step(checkpoints: Iterable[ServiceCheckpoint], metric: str) -> int | None:
    """The step with the highest value of a metric, of equal ones the newest; `None` if no checkpoint has it."""
    known = [one for one in checkpoints if metric in one.metrics]
    return max(known, key=lambda one: (one.metrics[metric], one.step)).step if known else None


class ServerlessBackend(Backend):
    """Trains and samples at a managed service, with the same `train`, `train_sft` and results as other backends.

    Training jobs are written down under `path` before they are sent. A script that was killed finds its job again when
    it registers the model. A setting that the service cannot honour is an error before anything is sent; see
    docs/serverless.md for all of them.
    """

    shares_files = False
    keeps_record = False
    shares_log = False

    preflight: Any = RefusedMethod("the service checks a job when it runs it")
    page_link: Any = RefusedMethod(f"{_NO_SERVER}; see the model's run in W&B, or the log by `art view`")
    get_rollout: Any = RefusedMethod(f"{_NO_SERVER} that records requests of other programs")
    put_rollout: Any = RefusedMethod(f"{_NO_SERVER} that records requests of other programs")
    rollout_collector: Any = RefusedMethod(f"{_NO_SERVER} that records requests of other programs")
    missing_exchanges: Any = RefusedMethod(f"{_NO_SERVER} that records answers")

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        entity: str | None = None,
        path: str | Path = ".art",
        patience: Patience | None = None,
    ) -> None:
        """
        Args:
            api_key: W&B's API key; by default the variable WANDB_API_KEY.
            base_url: address of the service with `/v1` at its end; by default `BASE_URL`.
            entity: team or user in W&B that owns the models; by default the variable WANDB_ENTITY, or the owner of the
                key.
            path: folder in which the jobs that were sent are written down, `<project>/models/<name>/sent_jobs.json`.
            patience: how long to wait for the service.

        Raises:
            ConfigError: there is no key, or the address is not valid.
        """
        super().__init__()
        key = check_api_key(api_key or os.environ.get("WANDB_API_KEY", ""))
        if not key:
            raise ConfigError(
                "ServerlessBackend needs a W&B API key: pass api_key, or set WANDB_API_KEY (wandb.ai/settings has it)"
            )
        self._api_key = key
        self._entity = entity or os.environ.get("WANDB_ENTITY") or None
        self._data = DataDir(Path(path).expanduser().resolve())
        self._patience = patience or Patience()
        url = (base_url or BASE_URL).rstrip("/")
        check_no_userinfo(url, "base_url")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must be an address like {BASE_URL}, got {base_url!r}", param="base_url")
        self._service = Service(url, key, self._patience)
        self._trainings: dict[str, ServiceTraining] = {}

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """List and delete the checkpoints of models."""
        return ServerlessCheckpoints(self)

    async def _connection(self) -> ServerClient:
        raise ConfigError(f"ServerlessBackend cannot do this: {_NO_SERVER}")

    def for_worker(self, server_url: str | None, api_key: str | None) -> Backend:
        raise ConfigError(
            "rollouts of a ServerlessBackend's model run in the script, not in workers: leave `workers` out"
        )

    async def close(self) -> None:
        """Close all connections of this event loop. Jobs go on at the service."""
        try:
            await super().close()
        finally:
            await self._service.close()

    async def base_models(self) -> list[str]:
        """List the base models that the service trains, by their hub ids."""
        return await self._service.base_models()

    async def register(self, model: BackendModel) -> ModelRegistration | None:
        """Register `model` with the service, and wait for a job that an earlier run of the script has sent.

        Returns:
            Where to reach the model; `None` for a model that is not trainable, which is not registered.

        Raises:
            ConfigError: a setting of the model cannot be honoured.
            ConflictError: the service has a model of this name with another base model.
        """
        if not model.trainable:
            return None
        trainable = cast(TrainableBackendModel, model)
        base_model = check_model(trainable.model_settings(), model.default_optimizer(), trainable.base_model)
        self._steps.expect(name_of(model))
        created = await self._service.create_model(
            CreateModel(entity=self._entity, project=model.project, name=model.name, base_model=base_model)
        )
        if created.base_model != base_model:
            raise ConflictError(
                f"the service has a model {name_of(model)} of {created.base_model}, not of {base_model}; give this one "
                "another name"
            )
        path = self._data.model(model.project, model.name).sent_jobs
        training = ServiceTraining(self._service, created, path, self._steps, self._patience)
        self._trainings[name_of(model)] = training
        self._steps.note(name_of(model), await training.settle())
        return ModelRegistration(
            server_url=None, api_key=self._api_key, status=await self.get_status(model),
            inference_base_url=self._service.base_url, asks_logprobs=True,
        )  # fmt: skip

    def name_of_step(self, inference_name: str, step: int | Literal["promoted"]) -> str:
        """Return the name to send as `model` in a request that one checkpoint answers.

        Raises:
            ConfigError: the service has no promoted checkpoint.
        """
        if step == "promoted":
            raise ConfigError("ServerlessBackend has no promoted checkpoint: name a step")
        return f"{inference_name}:step{step}"

    async def get_status(self, model: NamedModel) -> ModelStatus:
        """Return the step and names of `model`."""
        training = self._training_of(model)
        known = training.model
        return ModelStatus(
            project=known.project, name=known.name, base_model=known.base_model, step=await training.newest_step(),
            inference_name=known.inference_name,
        )  # fmt: skip

    async def token_counts(self, model: NamedModel) -> TokenCounts | None:
        """Return `None`: the service does not count tokens for us; its bill is in W&B."""
        return None

    async def log_metrics(
        self, model: NamedModel, step: int, row: dict[str, float], *, row_id: str | None = None
    ) -> None:
        """Do nothing: the service takes no numbers. `Model(report_metrics=["wandb"])` sends them to W&B."""

    async def follow_train_job(self, model: BackendModel, job_id: str) -> TrainJob:
        """Return a training job that this or an earlier process has sent from here, to await its result.

        Raises:
            NotFoundError: no such job is written down under `path`.
        """
        return await self._training_of(model).find(job_id)

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
        training = self._training_of(model)
        if isinstance(request, TrainRequest):
            if request.sft:
                raise ConfigError(
                    "the serverless service learns no supervised data in a step of reinforcement learning: leave out "
                    "`sft`, and call `train_sft` in between",
                    param="sft",
                )
            work = _rl_work(training, request.config, cast("Sequence[TrajectoryGroup]", source))
        else:
            lines = sft_lines(cast("Sequence[Trajectory]", source))
            config = with_optimizer(request.config, model)
            settings = sft_config(config, len(lines))

            async def upload_and_ask(_: int) -> CreateSftJob:
                url = await asyncio.to_thread(upload, lines, training.model, self._api_key)
                return CreateSftJob(model_id=training.model.id, training_data_url=url, config=settings)

            work = StepWork(
                kind="train_sft", digest=_digest(lines, config), make_request=upload_and_ask,
                metrics={"data/step_num_trajectories": float(len(lines))},
            )  # fmt: skip
        return await training.make_step(work, request.job_id, verbose=verbose, wait=wait, on_nothing=on_nothing)

    def _training_of(self, model: NamedModel) -> ServiceTraining:
        try:
            return self._trainings[name_of(model)]
        except KeyError:
            raise ConfigError(
                f"model {name_of(model)} is not registered: call `await model.register(backend)` first"
            ) from None

    def __repr__(self) -> str:
        return f"<ServerlessBackend at {self._service.base_url}>"


def _rl_work(training: ServiceTraining, config: TrainConfig, groups: Sequence[TrajectoryGroup]) -> StepWork:
    """Check a step of reinforcement learning, and make what sends it."""
    rl_config(config.model_copy(update={"learning_rate": 1e-6}), 0)  # all but the rate, which depends on the step
    sent, findings = sent_groups(groups)

    async def make_request(step: int) -> CreateRlJob:
        return CreateRlJob(
            model_id=training.model.id, trajectory_groups=sent, experimental_config=rl_config(config, step)
        )

    if sent and uses_default_loss(config):
        findings.append("no loss was chosen: the service trains by cispo, not by ART's default dppo")
    return StepWork(
        kind="train", digest=_digest(sent, config), findings=findings, make_request=make_request if sent else None,
        metrics={
            "data/step_num_groups_submitted": float(len(groups)), "data/step_num_groups_trainable": float(len(sent)),
        },
    )  # fmt: skip


def _digest(content: Any, config: TrainConfig | TrainSFTConfig) -> str:
    text = json.dumps([content, config.model_dump(mode="json")], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


FILE_NAME = "train.jsonl"
UPLOAD_TIMEOUT_S = 600


def sent_groups(groups: Sequence[TrajectoryGroup]) -> tuple[list[dict[str, Any]], list[str]]:
    """Make what is sent of the groups of a step, and say which groups are left out because they teach nothing.

    Raises:
        TrajectoryError: the service cannot learn from an answer or a reward as it is.
        NothingTrainableError: no trajectory has an answer that the model sampled.
    """
    sent: list[dict[str, Any]] = []
    without_spread, failed, num_answers = [], [], 0
    for i, group in enumerate(groups):
        trajectories = [trajectory for trajectory in group if infra_fault(trajectory) is None]
        for j, trajectory in enumerate(trajectories):
            num_answers += _check(trajectory, f"trajectory {j} of group {i}")
        rewards = [trajectory.reward for trajectory in trajectories]
        if not trajectories:
            failed.append(i)
        elif all(abs(reward - statistics.fmean(rewards)) <= SPREAD_TOLERANCE for reward in rewards):
            without_spread.append(i)
        else:
            content = {
                "trajectories": [_wire_trajectory(trajectory) for trajectory in trajectories],
                "exceptions": [error.model_dump() for error in group.exceptions], "logs": list(group.logs),
                "metadata": to_plain(group.metadata), "metrics": _without_nan(group.metrics),
            }  # fmt: skip
            sent.append(content)
    if not num_answers:
        raise NothingTrainableError(
            "no trajectory has an answer that the model sampled; append the `Choice` objects that "
            "`model.openai_client()` returns to `messages_and_choices`"
        )
    if not (sent or failed):
        return sent, [f"every group ({len(groups)}) has equal rewards: there is nothing to learn from"]
    return sent, [
        f"groups {left_out} of {len(groups)} {why}: they teach nothing and were not sent"
        for left_out, why in ((without_spread, "have equal rewards"), (failed, "have failed rollouts only"))
        if left_out
    ]


def sft_lines(trajectories: Iterable[Trajectory]) -> list[str]:
    """Return the data of supervised fine-tuning: for each conversation a line of JSON with `messages` and `tools`.

    Raises:
        NothingTrainableError: no conversation has an assistant message.
    """
    lines = []
    for trajectory in trajectories:
        for history in (trajectory, *trajectory.additional_histories):
            messages = [to_message(item) for item in history.messages_and_choices]
            if any(message["role"] == "assistant" for message in messages):
                tools = {"tools": history.tools} if history.tools else {}
                lines.append(json.dumps({"messages": messages} | tools, ensure_ascii=False))
    if not lines:
        raise NothingTrainableError("no trajectory has an assistant message to learn")
    return lines


def _check(trajectory: Trajectory, what: str) -> int:
    """Check that the service can learn from a trajectory. Returns the number of its sampled answers.

    Raises:
        TrajectoryError: it cannot; the message says why.
    """
    for name in ("turn_rewards", "token_rewards"):
        if getattr(trajectory, name):
            raise TrajectoryError(f"{what} has {name}: the service knows only one reward per trajectory, `reward`")
    if finite_number(trajectory.reward) is None:
        raise TrajectoryError(
            f"{what} has reward {trajectory.reward!r}; it must be a finite number. Check the reward function"
        )
    num_answers = 0
    for history in (trajectory, *trajectory.additional_histories):
        for choice in filter(is_choice, map(parse_item, history.messages_and_choices)):
            num_answers += 1
            if getattr(choice, "exchange_id", None) is not None:
                raise TrajectoryError(
                    f"{what} has an answer that an ART server sampled and recorded: its tokens are known only there. "
                    "Register the model with ServerlessBackend, and sample through its `openai_client()`"
                )
            if choice.logprobs is None or not (choice.logprobs.content or choice.logprobs.refusal):
                raise TrajectoryError(
                    f"{what} has an answer without log-probs, which training needs. Clients of "
                    "`model.openai_client()` ask for them; any other client must send `logprobs=True`"
                )
    return num_answers


def _wire_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return _wire_history(trajectory) | {
        "additional_histories": [_wire_history(history) for history in trajectory.additional_histories],
        "reward": float(trajectory.reward), "logs": list(trajectory.logs),
        "initial_policy_version": trajectory.initial_policy_version,
        "final_policy_version": trajectory.final_policy_version,
        "metrics": _without_nan(trajectory.metrics), "metadata": to_plain(trajectory.metadata),
        "start_time": trajectory.start_time.isoformat(),
    }  # fmt: skip


def _without_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that JSON has words for."""
    plain = to_plain(metrics).items()
    return {name: value for name, value in plain if not isinstance(value, float) or finite_number(value) is not None}


def _wire_history(history: History) -> dict[str, Any]:
    items = [
        item.model_dump(mode="json", exclude_unset=True, warnings=False) if is_choice(item) else item
        for item in map(parse_item, history.messages_and_choices)
    ]
    return {"messages_and_choices": items, "tools": history.tools}


def upload(lines: Sequence[str], model: ServiceModel, api_key: str) -> str:
    """Upload the lines of `sft_lines` as a new artifact in W&B, by the package `wandb`, and wait until it is there.

    Returns:
        The address of the artifact, `wandb-artifact:///entity/project/name:v0`.

    Raises:
        ConfigError: `wandb` is not installed.
        ProcessError: W&B did not take the data.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "train_sft on ServerlessBackend uploads its data by the package wandb; install it with `pip install wandb`"
        ) from error
    name = f"{model.name}-sft-data-{uuid.uuid4().hex[:12]}"  # an artifact of the same name would get another version
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE_NAME
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        try:
            run = wandb.init(
                entity=model.entity, project=model.project, name=model.name, id=model.run_id or model.name,
                resume="allow", reinit="create_new", dir=folder,
                settings=wandb.Settings(api_key=api_key, console="off", silent=True),
            )  # fmt: skip
            try:
                artifact = wandb.Artifact(name, type="dataset", metadata={"num_conversations": len(lines)})
                artifact.add_file(str(file), name=FILE_NAME)
                run.log_artifact(artifact).wait(timeout=UPLOAD_TIMEOUT_S)
            finally:
                run.finish()
        except Exception as error:  # wandb raises many kinds of errors, and none of them is ours
            raise ProcessError(f"W&B did not take the training data: {type(error).__name__}: {error}") from error
    return f"wandb-artifact:///{model.entity}/{model.project}/{name}:v0"
