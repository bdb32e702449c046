"""The samples of a step: first as references to recorded exchanges, then as the tokens that the trainer learns from.

A queued job stores `PlannedSample`s. They hold no tokens, because the recorder has them already. `build_samples` makes
the `TrainingSample`s when the job runs. Policies that a loss compares the trained one with are checkpoints of the same
model, and a teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.config import DistillConfig, TrainConfig
from art.engine import Engine
from art.errors import ConfigError, TrajectoryError
from art.gateway.policies import PolicyRef
from art.protocol.compact import SpanValues
from art.protocol.samples import ConstrainedSpan, TrainingSample
from art.record.recorded_answers import RecordedAnswer
from art.record.recorder import Recorder
from art.storage import checkpoints
from art.storage.layout import ModelPaths

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
    """Look up the exchanges of the samples. The record is read in parts, so that of their answers no more than the
    tokens of all samples is ever in memory.

    Raises:
        NotFoundError: an exchange is not recorded any more.
        TrajectoryError: an exchange has fewer log-probs than trained tokens.
    """
    samples: list[TrainingSample] = []
    for first in range(0, len(planned), _AT_ONCE):
        part = planned[first : first + _AT_ONCE]
        ids = sorted({answer.exchange_id for sample in part for answer in sample.answers})
        recorded = recorder.get_answers(ids)
        for sample in part:
            exchanges = [recorded[answer.exchange_id] for answer in sample.answers]
            made = _build(sample, exchanges)
            tokens = np.concatenate([exchanges[-1].prompt_token_ids, exchanges[-1].completion_token_ids])
            samples.append(replace(made, token_ids=SpanValues.whole(tokens[: len(made.loss_mask)])))
    return samples


def _build(planned: PlannedSample, exchanges: list[RecordedAnswer]) -> TrainingSample:
    """Make a sample without its tokens."""
    sample = TrainingSample(
        sample_id=planned.sample_id,
        rollout_id=planned.rollout_id,
        token_ids=(),
        loss_mask=(),
        sampling_logprobs=(),
        advantages=(),
        weight=planned.weight,
        share=planned.share,
        policy_version=planned.policy_version,
        group_id=planned.group_id,
    )
    if planned.observed is not None:
        size, spans = len(exchanges[-1].prompt_token_ids), np.asarray(planned.observed, dtype=np.int64)
        num_tokens = int((spans[:, 1] - spans[:, 0]).sum())
        zeros = SpanValues(size, spans, np.zeros(num_tokens))
        mask = SpanValues(size, spans, np.ones(num_tokens, dtype=np.bool_))
        return replace(sample, loss_mask=mask, sampling_logprobs=zeros, advantages=zeros, component="observation")
    answers = [pair for pair in zip(planned.answers, exchanges, strict=True) if pair[0].num_tokens > 0]
    size = len(exchanges[-1].prompt_token_ids) + len(exchanges[-1].completion_token_ids)
    starts = [len(exchange.prompt_token_ids) for _, exchange in answers]
    ends = [start + answer.num_tokens for start, (answer, _) in zip(starts, answers, strict=True)]
    spans = np.asarray([starts, ends], dtype=np.int64).T

    def values(parts: list[NDArray[Any]]) -> SpanValues:
        return SpanValues(size, spans, np.concatenate(parts) if parts else np.zeros(0))

    # Where the step that sampled changes along the path: the first token of each part, and its step.
    versions: list[tuple[int, int]] = []
    logprobs: list[NDArray[np.float64]] = []
    for start, (answer, exchange) in zip(starts, answers, strict=True):
        for version, num_tokens in exchange.parts():
            if not versions or versions[-1][1] != version:
                versions.append((start, version))
            start += num_tokens
        logprobs.append(exchange.sampling_logprobs[: answer.num_tokens])
        if len(logprobs[-1]) != answer.num_tokens:
            raise TrajectoryError(
                f"sample {planned.sample_id!r} trains {answer.num_tokens} tokens of exchange {exchange.id}, which has "
                f"{len(logprobs[-1])} sampling log-probs; its record is damaged"
            )
    teacher = None
    if planned.teacher_logprobs is not None:
        teacher = SpanValues(size, spans, np.asarray(planned.teacher_logprobs, dtype=np.float64))
    return replace(
        sample,
        loss_mask=values([np.ones(answer.num_tokens, dtype=np.bool_) for answer, _ in answers]),
        sampling_logprobs=values(logprobs),
        advantages=values([answer.token_advantages() for answer, _ in answers]),
        temperature=exchanges[0].temperature,
        versions=versions if len(versions) > 1 else [],
        teacher_logprobs=teacher,
        constraints=[
            ConstrainedSpan(
                start=start,
                num_tokens=answer.num_tokens,
                constraint=replace(constraint, kept=constraint.kept and constraint.kept[: answer.num_tokens]),
            )
            for start, (answer, exchange) in zip(starts, answers, strict=True)
            if (constraint := exchange.constraint) is not None
        ],
    )


def reference_checkpoints(config: TrainConfig, paths: ModelPaths) -> dict[int, Path]:
    """Find the checkpoints that the loss compares with. Returns their paths by step.

    Raises:
        ConfigError: a checkpoint does not exist.
    """
    references = {}
    for step in {getattr(term, "reference", None) for term in config.terms}:
        if not isinstance(step, int):
            continue
        path = paths.checkpoint(step)
        if not path.exists():
            steps = ", ".join(map(str, checkpoints.list_steps(paths.checkpoints)))
            raise ConfigError(
                f"the loss compares with checkpoint {step}, which does not exist; there are {steps}", param="loss"
            )
        references[step] = path
    return references


def teacher_name(config: TrainConfig) -> str | None:
    """Return the model name of the teacher that the loss `distill` learns from; `None` without that loss."""
    return next((term.teacher for term in config.terms if isinstance(term, DistillConfig)), None)


async def ask_teacher(teacher: PolicyRef, own: Engine, samples: list[TrainingSample]) -> list[list[float]]:
    """Ask the teacher for the log-prob of every learnt token of each sample. Each list has one per such token.

    Args:
        own: the engine that sampled the samples.

    Raises:
        ConfigError: teacher and policy have vocabularies of different sizes.
        TrajectoryError: a sample was not sampled at temperature 1 and from the whole vocabulary, as teachers are asked.
    """
    name = f"{teacher.project}/{teacher.name}@{teacher.policy_version}"
    own_size, teacher_size = (await own.info()).vocab_size, (await teacher.engine.info()).vocab_size
    if own_size != teacher_size:
        raise ConfigError(
            f"teacher {name} has a vocabulary of {teacher_size} tokens and the policy one of {own_size}; distillation "
            "token by token needs the same tokenizer",
            param="loss",
        )
    if warm := [sample for sample in samples if sample.temperature != 1]:
        raise TrajectoryError(
            f"{warm[0].sample_id} was sampled at temperature {warm[0].temperature}; distillation compares with the "
            "teacher at temperature 1"
        )
    if narrow := [sample for sample in samples if sample.constraints]:
        raise TrajectoryError(
            f"{narrow[0].sample_id} has an answer that was drawn from a part of the vocabulary (by a grammar, top_k, "
            "top_p or min_p); distillation compares with the teacher over the whole vocabulary. Sample rollouts for "
            "distillation without constraints"
        )

    async def ask(sample: TrainingSample) -> list[float]:
        scores = [0.0, *await teacher.engine.score(list(sample.token_ids), teacher.adapter)]
        return [score for score, is_learnt in zip(scores, sample.loss_mask, strict=True) if is_learnt]

    return list(await asyncio.gather(*map(ask, samples)))
