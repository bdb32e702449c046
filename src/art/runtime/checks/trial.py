"""Checks on sampled rollouts, which need engine and trainer: a trial step, and what the policy reads.

A trial step, whose result is thrown away, tells whether a step fits into memory, has a gradient, and how long it takes.
Whether answers depend on what the policy was shown: the tokens of each answer are scored twice, after its own
conversation, and after the same conversation with another rollout's observation (`art.metrics.observations`). Both are
rendered from their messages, so they differ in nothing else.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from art.credit.resolve import ResolvedGroup
from art.credit.samples import PlannedAnswer, PlannedSample, build_samples
from art.errors import ArtError
from art.gateway.policies import PolicyRef
from art.gateway.record.recorder import Exchange, Recorder
from art.metrics.observations import MIN_READS, swap_observations
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


NAME = "observations"
MAX_ANSWERS = 64
"""Number of answers to score, drawn at random. The standard error is then an eighth of their standard deviation."""
_TEACH = (
    "reinforcement learning will hardly learn behaviour that depends on it. First teach the model to use it, by "
    "supervised fine-tuning on good play (`train_sft`) or, for a tiny model, by a longer warm start on more skilled "
    "play; or show it in fewer and plainer tokens"
)
_MORE = "roll out more scenarios (`--scenarios`); a task that shows every rollout the same cannot be measured"


@dataclass(frozen=True, slots=True)
class _Pair:
    """An answer after its own conversation and after one with another observation."""

    original: list[int]
    swapped: list[int]
    num_answer_tokens: int


async def check_observations(policy: PolicyRef, exchanges: Sequence[Exchange]) -> CheckResult:
    """Check that answers, the `exchanges` of some rollouts, are less likely after another rollout's observation."""
    pairs = await asyncio.to_thread(_pairs, policy, [one for one in exchanges if one.completion_token_ids])
    if len(pairs) < 2:
        problem = "not measured: no two rollouts were shown something different at the same turn"
        return CheckResult(name=NAME, status="warning", found=problem, remedy=_MORE)
    reads = await asyncio.gather(*(_read(policy, pair) for pair in pairs))
    mean, error = statistics.fmean(reads), statistics.stdev(reads) / math.sqrt(len(reads))
    measured = {"reads": mean, "reads_error": error, "num_answers": float(len(reads))}
    difference = (
        f"after another rollout's observation they are {mean:.2g} nats less likely (standard error {error:.2g}, "
        f"{len(reads)} answers)"
    )
    if mean < MIN_READS:
        problem = f"the answers do not depend on what the model was shown: {difference}, less than {MIN_READS:g}"
        return CheckResult(name=NAME, status="warning", found=problem, remedy=_TEACH, measured=measured)
    return CheckResult(
        name=NAME, status="ok", found=f"the answers depend on what the model was shown: {difference}", measured=measured
    )


def _pairs(policy: PolicyRef, exchanges: Sequence[Exchange]) -> list[_Pair]:
    """Choose up to `MAX_ANSWERS` answers whose two conversations fit into the context."""
    generator = random.Random(0)
    swaps = swap_observations(([*one.request_messages, one.message] for one in exchanges), generator)
    generator.shuffle(swaps)
    pairs = []
    for swap in swaps:
        exchange = exchanges[swap.index]
        answer = exchange.completion_token_ids
        original, swapped = (
            policy.renderer.render(messages[:-1], exchange.tools) + answer for messages in (swap.messages, swap.swapped)
        )
        if max(len(original), len(swapped)) <= policy.max_context:
            pairs.append(_Pair(original, swapped, len(answer)))
        if len(pairs) == MAX_ANSWERS:
            break
    return pairs


async def _read(policy: PolicyRef, pair: _Pair) -> float:
    """The difference in nats between the log-probs of the whole answer: own minus other observation."""
    scores = [await policy.engine.score(tokens, policy.adapter) for tokens in (pair.original, pair.swapped)]
    original, swapped = (math.fsum(logprobs[-pair.num_answer_tokens :]) for logprobs in scores)
    return original - swapped
