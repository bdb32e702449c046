"""Answers what the page asks about tokens: those of a rollout, and the prefix tree of a step.

record of exchanges  -> token ids, sampling log-probs, who wrote what, policy version
plan of the step     -> whether the rollout was trained, its advantage
token file           -> policy log-prob, entropy, ratio, advantage, weight and fate of each token
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from art.errors import NotFoundError, StorageError
from art.gateway.tokenizer import Tokenizer
from art.storage.layout import ModelPaths
from art.storage.step_files import PlanRecord, RecordedSample, RolloutPlan, TokenFile, TokenReason, read_plans
from art_page import conversation as talk
from art_page.conversation import Row
from art_page.databases import ReadOnlyDatabase
from art_page.index_files import TRAIN, read_line
from art_page.rollout_answers import (
    MAX_TOKENS,
    PathInfo,
    RepeatedRequest,
    RolloutKey,
    RolloutTokens,
    SpanRole,
    TokenSpan,
    TokensQuery,
    TreeAnswer,
    TreeQuery,
)
from art_page.rollouts import find_row, member
from art_page.run_files import RunFiles
from art_page.token_paths import (
    Alternatives,
    ExchangePath,
    TokenTexts,
    join_paths,
    read_alternatives,
    read_branch_reasons,
    read_exchanges,
    role_between,
    token_texts,
)
from art_page.tree import StepTree, describe_tree, no_tree

_MOST_TREES = 4
"""Trees that stay in memory: some MB each for steps of thousands of paths."""
_NAMES = ("sampling_logprob", "policy_logprob", "entropy", "importance_ratio", "advantage", "weight")
_NO_FATE = -1
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
_OUTSIDE: dict[SpanRole, str] = {
    "prompt": "prompt",
    "tool": "tool answer",
    "user": "user message",
    "context": "context: not sampled by this model",
}
"""Why tokens that the policy did not sample are not trained."""


@dataclass(slots=True, kw_only=True)
class RolloutTraining:
    """What one training job did with a rollout."""

    plan: PlanRecord
    rollout: RolloutPlan
    file: TokenFile | None
    """`None` where the step wrote no token file, or it has been deleted."""


def find_training(paths: ModelPaths, step: int, exchange_ids: Sequence[str]) -> RolloutTraining | None:
    """Find the job that was given the rollout with these exchanges; `None` if none is recorded.

    Args:
        step: step under which the rollout was logged. Scripts log before or after they train, so the steps beside it
            are looked at too. A job that trained comes before one that did not.
    """
    named = set(exchange_ids)
    jobs = [
        (plan, rollout)
        for number in (step, step + 1, step - 1)
        if number >= 0
        for plan in read_plans(paths.step(number))
        for group in plan.groups
        for rollout in group.rollouts
        if any(not named.isdisjoint(path) for path in rollout.exchange_ids)
    ]
    if not jobs:
        return None
    plan, rollout = min(jobs, key=lambda job: not job[0].trained)
    return RolloutTraining(plan=plan, rollout=rollout, file=open_token_file(paths, plan))


def open_token_file(paths: ModelPaths, plan: PlanRecord) -> TokenFile | None:
    """Open the token file that a job wrote; `None` if there is none."""
    try:
        file = TokenFile(paths.step(plan.step)) if plan.trained else None
    except StorageError:
        return None
    return file if file is not None and file.job_id == plan.job_id else None


@dataclass(slots=True)
class _Path:
    """One token path with everything that is known of its tokens. Arrays are [T]."""

    exchanges: ExchangePath
    token_ids: list[int]
    segments: list[TokenSpan]
    """Who wrote what. `trained` and `reason` are as if no step had been given the tokens."""
    values: dict[str, NDArray[np.float64]]
    fate: NDArray[np.int16]
    """`TokenReason`, or -1 for tokens that are no targets."""
    update: int | None = None
    spans: list[TokenSpan] = field(default_factory=list)
    """The segments, cut where the fate of their tokens changes."""


def describe_tokens(
    paths: Sequence[ExchangePath],
    training: RolloutTraining | None,
    tokenizer: Tokenizer | None,
    query: TokensQuery,
    *,
    model: tuple[str, str],
    missing: Sequence[str] = (),
    alternatives: Mapping[str, Alternatives] = {},
) -> RolloutTokens:
    """Describe the tokens of one path of a rollout.

    Args:
        paths: the rollout's token paths, as far as they are still recorded.
        model: project and name of the run.
        missing: sentences about what is not known.
        alternatives: the most likely tokens of answers, by the id of the exchange.

    Raises:
        NotFoundError: the rollout has no such path.
    """
    notes = list(missing)
    if not paths:
        return RolloutTokens(
            paths=[], path=query.path, first=0, token_ids=[], texts=[], is_special=[], spans=[], values={},
            step=None if training is None else training.plan.step,
            missing=" ".join(notes) or "No token of this rollout is recorded here.",
        )  # fmt: skip
    if query.path >= len(paths):
        raise NotFoundError(f"the rollout has {len(paths)} token paths; there is no path {query.path}", param="path")
    described = [_describe_path(path, training, model) for path in paths]
    path = described[query.path]
    num_tokens = len(path.token_ids)
    first = min(query.first, num_tokens)
    last = max(first, min(num_tokens if query.last is None else query.last, num_tokens, first + MAX_TOKENS))
    texts: list[str | None] = [None] * (last - first)
    special: set[int] = set()
    if tokenizer is None:
        notes.append("The tokenizer of the base model is not on this machine, so the tokens have no texts.")
    else:
        start = max(0, first - 3)  # a few tokens before the first may hold the beginning of its character
        texts = [*token_texts(tokenizer, path.token_ids[start:last])[first - start :]]
        added = tokenizer.backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
    return RolloutTokens(
        paths=[_path_info(number, one) for number, one in enumerate(described)],
        path=query.path, first=first, token_ids=[*path.token_ids[first:last]], texts=texts,
        is_special=[token_id in special for token_id in path.token_ids[first:last]],
        spans=[span for span in path.spans if span.end > first and span.start < last],
        values={
            name: [None if np.isnan(value) else float(value) for value in column[first:last]]
            for name, column in path.values.items()
            if not np.isnan(column).all()
        },
        alternatives={
            start + place: [(token, None if tokenizer is None else one_text(tokenizer, token), x) for token, x in best]
            for answer in path.exchanges.answers
            for start in [len(answer.prompt_token_ids)]
            for place, best in enumerate(alternatives.get(answer.id, ()))
            if first <= start + place < last
        },
        step=None if training is None else training.plan.step, update=path.update, missing=" ".join(notes) or None,
    )  # fmt: skip


def one_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token by itself. Bytes of half a character give a replacement character."""
    return tokenizer.token_bytes[token].decode("utf-8", "replace")


