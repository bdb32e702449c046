"""Measure on sampled rollouts whether the answers of a policy depend on what it was shown.

The tokens of each answer are scored twice: after its own conversation, and after the same conversation with another
rollout's observation (`art.metrics.observations`). Both are rendered from their messages, so they differ in nothing
else.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from art.gateway.policies import PolicyRef
from art.gateway.record.recorder import Exchange
from art.metrics.observations import MIN_READS, swap_observations
from art.protocol.preflight import CheckResult

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
