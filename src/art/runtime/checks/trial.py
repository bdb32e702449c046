"""A trial step, of which nothing is kept: whether it fits into memory, has a gradient, and how long it takes."""

from __future__ import annotations

import random

from art.credit.resolve import Path, ResolvedGroup
from art.errors import ArtError
from art.protocol.preflight import CheckResult
from art.runtime.host import BaseModelHost
from art.runtime.registry import RegisteredModel
from art.trainer.contract import TrainingSample

LITTLE_HEADROOM = 0.1
"""Of the peak: with less left than that, a batch of another shape may not fit."""
_TOO_LARGE = (
    "shorten `engine.max_context` (and the trajectories), set `trainer.gradient_checkpointing`, use dtype "
    '"bfloat16", `trainer.quantization="nf4"`, another GPU for the engine, or a smaller base model'
)


def random_sample(*, length: int, vocab_size: int) -> TrainingSample:
    """A sequence whose every token but the first is learnt: nothing takes more memory."""
    generator = random.Random(0)
    token_ids = [generator.randrange(vocab_size) for _ in range(length)]
    return _sample("trial", token_ids, [i > 0 for i in range(length)])


def rollout_samples(groups: list[ResolvedGroup]) -> list[TrainingSample]:
    """Every path of every rollout, its sampled tokens to be learnt."""
    return [
        _sample(f"{trajectory.label}.paths[{number}]", path.token_ids, _sampled(path))
        for group in groups
        for trajectory in group.trajectories
        for number, path in enumerate(trajectory.paths)
    ]


async def check_trial(
    name: str, model: RegisteredModel, host: BaseModelHost, samples: list[TrainingSample]
) -> CheckResult:
    """Run one update on `samples`, and judge what it took."""
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    what = f"a step of {len(samples)} sequence{'s' if len(samples) != 1 else ''} of up to {longest:,} tokens"
    try:
        took = await host.trainer.trial(samples, model.settings.lora)
    except ArtError as error:
        found = f"{what} failed: {error.message}"
        return CheckResult(name=name, status="failure", found=found, remedy=_TOO_LARGE)
    took["num_sampled_tokens"] = float(sum(sum(sample.loss_mask) for sample in samples))
    peak, headroom = took["peak_memory_bytes"], took["headroom_bytes"]
    found = (
        f"{what} took {took['seconds']:.2f} s ({took['num_tokens'] / took['seconds']:,.0f} tokens/s) and "
        f"{peak / 2**30:.2f} GiB at its peak; {headroom / 2**30:.2f} GiB were left"
    )
    if not took["grad_norm"] > 0:
        found = f"{what} had a gradient of norm {took['grad_norm']:g}: the adapter would not learn"
        remedy = "name the layers to adapt in `lora.target_modules`"
        return CheckResult(name=name, status="failure", found=found, remedy=remedy, measured=took)
    if headroom < LITTLE_HEADROOM * peak:
        remedy = "for batches of another shape set `trainer.gradient_checkpointing`, or lower `trainer.max_tokens`"
        return CheckResult(name=name, status="warning", found=found, remedy=remedy, measured=took)
    return CheckResult(name=name, status="ok", found=found, measured=took)


def _sampled(path: Path) -> list[bool]:
    mask = [False] * len(path.token_ids)
    for answer in path.answers:
        mask[answer.start : answer.end] = [True] * (answer.end - answer.start)
    return mask


def _sample(name: str, token_ids: list[int], loss_mask: list[bool]) -> TrainingSample:
    zeros = [0.0] * len(token_ids)
    return TrainingSample(
        sample_id=name,
        rollout_id=name,
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampling_logprobs=zeros,
        advantages=zeros,
        component="sft",
    )