def _describe_path(exchanges: ExchangePath, training: RolloutTraining | None, model: tuple[str, str]) -> _Path:
    tokens = exchanges.token_ids()
    values = {name: np.full(len(tokens), np.nan) for name in _NAMES}
    segments: list[TokenSpan] = []
    done = 0
    for number, answer in enumerate(exchanges.answers):
        start, end = len(answer.prompt_token_ids), len(answer.prompt_token_ids) + len(answer.completion_token_ids)
        if start > done:
            role = "prompt" if number == 0 else role_between(exchanges.answers[number - 1], answer)
            segments.append(
                TokenSpan(start=done, end=start, role=role, sampled=False, trained=False, reason=_OUTSIDE[role])
            )
        is_own = (answer.project, answer.name) == model
        reason = "no step is known that was given this rollout" if is_own else _OUTSIDE["context"]
        first = start
        for version, num_tokens in answer.parts():  # several where weights changed during the answer
            span = TokenSpan(
                start=first, end=first + num_tokens, role="policy" if is_own else "context", exchange_id=answer.id,
                policy_version=version, sampled=True, trained=False, reason=reason,
            )  # fmt: skip
            segments.append(span)
            first += num_tokens
        values["sampling_logprob"][start : start + len(answer.sampling_logprobs)] = answer.sampling_logprobs
        done = end
    fate = np.full(len(tokens), _NO_FATE, dtype=np.int16)
    path = _Path(exchanges, tokens.tolist(), segments, values, fate)
    if training is not None:
        _add_training(path, training)
    for segment in path.segments:
        fates = path.fate[segment.start : segment.end]
        edges = [0, *(np.flatnonzero(np.diff(fates)) + 1).tolist(), len(fates)]
        for begin, end in itertools.pairwise(edges):
            changes: dict[str, object] = {"start": segment.start + begin, "end": segment.start + end}
            if begin < end and fates[begin] != _NO_FATE:
                fate_of_run = TokenReason(int(fates[begin]))
                is_observed = fate_of_run.is_learnt and not segment.sampled
                changes["reason"] = "learnt as observation" if is_observed else REASONS[fate_of_run]
                changes["trained"] = fate_of_run.is_learnt
            if begin < end:
                path.spans.append(segment.model_copy(update=changes))
    return path


