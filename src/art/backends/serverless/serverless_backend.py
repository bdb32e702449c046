"""`ServerlessBackend`: trains and samples at W&B Training (CoreWeave's Serverless Training). It needs the core package.

There is no ART server: answers come from the service's own endpoint, log-probs travel with them, and a step is a job of
the service. What other backends do through their server is refused by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from art.backend import Backend
from art.backends.serverless.conversations import sent_groups, sft_lines, upload, wire_group
from art.backends.serverless.sent_jobs import SentJobs
from art.backends.serverless.service import Patience, Service
from art.backends.serverless.service_checkpoints import Refused, ServerlessCheckpoints
from art.backends.serverless.service_settings import check_model, rl_config, sft_config, uses_default_loss
from art.backends.serverless.steps import ServiceTraining, StepWork
from art.backends.serverless.wire import CreateModel, CreateRlJob, CreateSftJob, LogGroups
from art.client import ArtClient
from art.client.checkpoint_client import Checkpoints, NamedModel
from art.client.http import LostAnswerError
from art.client.training.models import (
    BackendModel,
    Registration,
    TrainableBackendModel,
    TrainResult,
    name_of,
    with_optimizer,
)
from art.client.training.train_job import TrainJob
from art.config import TrainConfig, TrainSFTConfig
from art.config.addresses import check_no_userinfo
from art.config.training import OnNothing
from art.errors import ArtError, ConfigError, ConflictError
from art.protocol.checkpoint_calls import LogRequest
from art.protocol.keys import check_api_key
from art.protocol.training import ModelStatus, TokenCounts, TrainRequest, TrainSFTRequest
from art.storage.layout import DataDir
from art.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

BASE_URLS = {
    "wandb": "https://api.training.wandb.ai/v1",
    "coreweave": "https://forge.coreweave.com/api/training/v1",
}
"""Known addresses of the service. Both are given by its documentation."""
_NO_SERVER = "the service is no ART server"


class ServerlessBackend(Backend):
    """Trains and samples at a managed service, with the same `train`, `train_sft` and results as other backends.

    Training jobs are written down under `path` before they are sent. A script that was killed finds its job again when
    it registers the model. A setting that the service cannot honour is an error before anything is sent; see
    docs/serverless.md for all of them.
    """

    shares_files = False
    keeps_record = False

    preflight: Any = Refused("the service checks a job when it runs it")
    page_link: Any = Refused(f"{_NO_SERVER}; see the model's run in W&B, or the log by `art view`")
    get_rollout: Any = Refused(f"{_NO_SERVER} that records requests of other programs")
    put_rollout: Any = Refused(f"{_NO_SERVER} that records requests of other programs")
    rollout_collector: Any = Refused(f"{_NO_SERVER} that records requests of other programs")
    missing_exchanges: Any = Refused(f"{_NO_SERVER} that records answers")
    engine_pressure: Any = Refused("the service does not tell how busy it is; give `max_concurrent` a number")

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        entity: str | None = None,
        path: str | Path = ".art",
        share_log: bool = True,
        patience: Patience | None = None,
    ) -> None:
        """
        Args:
            api_key: W&B's API key; by default the variable WANDB_API_KEY.
            base_url: address of the service with `/v1` at its end, or "wandb" or "coreweave" for the known ones; by
                default that of "wandb".
            entity: team or user in W&B that owns the models; by default the variable WANDB_ENTITY, or the owner of the
                key.
            path: folder in which the jobs that were sent are written down, `<project>/models/<name>/sent_jobs.json`.
            share_log: whether the service gets the groups that `model.log` writes.
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
        self._service = Service(_check_address(base_url or "wandb"), key, self._patience)
        self._trainings: dict[str, ServiceTraining] = {}
        self.shares_log = share_log

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """List and delete the checkpoints of models."""
        return ServerlessCheckpoints(self._service, self._training_of, self._connection)

    async def _connection(self) -> ArtClient:
        raise ConfigError(f"ServerlessBackend cannot do this: {_NO_SERVER}")

    async def close(self) -> None:
        """Close all connections of this event loop. Jobs go on at the service."""
        try:
            await super().close()
        finally:
            await self._service.close()

    async def base_models(self) -> list[str]:
        """List the base models that the service trains, by their hub ids."""
        return await self._service.base_models()

    async def register(self, model: BackendModel) -> Registration | None:
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
        sent = SentJobs(self._data.model(model.project, model.name).sent_jobs)
        training = ServiceTraining(self._service, created, sent, self._steps, self._patience)
        self._trainings[name_of(model)] = training
        self._steps.note(name_of(model), await training.settle())
        return Registration(
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

    @property
    def log_client(self) -> ServiceLog | None:
        """The client to which logs are sent; `None` if the service is to get none."""
        return ServiceLog(self._service, self._trainings) if self.shares_log else None

    async def delete_model(self, model: NamedModel) -> None:
        """Delete a model at the service, with all its checkpoints and its run in W&B. The log stays on this machine."""
        training = self._training_of(model)
        await self._service.delete_model(training.model.id)
        training.sent.path.unlink(missing_ok=True)
        del self._trainings[name_of(model)]

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
            work = self._sft_work(training, with_optimizer(request.config, model), lines)
        return await training.make_step(work, request.job_id, verbose=verbose, wait=wait, on_nothing=on_nothing)

    def _sft_work(self, training: ServiceTraining, config: TrainSFTConfig, lines: list[str]) -> StepWork:
        settings = sft_config(config, len(lines))

        async def make_request(_: int) -> CreateSftJob:
            url = await asyncio.to_thread(upload, lines, training.model, self._api_key)
            return CreateSftJob(model_id=training.model.id, training_data_url=url, config=settings)

        return StepWork(
            kind="train_sft", digest=_digest(lines, config), make_request=make_request,
            metrics={"data/step_num_trajectories": float(len(lines))},
        )  # fmt: skip

    def _training_of(self, model: NamedModel) -> ServiceTraining:
        try:
            return self._trainings[name_of(model)]
        except KeyError:
            raise ConfigError(
                f"model {name_of(model)} is not registered: call `await model.register(backend)` first"
            ) from None

    def __repr__(self) -> str:
        return f"<ServerlessBackend at {self._service.base_url}>"


class ServiceLog:
    """Sends what `model.log` writes to the service."""

    def __init__(self, service: Service, trainings: dict[str, ServiceTraining]) -> None:
        self._service, self._trainings = service, trainings

    async def log(self, project: str, name: str, request: LogRequest) -> None:
        """Send the groups of a row, once. A failure is logged and not raised: the script has its own log."""
        training = self._trainings.get(f"{project}/{name}")
        if training is None or not request.groups:
            return
        groups = [wire_group(TrajectoryGroup.model_validate(group)) for group in request.groups]
        try:
            await self._service.log(
                LogGroups(model_id=training.model.id, split=request.split, trajectory_groups=groups)
            )
        except (ArtError, LostAnswerError) as error:
            logger.warning("the service did not get %d groups of step %d: %s", len(groups), request.step, error)


def _rl_work(training: ServiceTraining, config: TrainConfig, groups: Sequence[TrajectoryGroup]) -> StepWork:
    """Check a step of reinforcement learning, and make what sends it."""
    rl_config(config.model_copy(update={"learning_rate": 1e-6}), 0)  # all but the rate, which depends on the step
    sent = sent_groups(groups)

    async def make_request(step: int) -> CreateRlJob:
        return CreateRlJob(
            model_id=training.model.id, trajectory_groups=sent.groups, experimental_config=rl_config(config, step)
        )

    findings = sent.findings
    if sent.groups and uses_default_loss(config):
        findings = [*findings, "no loss was chosen: the service trains by cispo, not by ART's default dppo"]
    return StepWork(
        kind="train", digest=_digest(sent.groups, config), findings=findings, metrics=sent.metrics,
        make_request=make_request if sent.groups else None,
    )  # fmt: skip


def _digest(content: Any, config: TrainConfig | TrainSFTConfig) -> str:
    text = json.dumps([content, config.model_dump(mode="json")], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_address(base_url: str) -> str:
    """Return the address of the service by its name or as it is.

    Raises:
        ConfigError: it is neither a known name nor an http address.
    """
    url = BASE_URLS.get(base_url, base_url).rstrip("/")
    check_no_userinfo(url, "base_url")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"base_url must be an address like {BASE_URLS['wandb']}, or {' or '.join(map(repr, BASE_URLS))}; got "
            f"{base_url!r}",
            param="base_url",
        )
    return url
