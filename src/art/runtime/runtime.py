"""The server's inside: where gateway, engines, trainers and storage meet.

    chat request  --> Gateway --resolve--> Runtime (which policy, which engine) --> engine process
    train request --> Runtime: resolve trajectories (samples) --> JobRunner --> trainer process --> publish --> engine
    process

The parts do not know each other; this module wires them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.errors import ConfigError, NotFoundError
from art.gateway.chat import Gateway
from art.gateway.policies import PolicyRef, find_model, parse_model_name
from art.gateway.recorder import Recorder
from art.protocol.training import JobStatus, ModelStatus, RegisterRequest, TrainRequest, TrainSFTRequest
from art.runtime.host import BaseModelHost
from art.runtime.jobs import JobRunner
from art.runtime.registry import Job, RegisteredModel, Registry
from art.runtime.samples import StepPlan, exchange_ids, plan_step, resolve
from art.runtime.sft import sft_samples
from art.storage import checkpoints
from art.storage.database import Database
from art.storage.layout import DataDir, validate_name

logger = logging.getLogger(__name__)


class Runtime:
    """One server's state. `start()` before use, `close()` after."""

    def __init__(self, data_dir: Path, config: ServerConfig) -> None:
        self.data_dir = DataDir(data_dir)
        self.config = config
        self._database = Database(self.data_dir.database)
        self._registry = Registry(self._database)
        self._recorder = Recorder(self._database)
        self._models: dict[str, RegisteredModel] = {}
        self._hosts: dict[str, BaseModelHost] = {}
        self._host_of_model: dict[str, BaseModelHost] = {}
        self._policies: dict[str, PolicyRef] = {}
        self._register_lock = asyncio.Lock()
        self._jobs = JobRunner(self._registry, self.data_dir, self._find, self._on_published)
        self.gateway = Gateway(self, self._recorder)

    async def start(self) -> None:
        await self._registry.start()
        await self._recorder.start()
        for model in await self._registry.models():
            self._models[model.key] = model
        await self._jobs.recover()

    async def close(self) -> None:
        await self._jobs.close()
        await asyncio.gather(*(host.close() for host in self._hosts.values()))
        self._database.close()

    # -- models ------------------------------------------------------------------------------------------------------

    async def register(self, request: RegisterRequest) -> ModelStatus:
        """Make a model known and ready: its processes run, a first checkpoint exists, and its newest one is served.

        Raises:
            ConfigError: registered before with another base model or other adapter settings.
        """
        validate_name(request.project, param="project")
        validate_name(request.name, param="name")
        async with self._register_lock:
            key = f"{request.project}/{request.name}"
            known = self._models.get(key)
            if known is not None:
                _check_same(known, request)
            model = RegisteredModel(
                project=request.project, name=request.name, base_model=request.base_model, settings=request.settings,
                step=known.step if known else 0,
            )  # fmt: skip
            host = self._host(model)
            if not (first := self._checkpoint(model, 0)).exists() and model.step == 0:
                host.start()
                await host.init_checkpoint(first, model.settings.lora)
            await host.load(model.adapter_id(model.step), self._checkpoint(model, model.step))
            await self._registry.save_model(model)
            self._models[key] = model
            self._policies.clear()
        return self._status(model)

    async def list_models(self) -> list[ModelStatus]:
        return [self._status(model) for model in self._models.values()]

    async def model_status(self, project: str, name: str) -> ModelStatus:
        return self._status(self._model(project, name))

    async def list_checkpoints(self, project: str, name: str) -> list[int]:
        self._model(project, name)
        return checkpoints.list_steps(self.data_dir.model(project, name).checkpoints)

    async def delete_checkpoints(self, project: str, name: str, keep_steps: Iterable[int]) -> list[int]:
        """Delete all but `keep_steps` and the newest published step; the steps that are gone."""
        model, host = self._find(project, name)
        keep = {*keep_steps, model.step}
        paths = self.data_dir.model(project, name)
        gone = [step for step in checkpoints.list_steps(paths.checkpoints) if step not in keep and step <= model.step]
        for step in gone:
            await host.forget_adapter(model.adapter_id(step))
            self._policies.clear()
            await asyncio.to_thread(checkpoints.delete, paths.checkpoint(step))
        return gone

    # -- training ----------------------------------------------------------------------------------------------------

    async def submit_train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        """Check the groups, then queue the step.

        Raises:
            TrajectoryError: the trajectories cannot be trained as they are.
            ConflictError: the job id is taken by another request.
        """
        model = self._model(project, name)

        def plan_request() -> StepPlan:
            exchanges = self._recorder.find(exchange_ids(request.groups))
            groups = resolve(request.groups, exchanges, project=project, name=name)
            return plan_step(groups, request.config, step=model.step)

        plan = await asyncio.to_thread(plan_request)
        payload = {
            "samples": plan.samples,
            "config": request.config.model_dump(),
            "metrics": plan.metrics,
            "ledger": plan.ledger,
        }
        return await self._jobs.submit(
            Job(job_id=request.job_id, kind="train", project=project, name=name, payload=payload, from_step=None)
        )

    async def submit_train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        model, host = self._find(project, name)
        samples, counts = await asyncio.to_thread(sft_samples, request.trajectories, await host.renderer())
        payload = {
            "samples": samples,
            "config": request.config.model_dump(),
            "metrics": counts,
            "ledger": None,
        }
        return await self._jobs.submit(
            Job(
                job_id=request.job_id,
                kind="train_sft",
                project=model.project,
                name=name,
                payload=payload,
                from_step=None,
            )
        )

    async def job_status(self, job_id: str, wait_s: float) -> JobStatus:
        return await self._jobs.wait(job_id, wait_s)

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "base_models": [host.status() for host in self._hosts.values()]}

    # -- resolving a request's model, for the gateway
    # --------------------------------------------------------------------

    def resolve_ready(self, model: str) -> PolicyRef | None:
        """The policy behind a model name if it can be sampled from right now."""
        policy = self._policies.get(model)
        return policy if policy is not None and self._is_loaded(policy) else None

    async def resolve(self, model: str) -> PolicyRef:
        """The policy behind `project/name[@step]` or `name[@step]`; loads its adapter if the engine has dropped it.

        Raises:
            NotFoundError: unknown model or step, or a bare name that two projects share.
        """
        wanted = parse_model_name(model)
        key = find_model(wanted, ((known.project, known.name) for known in self._models.values()))
        registered, host = self._find(*key)
        step = registered.step if wanted.step is None else wanted.step
        checkpoint = self._checkpoint(registered, step)
        if step > registered.step or not checkpoint.exists():
            raise NotFoundError(
                f"model {registered.key!r} has no published checkpoint of step {step}; the newest is {registered.step}",
                param="model",
            )
        adapter_id = registered.adapter_id(step)
        await host.load(adapter_id, checkpoint)
        policy = PolicyRef(
            engine=host.engine,
            renderer=await host.renderer(),
            adapter=adapter_id,
            project=registered.project,
            name=registered.name,
            policy_version=step,
            max_context=(await host.engine_info()).max_context,
        )
        self._policies[model] = policy
        return policy

    # -- inside
    # ----------------------------------------------------------------------------------------------------------

    def _is_loaded(self, policy: PolicyRef) -> bool:
        _, host = self._find(policy.project, policy.name)
        return policy.adapter is None or host.is_loaded(policy.adapter)

    def _host(self, model: RegisteredModel) -> BaseModelHost:
        """The host that models with the same base model and the same settings share."""
        host = self._host_of_model.get(model.key)
        if host is None:
            settings = model.settings
            parts = (settings.engine, settings.trainer, settings.render)
            key = "|".join([model.base_model, *(part.model_dump_json() for part in parts)])
            if key not in self._hosts:
                self._hosts[key] = BaseModelHost(model.base_model, settings, self.data_dir, self.config)
            host = self._host_of_model[model.key] = self._hosts[key]
        return host

    def _model(self, project: str, name: str) -> RegisteredModel:
        model = self._models.get(f"{project}/{name}")
        if model is None:
            raise NotFoundError(f"there is no model {project}/{name}; register it first", param="name")
        return model

    def _find(self, project: str, name: str) -> tuple[RegisteredModel, BaseModelHost]:
        model = self._model(project, name)
        return model, self._host(model)

    def _on_published(self, model: RegisteredModel, step: int) -> None:
        self._models[model.key] = RegisteredModel(
            project=model.project, name=model.name, base_model=model.base_model, settings=model.settings, step=step
        )
        self._policies.clear()

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


def _check_same(known: RegisteredModel, request: RegisterRequest) -> None:
    if known.base_model != request.base_model:
        raise ConfigError(
            f"model {known.key} was trained from base model {known.base_model!r}; got {request.base_model!r}. "
            "Use another model name, or the same base model",
            param="base_model",
        )
    if known.settings.lora != request.settings.lora:
        raise ConfigError(
            f"model {known.key} was trained with LoRA settings {known.settings.lora!r}; got {request.settings.lora!r}. "
            "Use another model name, or the same settings",
            param="settings",
        )
