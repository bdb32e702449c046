"""What a step observed of its targets, and what is made of it: the step's metrics and its token file.

Every target is trained in exactly one update, so there is one pass to record. Each process records its micro-batches,
and all records meet in the step's `StepRecord`. `art.metrics.catalogue` explains each metric, `art.storage.step_files`
the token file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from art.config import DpoConfig, TrainConfig
from art.errors import StorageError
from art.protocol.calls import Train, TrainSft
from art.protocol.compact import spans_of
from art.protocol.samples import COMPONENTS, Component
from art.storage.step_files import RecordedSample, StepTokens, TokenReason, write_token_file
from art.trainer.gate import LogRatioSums
from art.trainer.tree import SamplePath, sort_paths, sum_shares

_log = logging.getLogger(__name__)

_RATIO_LOW, _RATIO_HIGH = 0.9, 1.1
"""Importance ratios outside of this range are counted."""
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class MicroBatchRecord:
    """What one forward and backward pass observed. All arrays are [N], one entry per target."""

    update: NDArray[np.int64]
    """Number of the optimiser update in the step, from 0."""
    policy_logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    entropy: NDArray[np.float32]
    clipped_low: NDArray[np.bool_]
    clipped_high: NDArray[np.bool_]
    components: NDArray[np.int8]
    """Index into `COMPONENTS`."""
    base_logprobs: NDArray[np.float32]
    """Log-probs under the base model, NaN where they were not measured."""
    anchor_logprobs: NDArray[np.float32]
    """Denominators of the importance ratios."""
    ranks: NDArray[np.int64]
    """Rank of the target's sample in the layout of the step. Targets of one sample follow one another."""
    reasons: NDArray[np.uint8]
    """`TokenReason`: whether the target was learnt, and if not, why."""

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> MicroBatchRecord:
        """Return the record of the targets for which `chosen` [N] is true, or of those with the indices `chosen`."""
        return MicroBatchRecord(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})

    def of(self, component: Component) -> MicroBatchRecord:
        """Return the record of the targets of a component."""
        return self.where(self.components == COMPONENTS.index(component))

    def __len__(self) -> int:
        return len(self.components)


@dataclass(frozen=True, slots=True)
class GateView:
    """What micro-batches saw of the R rollouts of an update, and what the gate decided by it."""

    sums: LogRatioSums
    masked: NDArray[np.bool_]  # [R]
    """Rollouts of which a micro-batch masked targets."""
    kept: NDArray[np.bool_]  # [R]
    """Rollouts of which a micro-batch kept targets."""

    def __add__(self, other: GateView) -> GateView:
        return GateView(self.sums + other.sums, self.masked | other.masked, self.kept | other.kept)


@dataclass(slots=True)
class StepRecord:
    """Measurements of a training step, from which its metrics are computed. They are added while it runs."""

    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # per update
    grad_norms: list[float] = field(default_factory=list)  # per update
    num_tree_tokens: int = 0
    num_gated: int = 0  # reinforcement-learning rollouts that the mismatch gate judged
    num_mismatched: int = 0  # rollouts that it masked
    gate_noise: list[tuple[float, float]] = field(default_factory=list)  # per update that was gated
    """Noise that the gate measured, and the largest that it explains by rounding."""
    gate_views: list[GateView] = field(default_factory=list)
    """One per update and process."""
    num_mismatched_targets: int = 0
    num_truncated_targets: int = 0


def summarise(record: StepRecord, paths: list[SamplePath], *, step: int, max_grad_norm: float) -> dict[str, float]:
    """Compute the metrics of a training step from its record. `step` is the checkpoint that it continued from."""
    targets = join_records(record.micro_batches)
    rl = targets.of("rl")
    entropy = (rl if len(rl) else targets).entropy  # other components do not show how varied the policy's answers are
    rollouts = [path for path in paths if path.sample.component != "sft"] or paths
    unshared = sum(len(path.sample.token_ids) for path in paths)
    grad_norms = np.asarray(record.grad_norms)
    metrics = {
        "loss/train": _mean(record.losses),
        "loss/entropy": _mean(entropy),
        # Weighted by itself: tokens that are certain, e.g. the JSON around an argument, do not count.
        "loss/entropy_varying": float(
            np.square(entropy, dtype=np.float64).sum() / (entropy.sum(dtype=np.float64) or 1.0)
        ),
        "loss/grad_norm": _mean(grad_norms),
        "loss/grad_clipped_share": _mean(grad_norms > max_grad_norm),
        "data/step_trainer_tokens": float(record.num_tree_tokens),
        "data/step_tokens_unshared": float(unshared),
        "data/step_shared_share": 1 - record.num_tree_tokens / unshared,
        "data/step_trainable_tokens": float(len(targets)),
        "data/step_num_rollouts_trained": float(len({path.sample.rollout_id for path in rollouts})),
        "data/step_num_gradient_steps": float(len(record.losses)),
    }
    for component in COMPONENTS:  # mean cross-entropy of each component that learns by it
        if component != "rl" and len(own := targets.of(component)):
            metrics[f"loss/{component}"] = -_mean(own.policy_logprobs)
            metrics[f"data/step_{component}_tokens"] = float(len(own))
    if len(rl) == 0:
        return metrics
    if record.gate_noise:  # of the first update: nothing was trained before it
        metrics["offpolicy/mismatch_noise"], metrics["offpolicy/mismatch_noise_allowed"] = record.gate_noise[0]
    staleness = step - np.concatenate([path.policy_versions for path in paths if path.sample.component == "rl"])
    return {
        **metrics,
        "loss/masked_share": _mean(rl.clipped_low | rl.clipped_high),
        "loss/clipped_low_share": _mean(rl.clipped_low),
        "loss/clipped_high_share": _mean(rl.clipped_high),
        **_against_sampler(rl),
        **_against_base(rl),
        "offpolicy/mismatch_masked_share": record.num_mismatched / max(record.num_gated, 1),
        "offpolicy/mismatch_masked_tokens": float(record.num_mismatched_targets),
        "offpolicy/truncated_share": record.num_truncated_targets / len(rl),
        "offpolicy/mean_staleness": _mean(staleness),
    }


