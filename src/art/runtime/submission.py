"""Turn a training request into a queued job: check that the model can be trained, resolve and plan, and store the plan.

TrainRequest --resolve (art.credit)--> exact tokens --plan_step--> StepPlan --> JobRunner --> TrainingWork
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from art.config import DpoConfig
from art.credit.plan import StepPlan, plan_step
from art.credit.plan_findings import describe_repeated
from art.credit.references import ask_teacher, reference_checkpoints, teacher_name
from art.credit.resolve import ResolvedGroup, exchange_ids, resolve
from art.credit.samples import build_samples
from art.credit.sft import SftPath, sft_paths
from art.errors import ConfigError, TrajectoryError
from art.gateway.chat import Gateway
from art.gateway.record.recorder import Exchange
from art.gateway.record.usage_book import UNKNOWN_KEY
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.training import JobStatus, TrainRequest, TrainSFTRequest, WireGroup
from art.runtime.checks.preflight import Preflight, quick_checks
from art.runtime.checks.trial import check_observations, check_trial, random_sample, rollout_samples
from art.runtime.host import BaseModelHost
from art.runtime.jobs.job import SftPayload, TrainPayload, make_fingerprint
from art.runtime.jobs.runner import JobRunner
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.runtime.resolver import PolicyResolver


class Submission:
    """Checks training requests and queues them as jobs."""

    def __init__(
        self,
        models: Models,
        gateway: Gateway,
        resolver: PolicyResolver,
        jobs: JobRunner,
        preflight: Preflight | None,
        check_directory: Callable[[], None],
    ) -> None:
        """
        Args:
            preflight: checks a model before its first step; `None` skips the checks.
            check_directory: raises a `StorageError` if the data directory is gone.
        """
        self._models = models
        self._recorder = gateway.recorder
        self._usage = gateway.recorder.usage
        self._rollouts = gateway.rollouts
        self._resolver = resolver
        self._jobs = jobs
        self._preflight = preflight
        self._check_directory = check_directory

    async def train(self, project: str, name: str, request: TrainRequest, *, key_id: str = UNKNOWN_KEY) -> JobStatus:
        """Plan a reinforcement-learning step and queue it.

        Args:
            key_id: id of the API key that asks, which the step is counted for.

        Raises:
            TrajectoryError: the trajectories cannot be trained as they are.
            ConflictError: the job id belongs to another request.
            ConfigError: the quick checks of the preflight fail, or the loss names an unusable checkpoint or teacher.
            NotFoundError: the model is not registered.
            OverloadedError: the project has too many unfinished jobs.
            QuotaError: the project has used up what it may.
            StorageError: the data directory is gone.
        """
        self._check_directory()
        model, host = self._models.find(project, name)
        fingerprint = await asyncio.to_thread(make_fingerprint, f"{type(request).__name__} {model.key}", request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            if known.state not in ("failed", "cancelled"):  # the server may have died before it could mark them
                await self._rollouts.mark_trained(exchange_ids(request.groups), request.job_id, project)
            return known
        self._usage.check_training(project, self._jobs.num_steps_left(project))
        warnings = await self._ensure_ready(model, host)
        _check_mixture(request)
        references = reference_checkpoints(request.config, self._models.data_dir.model(project, name))
        try:
            groups = await asyncio.to_thread(self._resolve, model, request.groups)
            plan = await asyncio.to_thread(
                plan_step, groups, request.config, step=model.step, has_sft=bool(request.sft)
            )
        except TrajectoryError as error:
            at_fault = exchange_ids(request.groups if error.group is None else [request.groups[error.group]])
            await self._rollouts.mark_refused(exchange_ids(request.groups), at_fault, error.message, project)
            raise
        plan.findings += warnings
        if plan.samples and (teacher := teacher_name(request.config)) is not None:
            await self._ask_teacher(self._resolver.name_in(project, teacher) or teacher, host, plan)
        repeated = await self._jobs.store.repeated_step(plan.exchange_ids) if plan.samples else None
        payload = TrainPayload(
            config=request.config,
            plan=plan,
            sft=await self._render_sft(request, host, plan),
            references=references,
            repeated=None if repeated is None else describe_repeated(len(plan.exchange_ids), repeated),
        )
        status = await self._jobs.submit(request.job_id, "train", (project, name), payload, fingerprint, key_id)
        await self._rollouts.mark_trained(exchange_ids(request.groups), request.job_id, project)
        return status

    async def train_sft(
        self, project: str, name: str, request: TrainSFTRequest, *, key_id: str = UNKNOWN_KEY
    ) -> JobStatus:
        """Queue a step of supervised fine-tuning. Takes and raises what `train` does."""
        self._check_directory()
        model, host = self._models.find(project, name)
        fingerprint = await asyncio.to_thread(make_fingerprint, f"{type(request).__name__} {model.key}", request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            return known
        self._usage.check_training(project, self._jobs.num_steps_left(project))
        warnings = await self._ensure_ready(model, host)
        paths, counts = await asyncio.to_thread(sft_paths, request.trajectories, await host.renderer())
        counts["data/step_num_trajectories"] = float(len(request.trajectories))
        plan = StepPlan(metrics=counts, findings=warnings)
        payload = SftPayload(config=request.config, paths=paths, plan=plan)
        return await self._jobs.submit(request.job_id, "train_sft", (project, name), payload, fingerprint, key_id)

    async def _render_sft(self, request: TrainRequest, host: BaseModelHost, plan: StepPlan) -> list[SftPath]:
        """Make paths of the supervised data of a reinforcement-learning step, and add its counts to `plan`."""
        if not request.sft:
            return []
        paths, counts = await asyncio.to_thread(sft_paths, request.sft, await host.renderer(), name="sft")
        plan.metrics |= counts | {"data/step_num_sft_trajectories": float(len(request.sft))}
        return paths

    async def missing_exchanges(self, project: str, exchange_ids: list[str]) -> list[str]:
        """Return those of some exchanges (recorded answers) that cannot be trained, because they are not recorded."""
        return await asyncio.to_thread(self._recorder.find_missing, exchange_ids, project)

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """Check whether this model can be trained here, by quick checks and trial steps whose result is thrown away."""
        model, host = self._models.find(project, name)
        checks = []
        if request.quick:
            checks += await quick_checks(host, self._models.data_dir.root, self._models.checkpoint(model, model.step))
        if request.trial:
            info = await host.engine_info()
            sample = random_sample(length=request.trial_tokens or info.max_context, vocab_size=info.vocab_size)
            checks.append(await check_trial("longest sequence", model, host, [sample]))
        if request.groups:
            groups = await asyncio.to_thread(self._resolve, model, request.groups)
            exchanges = await asyncio.to_thread(self._answers_of, groups)
            checks.append(await check_observations(await self._resolver.resolve(model.key), exchanges))
            samples = await asyncio.to_thread(rollout_samples, groups, self._recorder)
            checks.append(await check_trial("step of the rollouts", model, host, samples))
        return PreflightReport(checks=checks)

    async def _ensure_ready(self, model: RegisteredModel, host: BaseModelHost) -> list[str]:
        """Run the preflight before the first step of a model, and return its warnings."""
        if self._preflight is None:
            return []
        checkpoint = self._models.checkpoint(model, model.step)
        return await self._preflight.ensure(model, host, self._models.data_dir.root, checkpoint)

    def _resolve(self, model: RegisteredModel, groups: list[WireGroup]) -> list[ResolvedGroup]:
        return resolve(groups, self._recorder.find_answers, project=model.project, name=model.name)

    def _answers_of(self, groups: list[ResolvedGroup]) -> list[Exchange]:
        trajectories = (trajectory for group in groups for trajectory in group.trajectories)
        return self._recorder.get(
            {answer.exchange_id for trajectory in trajectories for answer in trajectory.answers()}
        )

    async def _ask_teacher(self, teacher: str, host: BaseModelHost, plan: StepPlan) -> None:
        """Add the teacher's log-probs to the planned samples: only now is the teacher known to be at this step."""
        samples = await asyncio.to_thread(build_samples, plan.samples, self._recorder)
        by_sample = await ask_teacher(await self._resolver.resolve(teacher), host.engine, samples)
        plan.samples = [
            replace(sample, teacher_logprobs=logprobs) for sample, logprobs in zip(plan.samples, by_sample, strict=True)
        ]


def _check_mixture(request: TrainRequest) -> None:
    """Refuse supervised data beside a loss that it cannot be added to.

    Raises:
        ConfigError: the loss is dpo.
    """
    if request.sft and any(isinstance(term, DpoConfig) for term in request.config.terms):
        raise ConfigError(
            "dpo is a loss of pairs alone and takes no supervised data: leave `sft` out, or call `train_sft` "
            "between the steps",
            param="sft",
        )
