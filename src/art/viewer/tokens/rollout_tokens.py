"""Brings together what is known of each token of a rollout.

record of exchanges  -> token ids, sampling log-probs, who wrote what, policy version
plan of the step     -> whether the rollout was trained, its advantage
token file           -> policy log-prob, entropy, ratio, advantage, weight and fate of each token
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.errors import NotFoundError, StorageError
from art.gateway.format.tokenizer import Tokenizer
from art.storage.layout import ModelPaths
from art.storage.steps.plan_record import GroupPlan, PlanRecord, RolloutPlan, read_plans
from art.storage.steps.token_file import RecordedSample, TokenFile, TokenReason
from art.viewer.rollout_answers import MAX_TOKENS, PathInfo, RolloutTokens, SpanRole, TokenSpan, TokensQuery
from art.viewer.tokens.exchanges import Branch, ExchangePath, role_between, special_ids, token_texts

REASONS = {
    TokenReason.TRAINED: "trained",
    TokenReason.TRUNCATED: "trained with a truncated importance weight",
    TokenReason.CAPPED: "trained with a capped ratio",
    TokenReason.CLIPPED: "not learnt: beyond the bound of the loss",
    TokenReason.NO_ADVANTAGE: "not learnt: advantage 0",
    TokenReason.NO_GRADIENT: "not learnt: the loss gives it no gradient",
    TokenReason.FORCED: "not learnt: the only token that was allowed",
    TokenReason.MISMATCHED_ROLLOUT: "masked: off-policy rollout",
    TokenReason.MISMATCHED_TOKEN: "masked: off-policy token",
    TokenReason.UNPAIRED: "masked: its counterpart was left out",
    TokenReason.REFUSED: "masked: the recorded constraint does not allow it",
}
DROPPED = {
    "no_reward_spread": "dropped: no spread of rewards in the group",
    "no_preference_pair": "dropped: in no preference pair",
    "truncated": "dropped: cut off by the token limit",
    "sampler_mismatch": "masked: off-policy",
    "constraint_mismatch": "masked: the recorded constraint does not allow it",
}


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """The values of the targets of one sample, and their places on the path."""

    sample: RecordedSample
    places: NDArray[np.int64]  # [N]
    values: dict[str, NDArray[Any]]  # [N] each


@dataclass(slots=True, kw_only=True)
class RolloutTraining:
    """What one training job did with a rollout."""

    plan: PlanRecord
    group: GroupPlan
    rollout: RolloutPlan
    file: TokenFile | None
    """`None` where the step wrote no token file, or it has been deleted."""
    by_id: dict[str, int] = field(default_factory=dict)
    """Number in the file of each of the rollout's samples, by id."""

    def samples(self, exchange_ids: Sequence[str]) -> list[TrainedSample]:
        """Return the samples of the path of these exchanges: its answers, and what was learnt as observation."""
        if self.file is None or list(exchange_ids) not in self.rollout.exchange_ids:
            return []
        name = f"{self.rollout.label}.paths[{self.rollout.exchange_ids.index(list(exchange_ids))}]"
        numbers = [self.by_id[one] for one in (name, f"{name}.observations") if one in self.by_id]
        return [self._read(number) for number in numbers]

    def _read(self, number: int) -> TrainedSample:
        assert self.file is not None
        sample = self.file.samples[number]
        places = np.concatenate([np.arange(start, end) for start, end in sample.spans])
        values = self.file.read(number)
        if sample.is_refused:
            values = {"reasons": np.full(len(places), int(TokenReason.REFUSED), dtype=np.uint8)}
        return TrainedSample(sample, places, values)

    def why_dropped(self) -> str | None:
        """Return why the whole rollout was left out; `None` if it was trained."""
        reason = self.rollout.dropped_because
        return None if reason is None else DROPPED.get(reason, f"dropped: {reason.replace('_', ' ')}")


