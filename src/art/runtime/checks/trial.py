"""A trial step, whose result is thrown away: does it fit into memory, is there a gradient, how long does it take?"""

from __future__ import annotations

import random
from dataclasses import replace

from art.credit.resolve import ResolvedGroup
from art.credit.samples import PlannedAnswer, PlannedSample, build_samples
from art.errors import ArtError
from art.gateway.record.recorder import Recorder
from art.protocol.preflight import CheckResult
from art.protocol.samples import TrainingSample, plain_sample
from art.runtime.host import BaseModelHost
from art.runtime.registry import RegisteredModel

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
