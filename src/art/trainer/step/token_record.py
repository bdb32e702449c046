"""Collect what a step knew of each target, for the step's token file (`art.storage.steps.token_file`).

Every target is trained in exactly one update, so there is one pass to record. Each process records its micro-batches,
and all records meet in the step's `StepRecord`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.config import DpoConfig, TrainConfig
from art.errors import StorageError
from art.protocol.calls import Train, TrainSft
from art.protocol.compact.sequences import spans_of
from art.protocol.samples import COMPONENTS
from art.storage.steps.token_file import RecordedSample, StepTokens, TokenReason, write_token_file
from art.trainer.step.step_metrics import MicroBatchRecord, StepRecord, join_records
from art.trainer.step.update import Update, sum_shares
from art.trainer.tree.tree import SamplePath, sort_paths

_log = logging.getLogger(__name__)

_COLUMN_FROM = 0.25
"""Runs of equal advantages per target above which a column of 2 bytes per target is smaller than the runs."""


def write_tokens(call: Train | TrainSft, tokens: StepTokens) -> list[str]:
    """Write the token file of a step. A failure never fails the step: it is logged, and returned as a finding."""
    assert call.record_to is not None
    try:
        write_token_file(call.record_to, tokens)
    except StorageError as error:
        _log.warning("the token file of job %s was not written: %s", call.job_id, error)
        return [f"the log-probs of this step's tokens could not be kept for the page: {error}"]
    return []


def collect_tokens(
    call: Train | TrainSft,
    record: StepRecord,
    updates: Sequence[Update],
    refused: Sequence[SamplePath],
    *,
    from_step: int,
    branches: bool,
) -> StepTokens:
    """Bring the targets of all micro-batches into the depth-first order of the step's prefix tree.

    Args:
        updates: the updates of the step, whose samples have the layout of the whole step.
        refused: samples that could not be replayed and were not trained.
        branches: whether the trainer shares what branching paths have in common.
    """
    joined = join_records(record.micro_batches)
    order = np.argsort(joined.ranks, kind="stable").astype(np.int64)
    targets = joined.where(order)
    passes = {
        int(rank): number for number, part in enumerate(record.micro_batches) for rank in np.unique(part.ranks).tolist()
    }
    columns = _columns(targets, is_dpo=isinstance(call.config, TrainConfig) and _is_dpo(call.config))
    runs = _advantage_runs(targets)
    if sum(map(len, runs)) > _COLUMN_FROM * len(targets):
        columns["advantages"] = targets.advantages.astype(np.float16)
        runs = [[] for _ in runs]
    samples = _samples(updates, passes, runs, branches=branches)
    samples += [_describe(path, len(updates), is_refused=True) for path in refused]
    return StepTokens(job_id=call.job_id, from_step=from_step, samples=samples, columns=columns)


def _is_dpo(config: TrainConfig) -> bool:
    return any(isinstance(term, DpoConfig) for term in config.terms)


def _columns(targets: MicroBatchRecord, *, is_dpo: bool) -> dict[str, NDArray[Any]]:
    policy, reasons = targets.policy_logprobs, targets.reasons
    is_rl = targets.components == COMPONENTS.index("rl")
    if is_dpo:
        unpaired = is_rl & (reasons == TokenReason.NO_ADVANTAGE)
        reasons = np.where(unpaired, np.uint8(TokenReason.UNPAIRED), reasons)
    columns: dict[str, NDArray[Any]] = {
        "policy_logprobs": policy.astype(np.float16),
        # Other components were not sampled: they have no ratio.
        "log_ratios": np.where(is_rl, policy - targets.sampling_logprobs, np.nan).astype(np.float16),
        "entropy": targets.entropy.astype(np.float16),
        "reasons": reasons,
    }
    if (is_rl & (targets.anchor_logprobs != targets.sampling_logprobs)).any():
        anchored = np.where(is_rl, policy - targets.anchor_logprobs, np.nan)
        columns["anchor_ratios"] = anchored.astype(np.float16)
    return columns


def _advantage_runs(targets: MicroBatchRecord) -> list[list[list[float]]]:
    """Runs of equal advantages of each sample: [value, number of targets]. `targets` are ordered by sample."""
    runs = []
    first = np.flatnonzero(np.diff(targets.ranks, prepend=-1))
    for advantages in np.split(targets.advantages, first[1:]):
        starts = np.flatnonzero(np.append(True, advantages[1:] != advantages[:-1]))
        counts = np.diff(np.append(starts, len(advantages)))
        runs.append([[float(advantages[start]), int(count)] for start, count in zip(starts, counts, strict=True)])
    return runs


def _samples(
    updates: Sequence[Update], passes: dict[int, int], runs: list[list[list[float]]], *, branches: bool
) -> list[RecordedSample]:
    """Describe the samples of all updates in the order of their ranks; `runs` are in that order too."""
    paths = list(itertools.chain.from_iterable(update.paths for update in updates))
    numbers = list(itertools.chain.from_iterable([n] * len(update.paths) for n, update in enumerate(updates)))
    shares = [sum_shares(update.paths) for update in updates]
    order, shared = sort_paths(paths, branches=branches)
    samples = []
    for place, (index, depth) in enumerate(zip(order, shared, strict=True)):
        path, update = paths[index], numbers[index]
        total = shares[update][COMPONENTS.index(path.sample.component)]
        samples.append(
            _describe(
                path,
                update,
                shared=depth,
                scale=float(path.sample.weight / total),
                micro_batch=passes[path.tokens.rank],
                advantages=runs[place],
            )
        )
    return samples


def _describe(path: SamplePath, update: int, **fields: Any) -> RecordedSample:
    sample = path.sample
    defaults: dict[str, Any] = {"shared": 0, "scale": 0.0, "micro_batch": -1}
    return RecordedSample(
        sample_id=sample.sample_id,
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        component=sample.component,
        num_inputs=path.num_tokens,
        spans=spans_of(sample.loss_mask).tolist(),
        weight=sample.weight,
        temperature=sample.temperature,
        policy_version=sample.policy_version,
        update=update,
        **defaults | fields,
    )
