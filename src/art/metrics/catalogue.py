"""Every metric of a training step: its meaning, and when it is reported. Pure Python; docs/metrics.md shows the same.

A step's metrics are flat numbers, so that a line of JSON, a table and every tracker can hold them. A distribution is a
few quantiles and a histogram of `NUM_BINS` counts, whose edges travel along as the smallest and the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from art.metrics.trends import FEWEST_FOR_MALFORMED, RECENT, SWING_WINDOW, WINDOW

NUM_BINS = 10

ALWAYS = "every step"
RL = "steps with samples of component rl"
DPO = "the loss dpo"
BY_SIGN = "steps with such targets"
BASE = "steps in which the base was measured"
WEIGHED = "losses that weigh advantages"
OVERLONG = "steps with `overlong`"
TENTH = f"from the {WINDOW}th step on"


@dataclass(frozen=True, slots=True)
class Metric:
    meaning: str
    when: str = ALWAYS


TRAINER_METRICS: dict[str, Metric] = {
    "loss/train": Metric("the trained loss, a mean over targets; the mean of the step's optimiser updates"),
    "loss/entropy": Metric("mean entropy of the policy at the targets, in nats"),
    "loss/entropy_varying": Metric(
        "the same over the tokens that vary: the mean of h over targets with weight h, sum(h^2) / sum(h), in nats. "
        "Tokens that are certain, as most of a tool call's JSON, do not count"
    ),
    "loss/entropy_varying_share": Metric(
        "share of the targets that vary: sum(h)^2 / (N sum(h^2)) of N targets, so that `loss/entropy` is "
        "`loss/entropy_varying` times this"
    ),
    "loss/entropy_rewarded": Metric("mean entropy of targets with positive advantage", BY_SIGN),
    "loss/entropy_punished": Metric("the same over targets with negative advantage", BY_SIGN),
    "loss/grad_norm": Metric("norm of the gradient before clipping; the mean of the updates"),
    "loss/grad_norm_max": Metric("the largest of the updates"),
    "loss/grad_clipped_share": Metric("share of the updates whose gradient was clipped to `max_grad_norm`"),
    "loss/learning_rate": Metric("learning rate of the last update"),
    "loss/adapter_norm": Metric("Frobenius norm of what training has added to all weights together, after the step"),
    "loss/adapter_change": Metric("Frobenius norm of what this step added, as a share of `loss/adapter_norm`"),
    "loss/kl_to_sampler": Metric("mean of r - 1 - log r with r = policy / sampler (the k3 estimate), in nats", RL),
    "loss/kl_to_sampler_k1": Metric("mean of log sampler - log policy (the k1 estimate), in nats", RL),
    "loss/kl_to_base": Metric("mean of r - 1 - log r with r = base / policy (the k3 estimate), in nats", BASE),
    "loss/kl_to_base_k1": Metric("mean of log policy - log base (the k1 estimate), in nats", BASE),
    "loss/kl_to_base_targets": Metric(
        "how many targets both are means over: a few, unless a loss compares with the base", BASE
    ),
    "loss/masked_share": Metric("share of targets that the loss dropped or clipped", RL),
    "loss/clipped_low_share": Metric("share of those that the policy had made less likely than the anchor", RL),
    "loss/clipped_high_share": Metric("share of those that it had made more likely", RL),
    "loss/preference_accuracy": Metric("share of pairs that the policy orders right, before the update", DPO),
    "loss/preference_margin": Metric("mean margin of the pairs, beta times the difference of the log-ratios", DPO),
    "offpolicy/ratio_mean": Metric("mean of policy / sampler over the targets of all updates", RL),
    "offpolicy/ratio_p01": Metric("its 1st percentile", RL),
    "offpolicy/ratio_p10": Metric("its 10th percentile", RL),
    "offpolicy/ratio_p50": Metric("its median", RL),
    "offpolicy/ratio_p90": Metric("its 90th percentile", RL),
    "offpolicy/ratio_p99": Metric("its 99th percentile", RL),
    "offpolicy/ratio_max": Metric("the largest", RL),
    "offpolicy/ratio_outside_share": Metric("share of targets whose ratio is outside [0.9, 1.1]", RL),
    "offpolicy/first_update_gap": Metric(
        "mean distance of sampler's and trainer's log-probs of the sampled tokens before anything is trained, in nats",
        RL,
    ),
    "offpolicy/first_update_kl": Metric(
        "`loss/kl_to_sampler` of the first update: what sampler and trainer differ by", RL
    ),
    "offpolicy/first_update_outside_share": Metric("`offpolicy/ratio_outside_share` of the first update", RL),
    "offpolicy/last_update_kl": Metric(
        "`loss/kl_to_sampler` of the last update: how far the updates before it moved", RL
    ),
    "offpolicy/mismatch_masked_share": Metric(
        "share of samples that the gate between sampler and trainer left out", RL
    ),
    "offpolicy/mismatch_masked_tokens": Metric(
        "targets that it left out, single ones included, with dpo also those of rollouts that lost their counterpart",
        RL,
    ),
    "offpolicy/truncated_share": Metric("share of targets whose importance weight was truncated", RL),
    "offpolicy/mean_staleness": Metric("mean over samples of the trained step minus the step that sampled", RL),
    "data/step_trainer_tokens": Metric("tokens that the trainer computed, shared prefixes once"),
    "data/step_tokens_unshared": Metric("tokens that the samples have together, each counted alone"),
    "data/step_shared_share": Metric("share of those that needed no computing, thanks to the prefix tree"),
    "data/step_trainable_tokens": Metric("targets: tokens that were learnt from"),
    "data/step_num_rollouts_trained": Metric("rollouts that they are of"),
    "data/step_num_gradient_steps": Metric("optimiser updates"),
    "throughput/train_tokens_per_s": Metric(
        "tokens of the samples, shared ones counted each time, per second of the step"
    ),
    "throughput/train_tree_tokens_per_s": Metric("tokens that the trainer computed, per second of the updates"),
    "throughput/train_flops_per_s": Metric("arithmetic that the model needs, per second of the updates"),
    "throughput/train_utilization": Metric("the same as a share of `throughput/peak_flops_per_s`"),
    "throughput/peak_flops_per_s": Metric(
        "what the device can do: of a known GPU by its data sheet (dense), else one large matrix product, measured once"
    ),
    "throughput/attention_dense_share": Metric(
        "share of the computed tokens whose attention ran on the dense kernel; the rest ran on the kernel `chains` "
        "(on a CPU) or `flex` (on CUDA), where that one is faster"
    ),
    "throughput/peak_memory_bytes": Metric(
        "CUDA: most memory that tensors took in this step. Else: most that the trainer process ever had resident"
    ),
    "time/step_trainer_s": Metric("the whole step, checkpoint included"),
    "time/step_updates_s": Metric("its optimiser updates: forward, backward, optimiser"),
    "time/step_checkpoint_s": Metric("probe and checkpoint"),
}
"""What `Trainer.train` reports. `Trainer.train_sft` reports those of `ALWAYS`."""


def _distribution_metrics(name: str, of: str, when: str = ALWAYS) -> dict[str, Metric]:
    meanings = {
        "mean": f"mean of {of}",
        "std": "their standard deviation",
        "min": "the smallest",
        "p25": "the first quartile",
        "p50": "the median",
        "p75": "the third quartile",
        "max": "the largest",
        "hist/*": f"counts in {NUM_BINS} bins of equal width from `{name}_min` to `{name}_max`, numbered from 0",
    }
    return {f"{name}_{part}": Metric(meaning, when) for part, meaning in meanings.items()}


PLAN_METRICS: dict[str, Metric] = {
    "data/step_num_groups_submitted": Metric("groups of the request"),
    "data/step_num_groups_trainable": Metric("groups with something to learn from"),
    "data/step_num_trajectories": Metric("rollouts of the request"),
    "data/step_num_trajectories_overlong": Metric("rollouts whose reward was lowered for their length", OVERLONG),
    "data/step_num_pairs": Metric("pairs of rollouts that were compared", DPO),
    "data/step_truncated_share": Metric("share of rollouts with an answer that the token limit cut off"),
    "data/step_malformed_share": Metric(
        'share of rollouts that the policy spoilt: `metadata["outcome"]` is "policy_fault", a metric `invalid_...`, '
        "`malformed_...` (with or without `num_` before it) or `protocol_error` is above 0, or an answer has a tool "
        "call that could not be read"
    ),
    "data/step_answers_per_rollout": Metric("mean number of answers that the model gave in a rollout"),
    "data/step_tokens_per_rollout": Metric("mean number of tokens that it sampled there"),
    **_distribution_metrics("data/reward", "the rewards of all rollouts"),
    **_distribution_metrics(
        "data/advantage", "the advantages of the trained rollouts, each the mean of its tokens", WEIGHED
    ),
    "offpolicy/max_staleness": Metric("the step minus the oldest step that sampled one of its tokens"),
    "ledger/sampled_tokens": Metric("tokens that were sampled for the submitted rollouts"),
    "ledger/trained_tokens": Metric("those that were learnt from"),
    "ledger/context_tokens": Metric("those that another model sampled"),
    "ledger/untracked_choices": Metric("answers without a record on this server: context only"),
    "ledger/dropped_tokens/*": Metric("tokens that were left out, by reason", "steps that left tokens out"),
}
"""What the server adds of a step of reinforcement learning, from the request alone."""

SFT_METRICS: dict[str, Metric] = {
    "data/step_num_trajectories": Metric("trajectories of the request"),
    "ledger/retokenised_messages": Metric("assistant messages that were learnt, rendered from their text"),
    "ledger/dropped_messages/template_rewrites_history": Metric(
        "assistant messages that were left out, because the chat template shows the model another text"
    ),
}
"""The same of a step of supervised fine-tuning."""

TREND_METRICS: dict[str, Metric] = {
    "trend/reward_rise": Metric(
        f"rise of `data/reward_mean` over the last {WINDOW} steps, by a line fitted to them", TENTH
    ),
    "trend/reward_rise_error": Metric("its standard error, by how the steps scatter around that line", TENTH),
    "trend/groups_trainable_share": Metric(
        "mean over these steps of `data/step_num_groups_trainable` / `data/step_num_groups_submitted`", TENTH
    ),
    "trend/top_reward_share": Metric(
        "mean over these steps of the share of rollouts in the highest bin of `data/reward_hist`", TENTH
    ),
    "trend/malformed_rise": Metric(
        f"mean `data/step_malformed_share` of the last {RECENT} steps less that of the up to {WINDOW - RECENT} before",
        f"from the {FEWEST_FOR_MALFORMED}th step on",
    ),
    "trend/answers_swing": Metric(
        "how far `data/step_answers_per_rollout` goes back and forth, as a share of its mean: over the last "
        f"{SWING_WINDOW} steps the mean change from step to step, less what it has changed altogether",
        f"from the {SWING_WINDOW}th step on",
    ),
    "trend/tokens_swing": Metric("the same of `data/step_tokens_per_rollout`", f"from the {SWING_WINDOW}th step on"),
}
"""What the server adds of a step of reinforcement learning and of those that it continues."""

JOB_METRICS: dict[str, Metric] = {
    "publish/probe_gap": Metric("largest difference of log-probs between engine and trainer on the probe, in nats"),
    "publish/base_gap": Metric("the same of the base model: what the number types and kernels of the two cost"),
    "publish/probe_effect": Metric("largest difference that training has made there, in nats"),
    "publish/adapter_norm": Metric("`loss/adapter_norm` as the engine has it"),
    "time/publish_s": Metric("loading the checkpoint into the engine, with its proof"),
    "time/step_job_s": Metric("the whole job on the server: training and publishing"),
    "findings/*": Metric("1 for each finding of the step", "steps with findings"),
}
"""What the server adds of every step once it is published."""


LOG_METRICS: dict[str, Metric] = {
    "costs/*": Metric(
        "USD of the row by source, with the sums of its parts: `costs/train/judge/ruler`, `costs/train`",
        "rows with something that has a price",
    ),
    "costs/all": Metric("their sum", "rows with something that has a price"),
    "costs/cum/*": Metric("the same from the beginning on, restarts included", "models that have cost anything"),
    "data/step_tokens/*": Metric(
        "tokens by source and kind: `train/policy/prompt`, its part `cached`, `completion`", "rows with tokens"
    ),
    "data/cum/tokens/*": Metric("the same from the beginning on", "models with tokens"),
    "time/step_s/gpu/trainer": Metric("seconds since the row before that the trainer worked", "registered models"),
    "time/step_s/gpu/rollouts": Metric("the other seconds: rollouts, rewards, waiting", "registered models"),
    "time/cum/s/gpu/*": Metric("both from the beginning on", "registered models"),
    "data/cum/*": Metric("`data/step_*`, also the user's own, from the first row on; shares are not added up"),
    "time/cum/*": Metric("`time/step_*` likewise"),
    "throughput/cum/*": Metric("`throughput/step_*` likewise", "rows with such a metric of the user's own"),
}
"""What `model.log` adds to every row."""

FAULT_METRICS: dict[str, Metric] = {
    "data/infra_fault_rate": Metric("rollouts that failed, and not by the policy's fault, over all of the step"),
    "data/infra_faults/*": Metric(
        "how many, by what failed: `timeout`, `rate_limit`, `tool_server`, `server`, `judge`, or the error's name",
        "steps with faults",
    ),
    "data/policy_fault_rate": Metric("rollouts that the policy spoilt, which are scored", "steps with such rollouts"),
    "data/judge_fault_rate": Metric("groups that no judge could score, over all of the step", "`GroupScorer`"),
    "data/judge_faults/*": Metric("how many, by what failed", "steps with such groups"),
}
"""What `FaultWatch.metrics` and `GroupScorer.metrics` give."""


def describe(name: str, values: Sequence[float]) -> dict[str, float]:
    """The distribution of `values` (at least one, all finite) as metrics; quantiles interpolate linearly.

    Example: 0, 0, 1 of "data/reward" gives a mean of 1/3, a median of 0, and 2 and 1 in the first and the last bin.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    mean = math.fsum(ordered) / len(ordered)
    counts = [0] * NUM_BINS
    for value in ordered:
        counts[min(int((value - low) / (high - low) * NUM_BINS), NUM_BINS - 1) if high > low else 0] += 1
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        f"{name}_min": low,
        f"{name}_p25": _quantile(ordered, 0.25),
        f"{name}_p50": _quantile(ordered, 0.5),
        f"{name}_p75": _quantile(ordered, 0.75),
        f"{name}_max": high,
        **{f"{name}_hist/{number}": float(count) for number, count in enumerate(counts)},
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