def find_training(paths: ModelPaths, step: int, exchange_ids: Sequence[str]) -> RolloutTraining | None:
    """Find the job that was given the rollout with these exchanges; `None` if none is recorded.

    Args:
        step: step under which the rollout was logged. Scripts log before or after they train, so the steps beside it
            are looked at too. A job that trained comes before one that did not.
    """
    named = set(exchange_ids)
    jobs = [
        one
        for number in (step, step + 1, step - 1)
        if number >= 0
        for plan in read_plans(paths.step(number))
        for one in _find(plan, named)
    ]
    jobs.sort(key=lambda one: not one[0].trained)
    return None if not jobs else open_training(paths, *jobs[0])


def open_training(paths: ModelPaths, plan: PlanRecord, group: GroupPlan, rollout: RolloutPlan) -> RolloutTraining:
    """Bring a rollout of a plan together with the token file of its step."""
    training = RolloutTraining(plan=plan, group=group, rollout=rollout, file=open_token_file(paths, plan))
    if training.file is not None:
        samples = enumerate(training.file.samples)
        training.by_id = {one.sample_id: number for number, one in samples if one.rollout_id == rollout.label}
    return training


def open_token_file(paths: ModelPaths, plan: PlanRecord) -> TokenFile | None:
    """Open the token file that a job wrote; `None` if there is none."""
    try:
        file = TokenFile(paths.step(plan.step)) if plan.trained else None
    except StorageError:
        return None
    return file if file is not None and file.job_id == plan.job_id else None


def _find(plan: PlanRecord, named: set[str]) -> Iterator[tuple[PlanRecord, GroupPlan, RolloutPlan]]:
    for group in plan.groups:
        for rollout in group.rollouts:
            if any(not named.isdisjoint(path) for path in rollout.exchange_ids):
                yield plan, group, rollout


FloatArray = NDArray[np.float64]

_NAMES = ("sampling_logprob", "policy_logprob", "entropy", "importance_ratio", "advantage", "weight")
_NO_FATE = -1
_NO_TOKENIZER = (
    "The tokenizer of the base model is not on this machine, so only sampled tokens whose log-probs were logged have "
    "texts."
)
_UNTRAINED = "no step is known that was given this rollout"
_UNKNOWN_MASKS = "trained; which of its tokens were masked is not known any more"
_OUTSIDE: dict[SpanRole, str] = {
    "prompt": "prompt",
    "tool": "tool answer",
    "user": "user message",
    "context": "context: not sampled by this model",
}


@dataclass(slots=True)
class _Path:
    """One token path with everything that is known of its tokens. Arrays are [T]."""

    label: str
    num_tokens: int
    token_ids: Sequence[int] | None
    segments: list[TokenSpan]
    """Who wrote what. `trained` and `reason` are as if no step had been given the tokens."""
    values: dict[str, FloatArray]
    fate: NDArray[np.int16]
    """`TokenReason`, or -1 for tokens that are no targets."""
    update: int | None = None
    branch: Branch | None = None
    spans: list[TokenSpan] = field(default_factory=list)


def describe_tokens(
    paths: Sequence[ExchangePath],
    training: RolloutTraining | None,
    tokenizer: Tokenizer | None,
    query: TokensQuery,
    *,
    model: tuple[str, str],
    choice_texts: Mapping[str, Sequence[str]],
    missing: Sequence[str] = (),
) -> RolloutTokens:
    """Describe the tokens of one path of a rollout.

    Args:
        paths: the rollout's token paths, as far as they are still recorded.
        choice_texts: texts of sampled tokens by exchange, from the log-probs of logged choices. They take the place of
            a tokenizer that is not on this machine.
        model: project and name of the run.
        missing: sentences about what is not known.

    Raises:
        NotFoundError: the rollout has no such path.
    """
    made = [_from_exchanges(path, training, model) for path in paths]
    if not made and training is not None:
        made = _from_file(training)
    notes = list(missing)
    if not made:
        return _nothing(query, notes)
    if query.path >= len(made):
        raise NotFoundError(f"the rollout has {len(made)} token paths; there is no path {query.path}", param="path")
    path = made[query.path]
    first = min(query.first, path.num_tokens)
    last = min(path.num_tokens if query.last is None else query.last, path.num_tokens, first + MAX_TOKENS)
    part = slice(first, max(first, last))
    if tokenizer is None and path.token_ids is not None:
        notes.append(_NO_TOKENIZER)
    values = {name: _numbers(column[part]) for name, column in path.values.items() if not np.isnan(column).all()}
    return RolloutTokens(
        paths=[_info(number, one) for number, one in enumerate(made)],
        path=query.path,
        first=first,
        token_ids=[None] * (part.stop - first) if path.token_ids is None else list(path.token_ids[part]),
        texts=_texts(path, tokenizer, choice_texts, part),
        is_special=_are_special(path, tokenizer, part),
        spans=[span for span in path.spans if span.end > first and span.start < part.stop],
        values=values,
        step=None if training is None else training.plan.step,
        update=path.update,
        missing=" ".join(notes) or None,
    )


