"""Turn a training request into a queued job: check that the model can be trained, resolve and plan, and store the plan.

TrainRequest --resolve (art.credit)--> exact tokens --plan_step--> StepPlan --> JobQueue --> TrainingWork
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from art.config import DpoConfig
from art.credit.plan import StepPlan, plan_step
from art.credit.resolve import ResolvedGroup, exchange_ids, resolve
from art.credit.samples import (
    PlannedAnswer,
    PlannedSample,
    ask_teacher,
    build_samples,
    reference_checkpoints,
    teacher_name,
)
from art.credit.sft import SftPath, sft_paths
from art.errors import ArtError, ConfigError, TrajectoryError
from art.gateway.chat import Gateway
from art.protocol.samples import TrainingSample, plain_sample
from art.protocol.training import (
    CheckResult,
    JobStatus,
    PreflightReport,
    PreflightRequest,
    TrainRequest,
    TrainSFTRequest,
    WireGroup,
)
from art.record.recorder import Recorder
from art.runtime.hosting.host import BaseModelHost
from art.runtime.jobs.job import SftPayload, TrainPayload, make_fingerprint
from art.runtime.jobs.queue import JobQueue
from art.runtime.models import Models, PolicyResolver
from art.runtime.preflight import Preflight, quick_checks
from art.runtime.registry import RegisteredModel


class Submission:
    """Checks training requests and queues them as jobs."""

    def __init__(
        self, models: Models, gateway: Gateway, resolver: PolicyResolver, jobs: JobQueue, preflight: Preflight
    ) -> None:
        """`preflight` checks a model before its first step."""
        self._models = models
        self._recorder = gateway.recorder
        self._usage = gateway.recorder.usage
        self._rollouts = gateway.rollouts
        self._resolver = resolver
        self._jobs = jobs
        self._preflight = preflight

    async def train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        """Plan a reinforcement-learning step and queue it.

        Raises:
            TrajectoryError: the trajectories cannot be trained as they are.
            ConflictError: the job id belongs to another request.
            ConfigError: the quick checks of the preflight fail, or the loss names an unusable checkpoint or teacher.
            NotFoundError: the model is not registered.
            OverloadedError: the project has too many unfinished jobs.
            QuotaError: the project has used up what it may.
        """
        model, host = self._models.find(project, name)
        fingerprint = await asyncio.to_thread(make_fingerprint, f"{type(request).__name__} {model.key}", request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            if known.state not in ("failed", "cancelled"):  # the server may have died before it could mark them
                await self._rollouts.mark_trained(exchange_ids(request.groups), request.job_id, project)
            return known
        self._usage.check_training(project, self._jobs.num_steps_left(project))
        warnings = await self._ensure_ready(model, host)
        if request.sft and any(isinstance(term, DpoConfig) for term in request.config.terms):
            raise ConfigError(
                "dpo is a loss of pairs alone and takes no supervised data: leave `sft` out, or call `train_sft` "
                "between the steps",
                param="sft",
            )
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
            # Only now is the teacher known to be at this step.
            policy = await self._resolver.resolve(self._resolver.name_in(project, teacher) or teacher)
            samples = await asyncio.to_thread(build_samples, plan.samples, self._recorder)
            by_sample = await ask_teacher(policy, host.engine, samples)
            plan.samples = [
                replace(sample, teacher_logprobs=logprobs)
                for sample, logprobs in zip(plan.samples, by_sample, strict=True)
            ]
        sft: list[SftPath] = []
        if request.sft:
            sft, counts = await asyncio.to_thread(sft_paths, request.sft, await host.renderer(), name="sft")
            plan.metrics |= counts | {"data/step_num_sft_trajectories": float(len(request.sft))}
        payload = TrainPayload(config=request.config, plan=plan, sft=sft, references=references)
        status = await self._jobs.submit(request.job_id, "train", (project, name), payload, fingerprint)
        await self._rollouts.mark_trained(exchange_ids(request.groups), request.job_id, project)
        return status

    async def train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        """Queue a step of supervised fine-tuning. Raises what `train` does."""
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
        return await self._jobs.submit(request.job_id, "train_sft", (project, name), payload, fingerprint)

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
            samples = await asyncio.to_thread(rollout_samples, groups, self._recorder)
            checks.append(await check_trial("step of the rollouts", model, host, samples))
        return PreflightReport(checks=checks)

    async def _ensure_ready(self, model: RegisteredModel, host: BaseModelHost) -> list[str]:
        """Run the preflight before the first step of a model, and return its warnings."""
        checkpoint = self._models.checkpoint(model, model.step)
        return await self._preflight.ensure(model, host, self._models.data_dir.root, checkpoint)

    def _resolve(self, model: RegisteredModel, groups: list[WireGroup]) -> list[ResolvedGroup]:
        return resolve(groups, self._recorder.find_answers, project=model.project, name=model.name)


LITTLE_HEADROOM = 0.1
"""A trial that leaves less than this share of its peak memory free gives a warning: other batches may not fit."""
_TOO_LARGE = (
    "shorten `engine.max_context` (and the trajectories), set `trainer.gradient_checkpointing`, use dtype "
    '"bfloat16", `trainer.quantization="nf4"`, another GPU for the engine, or a smaller base model'
)


def random_sample(*, length: int, vocab_size: int) -> TrainingSample:
    """Make a sequence of random tokens that are all learnt, except the first: the worst case for memory."""
    generator = random.Random(0)
    token_ids = [generator.randrange(vocab_size) for _ in range(length)]
    return replace(plain_sample(token_ids, "trial"), component="sft")


def rollout_samples(groups: list[ResolvedGroup], recorder: Recorder) -> list[TrainingSample]:
    """Make a training sample of every token path of every rollout. Its sampled tokens are learnt."""
    planned = [
        PlannedSample(
            sample_id=f"{trajectory.label}.paths[{number}]",
            rollout_id=trajectory.label,
            answers=[
                PlannedAnswer(exchange_id=answer.exchange_id, num_tokens=answer.num_tokens, advantages=[0.0])
                for answer in path.answers
            ],
            weight=1.0,
            share=None,
            policy_version=0,
        )
        for group in groups
        for trajectory in group.trajectories
        for number, path in enumerate(trajectory.paths)
    ]
    samples = build_samples(planned, recorder)
    return [replace(sample, component="sft", temperature=1.0, constraints=[]) for sample in samples]


async def check_trial(
    name: str, model: RegisteredModel, host: BaseModelHost, samples: list[TrainingSample]
) -> CheckResult:
    """Run one update on `samples`, throw its result away, and judge its time, memory and gradient."""
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    what = f"a step of {len(samples)} sequence{'s' if len(samples) != 1 else ''} of up to {longest:,} tokens"
    try:
        took = await host.trainer.trial(samples, model.settings.lora)
    except ArtError as error:
        failed = f"{what} failed: {error.message}"
        return CheckResult(name=name, status="failure", found=failed, remedy=_TOO_LARGE)
    took["num_sampled_tokens"] = float(sum(sum(sample.loss_mask) for sample in samples))
    peak, headroom = took["peak_memory_bytes"], took["headroom_bytes"]
    summary = (
        f"{what} took {took['seconds']:.2f} s ({took['num_tokens'] / took['seconds']:,.0f} tokens/s) and "
        f"{peak / 2**30:.2f} GiB at its peak; {headroom / 2**30:.2f} GiB were left"
    )
    if not took["grad_norm"] > 0:
        problem = f"{what} had a gradient of norm {took['grad_norm']:g}: the adapter would not learn"
        remedy = "name the layers to adapt in `lora.target_modules`"
        return CheckResult(name=name, status="failure", found=problem, remedy=remedy, measured=took)
    if headroom < LITTLE_HEADROOM * peak:
        remedy = "for batches of another shape set `trainer.gradient_checkpointing`, or lower `trainer.max_tokens`"
        return CheckResult(name=name, status="warning", found=summary, remedy=remedy, measured=took)
    return CheckResult(name=name, status="ok", found=summary, measured=took)
