"""What a step reports, and how it is computed from the records of its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from art.trainer.tree import SamplePath, Targets

METRICS = {
    "loss/train": "the trained loss, a mean over targets; the mean of the step's optimiser updates",
    "loss/entropy": "mean entropy of the policy at the targets, in nats",
    "loss/grad_norm": "norm of the adapter's gradient before clipping; the mean of the updates",
    "loss/learning_rate": "learning rate of the last update",
    "loss/adapter_norm": "Frobenius norm of what the adapter adds to all weights together, after the step",
    "loss/kl_to_sampler": "mean of r - 1 - log r with r = policy / sampler (the k3 estimate), in nats",
    "loss/kl_to_sampler_k1": "mean of log sampler - log policy (the k1 estimate), in nats",
    "loss/masked_share": "share of targets that the loss dropped or clipped",
    "loss/clipped_low_share": "share of those that the policy had made less likely than the anchor",
    "loss/clipped_high_share": "share of those that it had made more likely",
    "loss/preference_accuracy": "dpo: share of pairs that the policy orders right, before the update",
    "loss/preference_margin": "dpo: mean margin of the pairs, beta times the difference of the log-ratios",
    "offpolicy/ratio_mean": "mean of policy / sampler over the targets",
    "offpolicy/ratio_p01": "its 1st percentile",
    "offpolicy/ratio_p99": "its 99th percentile",
    "offpolicy/mismatch_masked_share": "share of samples that the gate between sampler and trainer left out",
    "offpolicy/mismatch_masked_tokens": "targets that it left out, single ones included",
    "offpolicy/truncated_share": "share of targets whose importance weight was truncated",
    "offpolicy/mean_staleness": "mean over samples of the trained step minus the step that sampled",
    "data/step_trainer_tokens": "tokens that the trainer computed, shared prefixes once",
    "data/step_tokens_unshared": "tokens that the samples have together, each counted alone",
    "data/step_trainable_tokens": "targets: tokens that were learnt from",
    "data/step_num_gradient_steps": "optimiser updates",
    "throughput/train_tokens_per_s": "tokens of the samples (shared ones counted each time) per second of the step",
    "time/step_trainer_s": "the whole step, checkpoint included",
    "time/step_checkpoint_s": "probe and checkpoint",
}
"""Every metric of a step. `offpolicy/...`, `loss/kl...` and `loss/masked_share` are left out of a step of SFT only."""


@dataclass(frozen=True, slots=True)
class MicroBatchRecord:
    """What one forward and backward pass saw. All arrays are [N], one entry per target."""

    policy_logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    entropy: NDArray[np.float32]
    clipped_low: NDArray[np.bool_]
    clipped_high: NDArray[np.bool_]
    is_rl: NDArray[np.bool_]
    streams: dict[str, NDArray[np.float32]]


@dataclass(slots=True)
class StepRecord:
    """Filled while a step runs."""

    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # per update
    grad_norms: list[float] = field(default_factory=list)  # per update
    num_tree_tokens: int = 0
    num_gated: int = 0
    """Reinforcement-learning samples that the gate looked at."""
    num_mismatched: int = 0
    num_mismatched_targets: int = 0
    num_truncated_targets: int = 0


def record_targets(
    targets: Targets,
    logprobs: NDArray[np.float32],
    entropy: NDArray[np.float32],
    *,
    clipped_low: NDArray[np.bool_],
    clipped_high: NDArray[np.bool_],
) -> MicroBatchRecord:
    return MicroBatchRecord(
        policy_logprobs=logprobs,
        sampling_logprobs=targets.sampling_logprobs,
        advantages=targets.advantages,
        entropy=entropy,
        clipped_low=clipped_low,
        clipped_high=clipped_high,
        is_rl=~targets.is_sft,
        streams=targets.streams,
    )


def summarise(record: StepRecord, paths: list[SamplePath], *, step: int) -> dict[str, float]:
    """Metrics of a step from `step`, but for those that only the caller knows (time, optimiser, adapter)."""
    entropy = np.concatenate([part.entropy for part in record.micro_batches])
    metrics = {
        "loss/train": _mean(record.losses),
        "loss/entropy": _mean(entropy),
        "loss/grad_norm": _mean(record.grad_norms),
        "data/step_trainer_tokens": float(record.num_tree_tokens),
        "data/step_tokens_unshared": float(sum(len(path.sample.token_ids) for path in paths)),
        "data/step_trainable_tokens": float(len(entropy)),
        "data/step_num_gradient_steps": float(len(record.losses)),
    }
    is_rl = np.concatenate([part.is_rl for part in record.micro_batches])
    if not is_rl.any():
        return metrics
    policy = np.concatenate([part.policy_logprobs for part in record.micro_batches])[is_rl].astype(np.float64)
    sampler = np.concatenate([part.sampling_logprobs for part in record.micro_batches])[is_rl].astype(np.float64)
    low = np.concatenate([part.clipped_low for part in record.micro_batches])[is_rl]
    high = np.concatenate([part.clipped_high for part in record.micro_batches])[is_rl]
    log_ratio = np.clip(policy - sampler, -50.0, 50.0)  # exp stays finite, whatever a broken sampler reports
    ratio = np.exp(log_ratio)
    p01, p99 = np.quantile(ratio, [0.01, 0.99])
    staleness = [step - path.sample.policy_version for path in paths if path.sample.component == "rl"]
    return metrics | {
        "loss/kl_to_sampler": _mean(ratio - 1 - log_ratio),
        "loss/kl_to_sampler_k1": _mean(-log_ratio),
        "loss/masked_share": _mean(low | high),
        "loss/clipped_low_share": _mean(low),
        "loss/clipped_high_share": _mean(high),
        "offpolicy/ratio_mean": _mean(ratio),
        "offpolicy/ratio_p01": float(p01),
        "offpolicy/ratio_p99": float(p99),
        "offpolicy/mismatch_masked_share": record.num_mismatched / max(record.num_gated, 1),
        "offpolicy/mismatch_masked_tokens": float(record.num_mismatched_targets),
        "offpolicy/truncated_share": record.num_truncated_targets / max(int(is_rl.sum()), 1),
        "offpolicy/mean_staleness": _mean(staleness),
    }


def _mean(values: ArrayLike) -> float:
    return float(np.asarray(values, dtype=np.float64).mean())
