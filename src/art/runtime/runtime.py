"""The server's inside: where gateway, engines, trainers and storage meet.

    chat request  --> Gateway --resolve--> PolicyResolver (which policy, which engine) --> engine process
    train request --> Runtime: resolve trajectories (samples) --> JobRunner --> trainer process --> publish --> engine
    process

The parts do not know each other; this module wires them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.config.base_models import resolve_base_model
from art.credit.plan import StepPlan, plan_step
from art.credit.plan_findings import describe_repeated
from art.credit.references import ask_teacher, reference_checkpoints, teacher_name
from art.credit.resolve import exchange_ids, resolve
from art.credit.sft import sft_samples
from art.errors import ConfigError, NotFoundError
from art.gateway.chat import Gateway
from art.gateway.record.recorder import Recorder
from art.gateway.record.retention import forget_regularly
from art.gateway.record.rollout_store import RolloutStore
from art.protocol.jobs import JobEvent
from art.protocol.measurements import Measurement
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.training import (
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TokenCounts,
    TrainRequest,
    TrainSFTRequest,
)
from art.runtime.base_models import prepare_base_model
from art.runtime.checks.observation_check import check_observations
from art.runtime.checks.preflight import Preflight, quick_checks
from art.runtime.checks.readiness import find_obstacles
from art.runtime.checks.trial import check_trial, random_sample, rollout_samples
from art.runtime.host import BaseModelHost
from art.runtime.hosts import Hosts, host_key
from art.runtime.jobs.file_jobs import AdoptWork, FileWork
from art.runtime.jobs.runner import JobRunner
from art.runtime.jobs.store import JobStore
from art.runtime.jobs.training_work import TrainingWork
from art.runtime.measurements import (
    measure_disk,
    measure_engines,
    measure_jobs,
    measure_processes,
    measure_tokens,
)
from art.runtime.metric_store import MetricStore
from art.runtime.model_checkpoints import ModelCheckpoints
from art.runtime.placement.devices import find_devices
from art.runtime.placement.parameter_count import count_weights
from art.runtime.placement.placement import check_placement, choose_placement
from art.runtime.registry import RegisteredModel, Registry
from art.runtime.resolver import PolicyResolver
from art.runtime.supervision.status_report import write_report
from art.runtime.supervision.watchdog import Watchdog
from art.storage import checkpoints
from art.storage.database import Database
from art.storage.layout import DataDir, validate_name
from art.storage.lock import DirectoryLock

logger = logging.getLogger(__name__)


LOCK_WAIT_S = 10.0
"""A server whose user has died may need as long to end."""


class Runtime:
    """One server's state. `start()` before use, `close()` after."""

    def __init__(self, data_dir: Path, config: ServerConfig) -> None:
        self.data_dir = DataDir(data_dir)
        self._config = config
        self._lock = DirectoryLock(self.data_dir.lock)
        self._database = Database(self.data_dir.database)
        self._registry = Registry(self._database)
        self._recorder = Recorder(self._database)
        self._models: dict[str, RegisteredModel] = {}
        self._hosts = Hosts(self.data_dir, config)
        self._preflight = Preflight() if config.preflight else None
        self._resolver = PolicyResolver(self.data_dir, self._models, self._find, self._lock.check_directory)
        self._register_lock = asyncio.Lock()
        self._job_store = JobStore(
            self._database,
            max_per_project=config.limits.max_jobs_per_project,
            on_dropped=RolloutStore.unmark_trained,
        )
        training = TrainingWork(self.data_dir, self._find, self._on_published, self._job_store.step_metrics)
        metrics = self._metrics = MetricStore(self._database)
        adopting = AdoptWork(self.data_dir, self._find_registered, self._job_store.origins, self._on_published)
        files = FileWork(self.data_dir)
        self._jobs = JobRunner(
            self._job_store,
            {
                "train": training,
                "train_sft": training,
                "fork": adopting,
                "pull": adopting,
                "export": files,
                "push": files,
            },
        )
        self.checkpoints = ModelCheckpoints(
            self.data_dir, self._find, self._jobs, self._job_store, metrics, config.llama_cpp
        )
        self._watchdog = Watchdog(self._hosts.processes, self.report, config.report_after_s)
        self._background: list[asyncio.Task[None]] = []
        self._retention_s = config.record_retention_s
        self.gateway = Gateway(self._resolver, self._recorder)

    async def start(self) -> None:
        """
        Raises:
            StorageError: another server uses the data directory.
            ConfigError: an unknown base model, or no GPU where one is demanded.
        """
        base_models = [resolve_base_model(name) for name in self._config.models]
        if self._config.gpu and (await asyncio.to_thread(find_devices)).gpus == ():
            raise ConfigError(
                "there is no CUDA device here (`nvidia-smi` lists none, or CUDA_VISIBLE_DEVICES hides them); start "
                "without --gpu to use the CPU"
            )
        await asyncio.to_thread(self._lock.acquire, LOCK_WAIT_S)
        await self._registry.start()
        await self._job_store.start()
        await self._metrics.start()
        await self._recorder.start()
        for model in await self._registry.models():
            self._models[model.key] = model
        await self._jobs.recover()
        for name in base_models:
            self._hosts.pin(await prepare_base_model(name, self.data_dir), self._config.settings)
        self._background.append(asyncio.create_task(self._watchdog.run(), name="watchdog"))
        if self._retention_s is not None:
            forget = forget_regularly(self._recorder, self.gateway.conversations, self._retention_s)
            self._background.append(asyncio.create_task(forget, name="forget old exchanges"))
            forget_jobs = self._jobs.forget_regularly(self._retention_s)
            self._background.append(asyncio.create_task(forget_jobs, name="forget the progress of old jobs"))

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._jobs.close()
        await self._hosts.close()
        self._database.close()
        self._lock.release()

    # -- models ------------------------------------------------------------------------------------------------------

    async def register(self, request: RegisterRequest) -> ModelStatus:
        """Make a model known and ready: its processes run, a first checkpoint exists, and its newest one is served.

        A step that was under way when an earlier server ended is finished first, so that the caller goes on after it.

        Raises:
            ConfigError: there is no such base model, or the model was registered before with another base model or
                other adapter settings, or it wants devices that this machine does not have.
            StorageError: the data directory is gone, also of the calls below.
        """
        self._lock.check_directory()
        validate_name(request.project, param="project")
        validate_name(request.name, param="name")
        await self._jobs.idle(request.project, request.name, recovered_only=True)
        async with self._register_lock:
            base_model = await prepare_base_model(request.base_model, self.data_dir)
            request = request.model_copy(update={"base_model": base_model})
            key = f"{request.project}/{request.name}"
            known = self._models.get(key)
            if known is not None:
                _check_same(known, request)
            step = known.step if known else await asyncio.to_thread(self._step_on_disk, request)
            model = RegisteredModel(
                project=request.project, name=request.name, base_model=request.base_model, settings=request.settings,
                step=step,
            )  # fmt: skip
            if known is not None and host_key(known) != host_key(model):
                await self._move(known, model)
            try:
                await self._make_ready(model)
            except BaseException:
                if known is not None:
                    self._replace(known)
                await self._hosts.close_unused(self._models.values())
                raise
            self._replace(model)
        return self._status(self._models[key])

    def _step_on_disk(self, request: RegisterRequest) -> int:
        """Where a model begins that the database does not know: at the newest checkpoint that lies there, which may
        have been copied from elsewhere; else at 0."""
        paths = self.data_dir.model(request.project, request.name)
        step = checkpoints.latest(paths.checkpoints)
        if step is None:
            return 0
        state = checkpoints.read_state(paths.checkpoint(step))
        wanted = request.settings.model_dump(mode="json", include={"lora"})["lora"]
        if state.base_model == request.base_model and state.lora == wanted:
            return step
        if step == 0:  # a registration that came no further
            checkpoints.delete(paths.checkpoint(0))
            return 0
        raise ConfigError(
            f"{paths.checkpoint(step)} was trained from base model {state.base_model!r} with LoRA settings "
            f"{state.lora}; got {request.base_model!r} and {wanted} (None is full fine-tuning). Use another model "
            "name, or the same base model and settings"
        )

    async def _move(self, known: RegisteredModel, model: RegisteredModel) -> None:
        """Let go of the processes that ran with the settings before, unless other models use them."""
        await self._jobs.idle(model.project, model.name)
        logger.info("%s gets new settings: its processes are started again", model.key)
        self._replace(model)
        await self._hosts.close_unused(self._models.values())

    async def _make_ready(self, model: RegisteredModel) -> None:
        num_weights = await asyncio.to_thread(count_weights, model.base_model)
        devices = await asyncio.to_thread(find_devices)
        check_placement(choose_placement(model.settings, devices), model.settings, devices, num_weights)
        host = self._hosts.of(model)
        host.retry()
        if not (first := self._checkpoint(model, 0)).exists() and model.step == 0:
            host.start()
            await host.trainer.init_checkpoint(first, model.settings.lora)
        await host.adapters.ensure_loaded(model.adapter_id(model.step), self._checkpoint(model, model.step))
        await self._registry.save_model(model)

    def _replace(self, model: RegisteredModel) -> None:
        """Exchange all but the step: a job may have published one meanwhile."""
        current = self._models.get(model.key, model)
        self._models[model.key] = dataclasses.replace(model, step=current.step)
        self._resolver.forget()

    async def list_models(self) -> list[ModelStatus]:
        return [self._status(model) for model in self._models.values()]

    async def model_status(self, project: str, name: str) -> ModelStatus:
        status = self._status(self._model(project, name))
        prompt, cached, completion = await asyncio.to_thread(self._recorder.token_counts, project, name)
        return status.model_copy(update={"tokens": TokenCounts(prompt=prompt, cached=cached, completion=completion)})

    def name_in(self, project: str, model: str) -> str | None:
        return self._resolver.name_in(project, model)

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """Look at what training this model needs; see `preflight.py` and `trial.py`."""
        model, host = self._find(project, name)
        checks = []
        if request.quick:
            checks += await quick_checks(host, self.data_dir.root, self._checkpoint(model, model.step))
        if request.trial:
            info = await host.engine_info()
            sample = random_sample(length=request.trial_tokens or info.max_context, vocab_size=info.vocab_size)
            checks.append(await check_trial("longest sequence", model, host, [sample]))
        if request.groups:
            exchanges = await asyncio.to_thread(self._recorder.find, exchange_ids(request.groups))
            groups = resolve(request.groups, exchanges, project=project, name=name)
            checks.append(await check_observations(await self._resolver.resolve(model.key), groups))
            checks.append(await check_trial("step of the rollouts", model, host, rollout_samples(groups)))
        return PreflightReport(checks=checks)

    # -- training ----------------------------------------------------------------------------------------------------

    async def submit_train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        """Check the groups, then queue the step.

        Raises:
            TrajectoryError: the trajectories cannot be trained as they are.
            ConflictError: the job id is taken by another request.
            ConfigError: the quick checks of the preflight fail.
        """
        self._lock.check_directory()
        model, host = self._find(project, name)
        fingerprint = await asyncio.to_thread(_fingerprint, model.key, request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            if known.state not in ("failed", "cancelled"):  # the server died before it could do so
                await self.gateway.rollouts.mark_trained(exchange_ids(request.groups), request.job_id)
            return known
        warnings = await self._ensure_ready(model, host)

        def plan_request() -> StepPlan:
            exchanges = self._recorder.find(exchange_ids(request.groups))
            groups = resolve(request.groups, exchanges, project=project, name=name)
            return plan_step(groups, request.config, step=model.step)

        references = reference_checkpoints(request.config, self.data_dir.model(project, name))
        plan = await asyncio.to_thread(plan_request)
        samples = plan.samples
        if samples and (teacher := teacher_name(request.config)) is not None:
            samples = await ask_teacher(await self._resolver.resolve(teacher), self._hosts.of(model).engine, samples)
        before = await self._job_store.repeated_step(plan.exchange_ids) if samples else None
        call = {
            "samples": samples,
            "config": request.config.model_dump(),
            "pairs": plan.pairs,
            "references": references,
        }
        payload = {
            "call": call,
            "metrics": plan.metrics,
            "findings": [*plan.findings, *warnings],
            "ledger": plan.ledger,
            "exchange_ids": plan.exchange_ids,
            "repeated": None if before is None else describe_repeated(len(plan.exchange_ids), before),
        }
        status = await self._jobs.submit(
            request.job_id, "train", (project, name), payload, fingerprint, needs=list(references.values())
        )
        await self.gateway.rollouts.mark_trained(exchange_ids(request.groups), request.job_id)
        return status

    async def submit_train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        self._lock.check_directory()
        model, host = self._find(project, name)
        fingerprint = await asyncio.to_thread(_fingerprint, model.key, request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            return known
        warnings = await self._ensure_ready(model, host)
        samples, counts = await asyncio.to_thread(sft_samples, request.trajectories, await host.renderer())
        call = {"samples": samples, "config": request.config.model_dump()}
        payload = {"call": call, "metrics": counts, "findings": warnings, "ledger": None}
        return await self._jobs.submit(request.job_id, "train_sft", (project, name), payload, fingerprint)

    async def _ensure_ready(self, model: RegisteredModel, host: BaseModelHost) -> list[str]:
        """Warnings of the preflight, before the first step of a model."""
        if self._preflight is None:
            return []
        return await self._preflight.ensure(model, host, self.data_dir.root, self._checkpoint(model, model.step))

    async def job_status(self, job_id: str, wait_s: float) -> JobStatus:
        return await self._jobs.wait(job_id, wait_s)

    async def list_jobs(
        self, *, project: str | None, name: str | None, unfinished: bool, limit: int
    ) -> list[JobStatus]:
        return await self._jobs.find(project=project, name=name, unfinished=unfinished, limit=limit)

    async def cancel_job(self, job_id: str) -> JobStatus:
        return await self._jobs.cancel(job_id)

    def job_events(self, job_id: str, after: int) -> AsyncGenerator[JobEvent | None, None]:
        return self._jobs.events(job_id, after)

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "base_models": self._hosts.status()}

    async def obstacles(self) -> dict[str, str]:
        """What keeps this server from working; see `readiness.py`."""
        return await find_obstacles(
            self._hosts.pinned(), self._database, self.data_dir.root, self._config.min_free_bytes
        )

    async def measurements(self) -> list[Measurement]:
        """What Prometheus is told of jobs, processes, engines, tokens and the disk."""
        hosts = self._hosts.all()
        return [
            *measure_tokens(self.gateway.tokens),
            *measure_jobs(self._jobs.counts()),
            *measure_processes(hosts),
            *await measure_engines(hosts),
            measure_disk(self.data_dir.root),
        ]

    async def report(self) -> str:
        """Which processes run, and who waits for whom, with stacks; see `report.py`."""
        return await write_report(self._hosts.processes(), self._jobs.describe())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _model(self, project: str, name: str) -> RegisteredModel:
        model = self._models.get(f"{project}/{name}")
        if model is None:
            raise NotFoundError(f"there is no model {project}/{name}; register it first", param="name")
        return model

    def _find(self, project: str, name: str) -> tuple[RegisteredModel, BaseModelHost]:
        model = self._model(project, name)
        return model, self._hosts.of(model)

    def _find_registered(self, project: str, name: str) -> tuple[RegisteredModel, BaseModelHost] | None:
        return self._find(project, name) if f"{project}/{name}" in self._models else None

    def _on_published(self, model: RegisteredModel, step: int) -> None:
        self._models[model.key] = dataclasses.replace(self._models[model.key], step=step)
        self._resolver.forget()

    def _checkpoint(self, model: RegisteredModel, step: int) -> Path:
        return self.data_dir.model(model.project, model.name).checkpoint(step)

    def _status(self, model: RegisteredModel) -> ModelStatus:
        return ModelStatus(
            project=model.project,
            name=model.name,
            base_model=model.base_model,
            step=model.step,
            inference_name=model.key,
        )


def _fingerprint(key: str, request: TrainRequest | TrainSFTRequest) -> int:
    """Of what was asked for, word by word."""
    return zlib.crc32(request.model_dump_json().encode(), zlib.crc32(f"{type(request).__name__} {key}".encode()))


def _check_same(known: RegisteredModel, request: RegisterRequest) -> None:
    if known.base_model != request.base_model:
        raise ConfigError(
            f"model {known.key} was trained from base model {known.base_model!r}; got {request.base_model!r}. "
            "Use another model name, or the same base model; if its directory has moved, leave a symbolic link at the "
            "old path and register with that",
            param="base_model",
        )
    if known.settings.lora != request.settings.lora:
        raise ConfigError(
            f"model {known.key} was trained with LoRA settings {known.settings.lora!r}; got {request.settings.lora!r} "
            "(None is full fine-tuning). Use another model name, or the same settings",
            param="settings",
        )
