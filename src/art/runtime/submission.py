"""Turn a training request into a queued job: check that the model can be trained, resolve and plan, and store the plan.

    TrainRequest --resolve (art.credit)--> exact tokens --plan_step--> StepPlan --> JobQueue --> TrainingWork

The checks before a model is trained (the preflight):

    devices, disk space, memory forecast, chat format   take a second; also run before a model's first step
    memory and time, by a trial step                    take as long as a step; run when `art doctor` asks

A check fails if the training would fail, or would train something else than it claims. None of them loads torch.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path

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
from art.engine import EngineInfo
from art.errors import ArtError, ConfigError, DiskFullError, TrajectoryError
from art.gateway.chat import Gateway
from art.gateway.fidelity import (
    Examined,
    examine,
    plain_conversations,
    reasoning_conversation,
    tool_conversations,
)
from art.gateway.renderer import Renderer
from art.protocol.samples import TrainingSample, plain_sample
from art.protocol.training import (
    CheckResult,
    CheckStatus,
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
from art.runtime.memory import check_forecast
from art.runtime.models import Models, PolicyResolver
from art.runtime.placement import ELSEWHERE, FASTER, SLOW, Placement, is_slow
from art.runtime.registry import RegisteredModel


class Submission:
    """Checks training requests and queues them as jobs."""

    def __init__(self, models: Models, gateway: Gateway, resolver: PolicyResolver, jobs: JobQueue) -> None:
        self._models = models
        self._recorder = gateway.recorder
        self._usage = gateway.recorder.usage
        self._rollouts = gateway.rollouts
        self._resolver = resolver
        self._jobs = jobs
        self._preflight = Preflight()

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


# -- the quick checks --


DISK_SPACE = "disk space"
FEWEST_CHECKPOINTS, MANY_CHECKPOINTS = 2, 100
"""Free space for fewer checkpoints than the first number is a failure, because a step is written beside the one before.
Free space for fewer than the second is a warning."""


def check_devices(placement: Placement, engine: EngineInfo) -> CheckResult:
    """Check that the engine runs on the device where it was placed."""
    sharing = "they share its memory" if placement.shared else "each has memory of its own"
    if placement.sleeps:
        sharing += ", and the engine sleeps while the trainer works"
    devices = f"engine on {placement.engine} in {engine.dtype}, trainer on {placement.trainer}; {sharing}"
    if placement.engine.kind not in (ELSEWHERE, engine.device.split(":")[0]):
        problem = f"{devices}; but the engine runs on {engine.device}"
        remedy = 'this torch cannot use the GPU: install a build of torch for it, or set device "cpu"'
        return CheckResult(name="devices", status="warning", found=problem, remedy=remedy)
    return CheckResult(name="devices", status="ok", found=devices)


def check_disk(data_dir: Path, checkpoint: Path, free_bytes: int | None = None) -> CheckResult:
    """Check that more checkpoints of the size of `checkpoint` fit on the disk."""
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    free = shutil.disk_usage(data_dir).free if free_bytes is None else free_bytes
    room = free // max(1, size)
    space = f"{free / 2**30:.1f} GiB free in {data_dir}, room for {room:,} checkpoints of {size / 2**20:.1f} MiB"
    measured = {"free_bytes": float(free), "checkpoint_bytes": float(size)}
    if room >= MANY_CHECKPOINTS:
        return CheckResult(name=DISK_SPACE, status="ok", found=space, measured=measured)
    remedy = "free some space, choose another data directory, or call `model.delete_checkpoints()` regularly"
    status: CheckStatus = "warning" if room >= FEWEST_CHECKPOINTS else "failure"
    return CheckResult(name=DISK_SPACE, status=status, found=space, remedy=remedy, measured=measured)


_DETACHED = "the template writes answers in a form that does not continue their prompt, so none could be checked"
_REPORT = "use the model's own current chat template; if you do already, report the model"


def check_template(renderer: Renderer) -> CheckResult:
    """Check the chat template: the prompt of a later turn must begin with the exact tokens of the earlier turn, or be
    a declared branch, and an answer must come back unchanged when its tokens are parsed."""
    plain = [examine(renderer, conversation) for conversation in plain_conversations()]
    reasoning = examine(renderer, reasoning_conversation())
    name = "chat template"
    if plain[0].refused is not None:
        remedy = "use an instruction-tuned model, or correct its chat template"
        return CheckResult(name=name, status="failure", found=plain[0].refused, remedy=remedy)
    if problem := _problem([*plain, reasoning]):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if plain[0].detached:
        remedy = "reinforcement learning works, each turn as a branch; supervised fine-tuning needs another template"
        return CheckResult(name=name, status="warning", found=_DETACHED, remedy=remedy)
    if plain[0].branch is not None:
        problem = f"each turn is a branch ({plain[0].branch}): it does not extend the tokens of the turn before"
        remedy = (
            "it trains correctly, but recomputes every turn of a conversation; a template that only appends is faster"
        )
        return CheckResult(name=name, status="warning", found=problem, remedy=remedy)
    notes = []
    if reasoning.branch is not None:
        notes.append(f"turns with reasoning are branches ({reasoning.branch}), unless `render.keep_reasoning` is set")
    notes += [f"it does not support {item.name}" for item in plain[1:] if item.refused]
    works = "; ".join(["later turns extend earlier ones; answers come back", *notes])
    return CheckResult(name=name, status="ok", found=works)


def check_tools(renderer: Renderer) -> CheckResult:
    """Check that a tool call that the template writes is parsed as the same call."""
    name = "tool parser"
    if not renderer.handles_tools:
        template = renderer.tokenizer.template
        takes_tools = template is not None and template.handles_tools
        why = "writes tool calls in an unknown form" if takes_tools else "has no place for tools"
        refusal = f"the chat template {why}, so requests with `tools` are refused"
        remedy = "describe tools in a message and parse the answer yourself, or use another base model"
        return CheckResult(name=name, status="warning", found=refusal, remedy=remedy)
    examined = [examine(renderer, conversation) for conversation in tool_conversations()]
    if refused := [item.refused for item in examined if item.refused]:
        return CheckResult(name=name, status="failure", found=refused[0], remedy=_REPORT)
    if problem := _problem(examined):
        return CheckResult(name=name, status="failure", found=problem, remedy=_REPORT)
    if any(item.detached for item in examined):
        return CheckResult(name=name, status="warning", found=_DETACHED, remedy="inspect the tool calls of a rollout")
    branches = sorted({item.branch for item in examined if item.branch})
    note = f"; the turn after a tool's answer is a branch ({', '.join(branches)})" if branches else ""
    return CheckResult(name=name, status="ok", found=f"calls come back as they were written{note}")


def _problem(examined: list[Examined]) -> str | None:
    for item in examined:
        if problem := item.extend_problem or item.parse_problem:
            return f"{item.name}: {problem}"
    return None


class Preflight:
    """Runs the quick checks before a model is trained, once for each model and its settings."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    async def ensure(self, model: RegisteredModel, host: BaseModelHost, data_dir: Path, checkpoint: Path) -> list[str]:
        """Run the quick checks, unless they have passed before.

        Returns:
            The warnings of the checks; empty if the checks passed before.

        Raises:
            ConfigError: some checks fail. The message lists them, each with a remedy.
            DiskFullError: only the check of the disk space fails.
        """
        key = f"{model.key}|{model.host_key}"
        if key in self._passed:
            return []
        checks = await quick_checks(host, data_dir, checkpoint)
        if failures := [check for check in checks if check.status == "failure"]:
            listed = "\n".join(f"- {_describe(failure)}" for failure in failures)
            error = DiskFullError if all(failure.name == DISK_SPACE for failure in failures) else ConfigError
            raise error(f"{model.key} is not ready to be trained:\n{listed}\n`art doctor` shows all checks")
        self._passed.add(key)
        return [_describe(check) for check in checks if check.status == "warning"]


async def quick_checks(host: BaseModelHost, data_dir: Path, checkpoint: Path) -> list[CheckResult]:
    """Check devices, disk space, the memory forecast, chat template and tool parser."""
    checks = [
        check_devices(host.placement, await host.engine_info()),
        await asyncio.to_thread(check_disk, data_dir, checkpoint),
        check_forecast(await asyncio.to_thread(host.memory_plan)),
    ]
    if is_slow(host.settings, host.placement.engine.kind):
        checks.append(CheckResult(name="engine", status="warning", found=SLOW, remedy=FASTER))
    try:
        renderer = await host.renderer()
    except ConfigError as error:
        remedy = "use an instruction-tuned model, or add a chat template to its folder"
        return [*checks, CheckResult(name="chat template", status="failure", found=error.message, remedy=remedy)]
    return [*checks, await asyncio.to_thread(check_template, renderer), await asyncio.to_thread(check_tools, renderer)]


def _describe(check: CheckResult) -> str:
    return f"{check.name}: {check.found}" + (f" ({check.remedy})" if check.remedy else "")