def _nothing(query: TokensQuery, notes: Sequence[str]) -> RolloutTokens:
    return RolloutTokens(
        paths=[], path=query.path, first=0, token_ids=[], texts=[], is_special=[], spans=[], values={},
        missing=" ".join(notes) or "No token of this rollout is recorded here.",
    )  # fmt: skip


def _from_exchanges(path: ExchangePath, training: RolloutTraining | None, model: tuple[str, str]) -> _Path:
    tokens = path.token_ids()
    values = {name: np.full(len(tokens), np.nan) for name in _NAMES}
    segments: list[TokenSpan] = []
    done = 0
    for number, answer in enumerate(path.answers):
        start, end = len(answer.prompt_token_ids), len(answer.prompt_token_ids) + len(answer.completion_token_ids)
        if start > done:
            role = "prompt" if number == 0 else role_between(path.answers[number - 1], answer)
            segments.append(
                TokenSpan(start=done, end=start, role=role, sampled=False, trained=False, reason=_OUTSIDE[role])
            )
        is_own = (answer.project, answer.name) == model
        first = start
        for version, num_tokens in answer.parts():
            segments.append(
                TokenSpan(
                    start=first,
                    end=first + num_tokens,
                    role="policy" if is_own else "context",
                    exchange_id=answer.id,
                    policy_version=version,
                    sampled=True,
                    trained=False,
                    reason=_UNTRAINED if is_own else _OUTSIDE["context"],
                )
            )
            first += num_tokens
        logprobs = answer.sampling_logprobs
        values["sampling_logprob"][start : start + len(logprobs)] = logprobs
        done = end
    made = _Path(path.label, len(tokens), tokens.tolist(), segments, values, _no_fate(len(tokens)), branch=path.branch)
    if training is not None:
        _add_training(made, training, path.exchange_ids)
    _split_spans(made)
    return made


def _from_file(training: RolloutTraining) -> list[_Path]:
    """Make the paths of a rollout whose exchanges are gone: places and values, without tokens."""
    made = []
    for number, exchange_ids in enumerate(training.rollout.exchange_ids):
        samples = training.samples(exchange_ids)
        size = max((int(one.places[-1]) + 1 for one in samples), default=0)
        if size == 0:
            continue
        segments = _segments_of_file(samples, size)
        values = {name: np.full(size, np.nan) for name in _NAMES}
        path = _Path(f"path {number}", size, None, segments, values, _no_fate(size))
        _add_training(path, training, exchange_ids)
        _split_spans(path)
        made.append(path)
    return made


def _segments_of_file(samples: Sequence[TrainedSample], size: int) -> list[TokenSpan]:
    sampled = np.zeros(size, dtype=np.bool_)
    for one in samples:
        if one.sample.component == "rl":
            sampled[one.places] = True
    version = max((one.sample.policy_version for one in samples), default=None)
    segments = []
    for start, end in _runs(sampled.astype(np.int16)):
        own = bool(sampled[start])
        segments.append(
            TokenSpan(
                start=start,
                end=end,
                role="policy" if own else "prompt",
                policy_version=version if own else None,
                sampled=own,
                trained=False,
                reason="trained" if own else _OUTSIDE["prompt"],
            )
        )
    return segments


