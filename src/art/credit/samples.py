"""The samples of a step: first as references to recorded exchanges, then as the tokens that the trainer learns from.

A queued job stores `PlannedSample`s. They hold no tokens, because the recorder has them already. `build_samples` makes
the `TrainingSample`s when the job runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.errors import TrajectoryError
from art.gateway.record.recorded_answers import RecordedAnswer
from art.gateway.record.recorder import Recorder
from art.protocol.compact.layout import LayoutBuilder
from art.protocol.compact.sequences import SpanValues, spans_of
from art.protocol.samples import ConstrainedSpan, TrainingSample

_AT_ONCE = 256
"""Samples whose exchanges are read from the record at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """One recorded answer of a sample, and the advantages of its tokens."""

    exchange_id: str
    num_tokens: int
    advantages: list[float]
    """One per sampled token, or a single one that all of them share."""

    def token_advantages(self) -> NDArray[np.float64]:  # [num_tokens]
        advantages = np.asarray(self.advantages, dtype=np.float64)
        return np.repeat(advantages, self.num_tokens) if len(advantages) == 1 else advantages


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
    teacher_logprobs: list[float] | None = None  # for distillation: one per sampled token of the answers
    observed: list[tuple[int, int]] | None = None
    """Where observations begin and end on the token path, for a sample that learns these and none of the answers."""


def build_samples(planned: Sequence[PlannedSample], recorder: Recorder) -> list[TrainingSample]:
    """Look up the exchanges of the samples, and lay out their tokens, shared ones once.

    The record is read in parts: of all token paths, only what they do not share is ever in memory.

    Raises:
        NotFoundError: an exchange is not recorded any more.
        TrajectoryError: an exchange has fewer log-probs than trained tokens.
    """
    builder, samples = LayoutBuilder(), list[TrainingSample]()
    for first in range(0, len(planned), _AT_ONCE):
        part = planned[first : first + _AT_ONCE]
        ids = sorted({answer.exchange_id for sample in part for answer in sample.answers})
        recorded = recorder.get_answers(ids)
        for sample in part:
            exchanges = [recorded[answer.exchange_id] for answer in sample.answers]
            made = _build(sample, exchanges)
            tokens = np.concatenate([exchanges[-1].prompt_token_ids, exchanges[-1].completion_token_ids])
            tokens = tokens[: len(made.loss_mask)]
            spans = spans_of(made.loss_mask)
            builder.add(tokens, int(spans[-1, 1]) - 1 if len(spans) else len(tokens), made.sample_id)
            samples.append(made)
    return [replace(made, token_ids=path) for made, path in zip(samples, builder.build(), strict=True)]


def _build(planned: PlannedSample, exchanges: list[RecordedAnswer]) -> TrainingSample:
    """Make a sample without its tokens."""
    if planned.observed is not None:
        return _build_observed(planned, len(exchanges[-1].prompt_token_ids))
    answers = [pair for pair in zip(planned.answers, exchanges, strict=True) if pair[0].num_tokens > 0]
    teacher = None if planned.teacher_logprobs is None else np.asarray(planned.teacher_logprobs, dtype=np.float64)
    size = len(exchanges[-1].prompt_token_ids) + len(exchanges[-1].completion_token_ids)
    starts = [len(exchange.prompt_token_ids) for _, exchange in answers]
    ends = [start + answer.num_tokens for start, (answer, _) in zip(starts, answers, strict=True)]
    spans = np.asarray([starts, ends], dtype=np.int64).T

    def values(parts: list[NDArray[Any]]) -> SpanValues:
        return SpanValues(size, spans, np.concatenate(parts) if parts else np.zeros(0))

    return TrainingSample(
        sample_id=planned.sample_id,
        rollout_id=planned.rollout_id,
        token_ids=(),
        loss_mask=values([np.ones(answer.num_tokens, dtype=np.bool_) for answer, _ in answers]),
        sampling_logprobs=values([_logprobs(planned, answer, exchange) for answer, exchange in answers]),
        advantages=values([answer.token_advantages() for answer, _ in answers]),
        weight=planned.weight,
        share=planned.share,
        temperature=exchanges[0].temperature,
        policy_version=planned.policy_version,
        versions=_versions([exchange for _, exchange in answers]),
        group_id=planned.group_id,
        teacher_logprobs=None if teacher is None else SpanValues(size, spans, teacher),
        constraints=[span for answer, exchange in answers if (span := _constrained_span(answer, exchange)) is not None],
    )


def _build_observed(planned: PlannedSample, size: int) -> TrainingSample:
    """Make a sample of the observations in a prompt of `size` tokens, without its tokens."""
    spans = np.asarray(planned.observed, dtype=np.int64)
    num_tokens = int((spans[:, 1] - spans[:, 0]).sum())
    zeros = SpanValues(size, spans, np.zeros(num_tokens))
    return TrainingSample(
        sample_id=planned.sample_id,
        rollout_id=planned.rollout_id,
        token_ids=(),
        loss_mask=SpanValues(size, spans, np.ones(num_tokens, dtype=np.bool_)),
        sampling_logprobs=zeros,
        advantages=zeros,
        weight=planned.weight,
        share=planned.share,
        policy_version=planned.policy_version,
        group_id=planned.group_id,
        component="observation",
    )


def _versions(exchanges: list[RecordedAnswer]) -> list[tuple[int, int]]:
    """The first tokens of the parts of a path that different steps sampled; empty if one step sampled all."""
    changes: list[tuple[int, int]] = []
    for exchange in exchanges:
        start = len(exchange.prompt_token_ids)
        for version, num_tokens in exchange.parts():
            if not changes or changes[-1][1] != version:
                changes.append((start, version))
            start += num_tokens
    return changes if len(changes) > 1 else []


def _logprobs(planned: PlannedSample, answer: PlannedAnswer, exchange: RecordedAnswer) -> NDArray[np.float64]:
    logprobs = exchange.sampling_logprobs[: answer.num_tokens]
    if len(logprobs) != answer.num_tokens:
        raise TrajectoryError(
            f"sample {planned.sample_id!r} trains {answer.num_tokens} tokens of exchange {exchange.id}, which has "
            f"{len(logprobs)} sampling log-probs; its record is damaged"
        )
    return logprobs


def _constrained_span(answer: PlannedAnswer, exchange: RecordedAnswer) -> ConstrainedSpan | None:
    constraint = exchange.constraint
    if constraint is None:
        return None
    if constraint.kept is not None:
        constraint = replace(constraint, kept=constraint.kept[: answer.num_tokens])
    return ConstrainedSpan(start=len(exchange.prompt_token_ids), num_tokens=answer.num_tokens, constraint=constraint)