def _add_training(path: _Path, training: RolloutTraining) -> None:
    """Add what the step knew of the path's tokens, and say why tokens were left out."""
    rollout, exchange_ids = training.rollout, path.exchanges.exchange_ids
    if exchange_ids not in rollout.exchange_ids:
        return
    has_answers = False
    if training.file is not None:
        # A path has one sample for its answers, and perhaps one for what was learnt as observation.
        name = f"{rollout.label}.paths[{rollout.exchange_ids.index(exchange_ids)}]"
        for number, sample in enumerate(training.file.samples):
            if sample.rollout_id == rollout.label and sample.sample_id in (name, f"{name}.observations"):
                _add_sample(path, sample, training.file.read(number))
                has_answers |= sample.component == "rl"
    if has_answers:
        return
    dropped = rollout.dropped_because
    reason = "trained; which of its tokens were masked is not known any more"
    if dropped is not None:
        reason = DROPPED.get(dropped, f"dropped: {dropped.replace('_', ' ')}")
    for number, segment in enumerate(path.segments):
        if segment.role == "policy":
            path.segments[number] = segment.model_copy(update={"trained": dropped is None, "reason": reason})
            if dropped is None and rollout.advantage is not None:
                path.values["advantage"][segment.start : segment.end] = rollout.advantage


def _add_sample(path: _Path, sample: RecordedSample, columns: dict[str, NDArray[Any]]) -> None:
    """Put the values of a sample's targets at their places on the path."""
    places = np.concatenate([np.arange(start, end) for start, end in sample.spans])
    inside = places < len(path.token_ids)
    places = places[inside]
    if sample.is_refused:
        path.fate[places] = TokenReason.REFUSED
        return
    columns = {name: column[inside] for name, column in columns.items()}
    path.fate[places] = columns["reasons"]
    policy, log_ratio = (columns[name].astype(np.float64) for name in ("policy_logprobs", "log_ratios"))
    path.values["policy_logprob"][places] = policy
    path.values["entropy"][places] = columns["entropy"]
    path.values["weight"][places] = sample.scale
    if sample.component != "rl":
        return
    path.update = sample.update
    path.values["importance_ratio"][places] = np.exp(np.clip(log_ratio, -50, 50))
    path.values["advantage"][places] = columns["advantages"]
    unknown = np.isnan(path.values["sampling_logprob"][places])
    path.values["sampling_logprob"][places[unknown]] = (policy - log_ratio)[unknown]


def _path_info(number: int, path: _Path) -> PathInfo:
    branch = path.exchanges.branch
    return PathInfo(
        path=number, label=path.exchanges.label, num_tokens=len(path.token_ids),
        num_sampled=sum(span.end - span.start for span in path.spans if span.sampled),
        num_trained=sum(span.end - span.start for span in path.spans if span.trained),
        parent=None if branch is None else branch.parent, branches_at=0 if branch is None else branch.num_shared,
        branch_reason=None if branch is None else branch.reason,
    )  # fmt: skip


class TokenReader:
    """Reads tokens of the runs of a data directory. Any number of threads may share it."""

    def __init__(self, database: ReadOnlyDatabase) -> None:
        self._database = database
        self._texts = TokenTexts(database)
        self._trees: dict[tuple[str, str], StepTree] = {}
        self._lock = threading.Lock()

    def rollout(self, run: RunFiles, key: RolloutKey, query: TokensQuery) -> RolloutTokens:
        """Describe the tokens of one path of a rollout.

        Raises:
            NotFoundError: there is no such rollout, or it has no such path.
        """
        values = find_row(run, key)
        line = read_line(run.paths.trajectories(key.split, key.step), values["place"], values["length"])
        histories = [_exchange_ids(history) for history in talk.histories(member(line, key.index))]
        exchange_ids = list(dict.fromkeys(itertools.chain.from_iterable(histories)))
        recorded = read_exchanges(self._database, exchange_ids)
        training = find_training(run.paths, key.step, exchange_ids)
        return describe_tokens(
            join_paths(histories, recorded, read_branch_reasons(self._database, recorded)),
            training, self._texts.of_run(run.project, run.name, run.paths), query, model=(run.project, run.name),
            missing=_why_missing(run.paths, key, len(exchange_ids), len(recorded), training),
            alternatives=read_alternatives(self._database, recorded.values()),
        )  # fmt: skip

    def tree(self, run: RunFiles, step: int, query: TreeQuery) -> TreeAnswer:
        """Describe the prefix tree of a step as it was trained.

        Raises:
            NotFoundError: nothing is known of the step, or the tree has no such node.
        """
        plans = read_plans(run.paths.step(step))
        for plan in reversed(plans):
            if (file := open_token_file(run.paths, plan)) is None:
                continue
            try:
                tree = self._built(file, plan)
            except StorageError:  # retention deleted the file meanwhile
                return no_tree(step, "The token file of this step was just deleted: only newer steps keep theirs.")
            tokenizer = self._texts.of_run(run.project, run.name, run.paths)
            return describe_tree(tree, query, database=self._database, tokenizer=tokenizer, rollouts=_keys(run, step))
        if not plans and not run.paths.checkpoint(step).exists():
            raise NotFoundError(f"nothing is recorded of step {step} of {run.project}/{run.name}", param="step")
        if not plans and step == 0:
            return no_tree(step, "Step 0 is the model before training: nothing was learnt yet.")
        if plans and not any(plan.trained for plan in plans):
            return no_tree(step, "No step was trained here: none of the rollouts could be learnt from.")
        why = "it was trained by an older version, only newer steps keep theirs, or the file is damaged"
        return no_tree(step, f"This step has no token file: {why}.")

    def _built(self, file: TokenFile, plan: PlanRecord) -> StepTree:
        """Return the tree of a step, built at most once while it is looked at."""
        key = (str(file.path), file.job_id)
        with self._lock:
            tree = self._trees.pop(key, None) or StepTree.build(file, plan)
            self._trees[key] = tree
            for oldest in list(self._trees)[:-_MOST_TREES]:
                del self._trees[oldest]
        return tree


