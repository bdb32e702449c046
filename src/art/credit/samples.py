"""The samples of a step: first as references to recorded exchanges, then as the tokens that the trainer learns from.

A queued job stores `PlannedSample`s. They hold no tokens, because the recorder has them already. `build_samples` makes
the `TrainingSample`s when the job runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from art.gateway.record.recorder import Exchange, Recorder
from art.protocol.samples import ConstrainedSpan, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """One recorded answer of a sample, and the advantages of its tokens."""

    exchange_id: str
    num_tokens: int
    advantages: list[float]
    """One per sampled token, or a single one that all of them share."""

    def token_advantages(self) -> list[float]:  # [num_tokens]
        return self.advantages * self.num_tokens if len(self.advantages) == 1 else self.advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """One token path of a rollout, stored as the recorded answers (exchanges) on it.

    Example: a conversation of two turns, in which the second request extends the tokens of the first exchange
        answers    ex_1 (2 tokens), ex_2 (2 tokens)
        tokens     P P P A A E B B      P P P A A E is the prompt of ex_2
    The prompt of an exchange holds everything before its answer, so the last exchange holds the whole path.
    """

    sample_id: str
    rollout_id: str
    answers: list[PlannedAnswer]
    """The answers in the order of the tokens; at least one."""
    weight: float
    """Factor of every token's loss."""
    share: float | None
    """What the sample adds to the divisor of the summed loss. `None` adds `weight` per token, which gives a mean."""
    policy_version: int
    """Step of the oldest weights that sampled one of the answers."""
    group_id: str | None = None
    """The group of the rollout."""
    teacher_logprobs: list[float] | None = None  # [T] for distillation


def build_samples(planned: Sequence[PlannedSample], recorder: Recorder) -> list[TrainingSample]:
    """Look up the exchanges of the samples, and lay out their tokens.

    Raises:
        NotFoundError: an exchange is not recorded any more.
    """
    ids = sorted({answer.exchange_id for sample in planned for answer in sample.answers})
    exchanges = dict(zip(ids, recorder.get(ids), strict=True))
    return [_build(sample, [exchanges[answer.exchange_id] for answer in sample.answers]) for sample in planned]


def _build(planned: PlannedSample, exchanges: list[Exchange]) -> TrainingSample:
    token_ids = exchanges[-1].prompt_token_ids + exchanges[-1].completion_token_ids
    size = len(token_ids)
    loss_mask, logprobs, advantages = [False] * size, [0.0] * size, [0.0] * size
    for answer, exchange in zip(planned.answers, exchanges, strict=True):
        start = len(exchange.prompt_token_ids)
        end = start + answer.num_tokens
        loss_mask[start:end] = [True] * answer.num_tokens
        logprobs[start:end] = exchange.sampling_logprobs
        advantages[start:end] = answer.token_advantages()
    return TrainingSample(
        sample_id=planned.sample_id,
        rollout_id=planned.rollout_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampling_logprobs=logprobs,
        advantages=advantages,
        weight=planned.weight,
        share=planned.share,
        temperature=exchanges[0].temperature,
        policy_version=planned.policy_version,
        group_id=planned.group_id,
        teacher_logprobs=planned.teacher_logprobs,
        constraints=[
            span
            for answer, exchange in zip(planned.answers, exchanges, strict=True)
            if (span := _constrained_span(answer, exchange)) is not None
        ],
    )


def _constrained_span(answer: PlannedAnswer, exchange: Exchange) -> ConstrainedSpan | None:
    constraint = exchange.constraint
    if constraint is None or answer.num_tokens == 0:
        return None
    if constraint.kept is not None:
        constraint = replace(constraint, kept=constraint.kept[: answer.num_tokens])
    return ConstrainedSpan(start=len(exchange.prompt_token_ids), num_tokens=answer.num_tokens, constraint=constraint)