def _add_training(path: _Path, training: RolloutTraining, exchange_ids: Sequence[str]) -> None:
    """Add what the step knew of the path's tokens, and say why tokens were left out."""
    samples = training.samples(exchange_ids)
    for one in samples:
        _add_sample(path, one)
    has_answers = any(one.sample.component == "rl" for one in samples)
    if has_answers or list(exchange_ids) not in training.rollout.exchange_ids:
        return
    dropped = training.why_dropped()
    for number, segment in enumerate(path.segments):
        if segment.role != "policy":
            continue
        changes = {"trained": dropped is None, "reason": dropped or _UNKNOWN_MASKS}
        path.segments[number] = segment.model_copy(update=changes)
        if dropped is None and training.rollout.advantage is not None:
            path.values["advantage"][segment.start : segment.end] = training.rollout.advantage


def _add_sample(path: _Path, one: TrainedSample) -> None:
    inside = one.places < path.num_tokens
    places, values = one.places[inside], {name: column[inside] for name, column in one.values.items()}
    path.fate[places] = values["reasons"]
    if one.sample.is_refused:
        return
    policy, log_ratio = (values[name].astype(np.float64) for name in ("policy_logprobs", "log_ratios"))
    path.values["policy_logprob"][places] = policy
    path.values["entropy"][places] = values["entropy"]
    path.values["weight"][places] = one.sample.scale
    if one.sample.component != "rl":
        return
    path.update = one.sample.update
    path.values["importance_ratio"][places] = np.exp(np.clip(log_ratio, -50, 50))
    path.values["advantage"][places] = values["advantages"]
    unknown = np.isnan(path.values["sampling_logprob"][places])
    path.values["sampling_logprob"][places[unknown]] = (policy - log_ratio)[unknown]


def _split_spans(path: _Path) -> None:
    """Cut the segments where the fate of their tokens changes."""
    for segment in path.segments:
        for start, end in _runs(path.fate[segment.start : segment.end]):
            code = int(path.fate[segment.start + start])
            changes: dict[str, object] = {"start": segment.start + start, "end": segment.start + end}
            if code != _NO_FATE:
                reason = TokenReason(code)
                learnt_text = REASONS[reason] if segment.sampled else "learnt as observation"
                changes |= {"trained": reason.is_learnt, "reason": learnt_text if reason.is_learnt else REASONS[reason]}
            path.spans.append(segment.model_copy(update=changes))


def _runs(values: NDArray[np.int16]) -> list[tuple[int, int]]:
    """Begin and end of each run of equal values."""
    if len(values) == 0:
        return []
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(itertools.pairwise(edges))


def _no_fate(size: int) -> NDArray[np.int16]:
    return np.full(size, _NO_FATE, dtype=np.int16)


def _info(number: int, path: _Path) -> PathInfo:
    sampled = sum(span.end - span.start for span in path.spans if span.sampled)
    trained = sum(span.end - span.start for span in path.spans if span.trained)
    info = PathInfo(path=number, label=path.label, num_tokens=path.num_tokens, num_sampled=sampled, num_trained=trained)
    if path.branch is not None:
        info.parent, info.branches_at = path.branch.parent, path.branch.num_shared
        info.branch_reason = path.branch.reason
    return info


def _texts(
    path: _Path, tokenizer: Tokenizer | None, choice_texts: Mapping[str, Sequence[str]], part: slice
) -> list[str | None]:
    """The texts of a part of the tokens: by the tokenizer, or else of those whose choices were logged with texts."""
    if path.token_ids is not None and tokenizer is not None:
        start = max(0, part.start - 3)  # a few tokens before the first may hold the beginning of its character
        return [*token_texts(tokenizer, path.token_ids[start : part.stop])[part.start - start :]]
    texts: list[str | None] = [None] * path.num_tokens
    for segment in path.segments:
        known = choice_texts.get(segment.exchange_id or "", ())
        if len(known) == segment.end - segment.start:
            texts[segment.start : segment.end] = known
    return texts[part]


def _are_special(path: _Path, tokenizer: Tokenizer | None, part: slice) -> list[bool]:
    if path.token_ids is None or tokenizer is None:
        return [False] * (part.stop - part.start)
    special = special_ids(tokenizer)
    return [token_id in special for token_id in path.token_ids[part]]


def _numbers(values: FloatArray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