def tree_places(step: int) -> list[tuple[str, int]]:
    """Splits and steps that may have logged the rollouts of a step: scripts log before or after they train."""
    return [(TRAIN, number) for number in (step - 1, step) if number >= 0]


def _keys(run: RunFiles, step: int) -> dict[str, RolloutKey]:
    """The places of the rollouts around a step, by the first exchange of each."""
    rows = run.indexer.store.read(
        "SELECT first_exchange, step, grp, idx FROM rollouts WHERE run = ? AND split = ? "
        "AND first_exchange IS NOT NULL AND step IN (?, ?)",
        (run.number, TRAIN, step - 1, step),
    )
    return {
        exchange_id: RolloutKey(split=TRAIN, step=of_step, group=group, index=index)
        for exchange_id, of_step, group, index in rows
    }


def _exchange_ids(history: Row) -> list[str]:
    ids = (choice.get("exchange_id") for _, choice in talk.items(history) if choice is not None)
    return [one for one in ids if isinstance(one, str) and one]


def _why_missing(
    paths: ModelPaths, key: RolloutKey, num_named: int, num_recorded: int, training: RolloutTraining | None
) -> list[str]:
    """Sentences about what is not known of a rollout's tokens."""
    notes = []
    if not num_named:
        notes.append(
            "Nothing was recorded for this rollout: its answers name no exchange, as those of other servers and models "
            "do not."
        )
    elif gone := num_named - num_recorded:
        notes.append(
            f"{gone} of {num_named} exchanges (recorded requests and answers) of this rollout are not in the record: "
            "`record_retention_s` deletes old ones."
        )
    if training is not None and training.file is None and training.plan.trained and num_named:
        notes.append("The trainer's log-probs of this step have been deleted: only newer steps keep theirs.")
    if training is None and key.split == TRAIN and not read_plans(paths.step(key.step or 1)):
        notes.append(
            "What the step learnt from this rollout is not known: it was trained by an older version of ART, or the "
            "record in `steps/` is gone or damaged."
        )
    return notes


def repeated_request(run: RunFiles, database: ReadOnlyDatabase, key: RolloutKey, exchange_id: str) -> RepeatedRequest:
    """Make the request that gives a recorded answer of a rollout again.

    Raises:
        NotFoundError: there is no such rollout, or the answer is not recorded, or not one of the rollout.
    """
    row = find_row(run, key)
    content = member(read_line(run.paths.trajectories(key.split, key.step), row["place"], row["length"]), key.index)
    answer = read_exchanges(database, [exchange_id]).get(exchange_id)
    if answer is None or exchange_id not in talk.exchange_ids(content):
        raise NotFoundError(f"no exchange {exchange_id!r} of this rollout is recorded here", param="exchange")
    columns = database.read("SELECT seed, tools, constrained FROM exchanges WHERE id = ?", (exchange_id,))
    ((seed, tools, constrained),) = columns
    body: dict[str, Any] = {
        "model": f"{answer.project}/{answer.name}@{answer.policy_version}", "messages": answer.request_messages(),
        "temperature": answer.temperature, "top_p": answer.top_p, "seed": seed % 2**64,
    }  # fmt: skip
    if tools is not None:
        body["tools"] = orjson.loads(tools)
    if answer.finish_reason == "length":
        body["max_completion_tokens"] = len(answer.completion_token_ids)
    notes = []
    if len(answer.parts()) > 1:
        notes.append("The weights changed during the answer; this asks those of its beginning.")
    if constrained is not None:
        notes.append("A grammar limited the answer: add the tool_choice or response format that your agent sends.")
    return RepeatedRequest(body=body, notes=notes)