def join_records(parts: list[MicroBatchRecord]) -> MicroBatchRecord:
    """Join the targets of several micro-batches, in their order."""
    names = (each.name for each in fields(MicroBatchRecord))
    return MicroBatchRecord(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _against_sampler(rl: MicroBatchRecord) -> dict[str, float]:
    """Metrics of the importance ratios r = policy / sampler: over all updates, and in the first and the last one."""
    log_ratio = _log_ratio(rl.policy_logprobs, rl.sampling_logprobs)
    ratio = np.exp(log_ratio)
    outside = (ratio < _RATIO_LOW) | (ratio > _RATIO_HIGH)
    k3 = ratio - 1 - log_ratio
    first, last = rl.update == rl.update.min(), rl.update == rl.update.max()
    return {f"offpolicy/ratio_p{round(100 * q):02d}": float(np.quantile(ratio, q)) for q in _QUANTILES} | {
        "loss/kl_to_sampler": _mean(k3),
        "offpolicy/ratio_mean": _mean(ratio),
        "offpolicy/ratio_max": float(ratio.max()),
        "offpolicy/ratio_outside_share": _mean(outside),
        "offpolicy/first_update_gap": _mean(np.abs(log_ratio[first])),
        "offpolicy/first_update_gap_max": float(np.abs(log_ratio[first]).max()),
        "offpolicy/first_update_kl": _mean(k3[first]),
        "offpolicy/first_update_outside_share": _mean(outside[first]),
        "offpolicy/last_update_kl": _mean(k3[last]),
    }


def _against_base(rl: MicroBatchRecord) -> dict[str, float]:
    """KL to the base model, over the targets whose log-prob under it is known (all, some or none)."""
    known = rl.where(~np.isnan(rl.base_logprobs))
    if len(known) == 0:
        return {}
    log_ratio = _log_ratio(known.base_logprobs, known.policy_logprobs)
    return {
        "loss/kl_to_base": _mean(np.exp(log_ratio) - 1 - log_ratio),
        "loss/kl_to_base_k1": _mean(-log_ratio),
        "loss/kl_to_base_targets": float(len(known)),
    }


def _log_ratio(above: ArrayLike, below: ArrayLike) -> NDArray[np.float64]:
    """`above - below`, clipped so that its exponential stays finite even if a broken sampler reports nonsense."""
    return np.clip(np.subtract(above, below, dtype=np.float64), -50.0, 50.0)


def _mean(values: ArrayLike) -> float:
    return float(np.asarray(values, dtype=np.float64).mean())


# -- the token file --


def write_tokens(
    call: Train | TrainSft,
    record: StepRecord,
    updates: Sequence[list[SamplePath]],
    refused: Sequence[SamplePath],
    *,
    from_step: int,
    branches: bool,
) -> list[str]:
    """Write the token file of a step, in the depth-first order of the step's prefix tree.

    A failure never fails the step: it is logged, and returned as a finding.

    Args:
        updates: the samples of each update, which have the layout of the whole step.
        refused: samples that could not be replayed and were not trained.
        branches: whether the trainer shares what branching paths have in common.
    """
    joined = join_records(record.micro_batches)
    targets = joined.where(np.argsort(joined.ranks, kind="stable").astype(np.int64))
    passes = {
        int(rank): number for number, part in enumerate(record.micro_batches) for rank in np.unique(part.ranks).tolist()
    }
    terms = call.config.terms if isinstance(call.config, TrainConfig) else ()
    columns = _columns(targets, is_dpo=any(isinstance(term, DpoConfig) for term in terms))
    trained = [(path, number) for number, paths in enumerate(updates) for path in paths]
    order, shared = sort_paths([path for path, _ in trained], branches=branches)
    divisors = [sum_shares(paths) for paths in updates]
    samples = []
    for index, depth in zip(order, shared, strict=True):
        path, number = trained[index]
        scale = float(path.sample.weight / divisors[number][COMPONENTS.index(path.sample.component)])
        samples.append(_describe(path, number, shared=depth, scale=scale, micro_batch=passes[path.rank]))
    samples += [_describe(path, len(updates), is_refused=True) for path in refused]
    tokens = StepTokens(job_id=call.job_id, from_step=from_step, samples=samples, columns=columns)
    assert call.record_to is not None
    try:
        write_token_file(call.record_to, tokens)
    except StorageError as error:
        _log.warning("the token file of job %s was not written: %s", call.job_id, error)
        return [f"the log-probs of this step's tokens could not be kept for the page: {error}"]
    return []


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
        "advantages": targets.advantages.astype(np.float16),
        "reasons": reasons,
    }
    if (is_rl & (targets.anchor_logprobs != targets.sampling_logprobs)).any():
        anchored = np.where(is_rl, policy - targets.anchor_logprobs, np.nan)
        columns["anchor_ratios"] = anchored.astype(np.float16)
    return columns


def _describe(path: SamplePath, update: int, **fields: Any) -> RecordedSample:
    sample = path.sample
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
        **{"shared": 0, "scale": 0.0, "micro_batch": -1} | fields,
    )
