"""All metrics of a training step: what each means, and when it is reported. docs/metrics.md is made from this.

Metrics are flat numbers, so that a line of JSON, a table or any tracker can hold them. A distribution is reported as a
few quantiles and a histogram of `NUM_BINS` counts between the smallest and the largest value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from art.metrics.groups import SECTIONS

ALWAYS = "every step"


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric means, and in which steps it is reported."""

    meaning: str
    when: str = ALWAYS


PIPELINE_METRICS: dict[str, Metric] = {
    "time/step_wall_s": Metric("seconds from the end of the step before to the end of this one"),
    "time/step_waited_for_rollouts_s": Metric(
        "part of `time/step_wall_s` in which the trainer had nothing to do, because groups were missing"
    ),
    "time/step_held_s": Metric(
        "part of `time/step_wall_s` in which no further group could start, because it would have been too stale when "
        "trained: rollouts waited for the trainer"
    ),
    "pipeline/trainer_idle_share": Metric("`time/step_waited_for_rollouts_s` / `time/step_wall_s`"),
    "pipeline/groups_running": Metric("number of groups that ran when the step ended"),
    "pipeline/groups_waiting": Metric("number of finished groups that waited for a later step when the step ended"),
    "pipeline/groups_useful_share": Metric(
        "share of the step's groups whose rewards have spread, lost groups included"
    ),
    "pipeline/groups_lost": Metric("number of groups without any scored rollout; they were not trained"),
    "pipeline/rollouts_run": Metric("number of rollouts that were run for the step, failed ones included"),
}
"""Metrics that `art.pipeline` adds to a step."""


NUM_BINS = 10
"""Number of bins of a histogram."""

RL = "steps of reinforcement learning"
SFT = "steps with supervised data"
OBSERVATIONS = "steps with `observation_weight`"
DPO = "steps with the loss `dpo`"
STALE = "steps with stale rollouts, while the checkpoints that sampled them exist"
GATED = "steps in which the gate `mismatch` judged tokens that their own start policy sampled"
CONSTRAINED = "steps with answers drawn under a grammar, `top_k`, `top_p` or `min_p`"
BASE = "steps that measured the base model"
WEIGHED = "steps with a loss that uses advantages"
LATER = "steps after the first one of a server"


TRAINER_METRICS: dict[str, Metric] = {
    "loss/train": Metric("the loss, a mean over targets; averaged over the step's optimiser updates"),
    "loss/sft": Metric("mean cross-entropy of supervised data, in nats per token", SFT),
    "loss/observation": Metric("mean cross-entropy of observations, in nats per token", OBSERVATIONS),
    "loss/entropy": Metric("mean entropy of the policy at the targets, in nats; of sampled tokens if there are any"),
    "loss/entropy_varying": Metric(
        "mean entropy of the tokens that vary, in nats: each target's entropy h is weighted by itself, "
        "sum(h^2) / sum(h). Tokens that are certain, like most of a tool call's JSON, do not count"
    ),
    "loss/grad_norm": Metric("norm of the gradient before clipping; averaged over the updates"),
    "loss/grad_clipped_share": Metric("share of the updates whose gradient was clipped to `max_grad_norm`"),
    "loss/learning_rate": Metric("learning rate of the step's last update"),
    "loss/optimizer_updates": Metric("number of updates, with this step's, that the optimiser's moments are means of"),
    "loss/adapter_norm": Metric("Frobenius norm of what training has added to the base weights so far"),
    "loss/adapter_change": Metric("norm of what this step changed in the trained weights, divided by their norm"),
    "loss/kl_to_sampler": Metric("mean of r - 1 - log r with r = policy / sampler (the k3 estimate), in nats", RL),
    "loss/kl_to_base": Metric("mean of r - 1 - log r with r = base / policy (the k3 estimate), in nats", BASE),
    "loss/kl_to_base_k1": Metric("mean of log policy - log base (the k1 estimate), in nats", BASE),
    "loss/kl_to_base_targets": Metric("number of targets that the two KL metrics are averaged over", BASE),
    "loss/masked_share": Metric("share of targets that the loss dropped or clipped", RL),
    "loss/clipped_low_share": Metric(
        "share of targets cut because the policy made them less likely than the anchor", RL
    ),
    "loss/clipped_high_share": Metric(
        "share of targets cut because the policy made them more likely than the anchor", RL
    ),
    "loss/preference_accuracy": Metric(
        "share of pairs whose better rollout the policy prefers, before the update", DPO
    ),
    "loss/preference_margin": Metric("mean over pairs of beta times the difference of the two log-ratios", DPO),
    "offpolicy/ratio_mean": Metric("mean importance ratio (policy / sampler) of the targets of all updates", RL),
    "offpolicy/ratio_p01": Metric("1st percentile of the importance ratio", RL),
    "offpolicy/ratio_p10": Metric("10th percentile of the importance ratio", RL),
    "offpolicy/ratio_p50": Metric("median importance ratio", RL),
    "offpolicy/ratio_p90": Metric("90th percentile of the importance ratio", RL),
    "offpolicy/ratio_p99": Metric("99th percentile of the importance ratio", RL),
    "offpolicy/ratio_max": Metric("largest importance ratio", RL),
    "offpolicy/ratio_outside_share": Metric("share of targets whose importance ratio is outside [0.9, 1.1]", RL),
    "offpolicy/first_update_gap": Metric(
        "mean absolute difference between log-probs of engine and trainer before anything is trained, in nats", RL
    ),
    "offpolicy/first_update_gap_max": Metric(
        "largest absolute difference between log-probs of engine and trainer before anything is trained, in nats", RL
    ),
    "offpolicy/first_update_kl": Metric(
        "`loss/kl_to_sampler` of the first update: difference of engine and trainer", RL
    ),
    "offpolicy/first_update_outside_share": Metric("`offpolicy/ratio_outside_share` of the first update only", RL),
    "offpolicy/last_update_kl": Metric("`loss/kl_to_sampler` of the last update: effect of the updates before it", RL),
    "offpolicy/mismatch_masked_share": Metric("share of rollouts that the setting `mismatch` left out", RL),
    "offpolicy/mismatch_masked_tokens": Metric(
        "number of targets that `mismatch` left out; with `dpo` also those of rollouts without their counterpart", RL
    ),
    "offpolicy/mismatch_noise": Metric(
        "difference of engine and trainer in the first update, before anything was trained: root mean square of "
        "log(policy / sampler) in nats per token, where one token counts with at most three times "
        "`offpolicy/mismatch_noise_allowed`",
        GATED,
    ),
    "offpolicy/mismatch_noise_allowed": Metric(
        "largest such difference that the number types of engine and trainer explain", GATED
    ),
    "offpolicy/truncated_share": Metric("share of targets whose importance weight was cut by `mismatch.truncate`", RL),
    "offpolicy/constraint_refused_tokens": Metric(
        "number of tokens of samples that could not be drawn under the grammar, or from the kept tokens, that they "
        "were recorded with; they were left out",
        CONSTRAINED,
    ),
    "offpolicy/mean_staleness": Metric(
        "mean staleness of the trained tokens: current step minus the step that sampled the token", RL
    ),
    "offpolicy/stale_rollouts_checked": Metric(
        "stale rollouts that were compared with the checkpoint that sampled them", STALE
    ),
    "data/step_trainer_tokens": Metric("tokens that the trainer computed, where shared prefixes count once"),
    "data/step_tokens_unshared": Metric("tokens of all samples, where shared prefixes count for every sample"),
    "data/step_shared_share": Metric("share of `data/step_tokens_unshared` that the prefix tree saved"),
    "data/step_trainable_tokens": Metric("number of targets: tokens that were trained on"),
    "data/step_constrained_tokens": Metric(
        "number of targets that were drawn from a part of the vocabulary, and are normalised over it", CONSTRAINED
    ),
    "data/step_forced_tokens": Metric(
        "number of targets that were the only token that could be drawn: log-prob 0, no gradient", CONSTRAINED
    ),
    "data/step_sft_tokens": Metric("number of targets of supervised data", SFT),
    "data/step_observation_tokens": Metric("number of targets that the environment produced", OBSERVATIONS),
    "data/step_num_rollouts_trained": Metric("number of rollouts that were trained on"),
    "data/step_num_gradient_steps": Metric("number of optimiser updates in the step"),
    "throughput/train_tokens_per_s": Metric("`data/step_tokens_unshared` per second of the step"),
    "throughput/train_tree_tokens_per_s": Metric("`data/step_trainer_tokens` per second of the updates"),
    "throughput/peak_memory_bytes": Metric(
        "on CUDA, most memory that tensors took in this step; else the most that the trainer process ever had resident"
    ),
    "throughput/checkpointing": Metric(
        "what the backward pass computed again: 0 nothing, 1 layers without their attention, 2 whole layers"
    ),
    "time/step_trainer_s": Metric("seconds of the whole step in the trainer, including the checkpoint"),
    "time/step_updates_s": Metric("seconds of the step's updates: forward, backward, optimiser"),
    "time/step_replay_s": Metric("seconds for the replay of grammars and kept tokens", CONSTRAINED),
    "time/step_token_file_s": Metric("seconds for the file of each token's log-prob, entropy and mask reason"),
    "time/step_checkpoint_s": Metric("seconds for the probe and writing the checkpoint"),
}
"""Metrics that the trainer measures. A step of supervised fine-tuning has only those marked `ALWAYS`."""


def _distribution_metrics(name: str, of: str, when: str = ALWAYS) -> dict[str, Metric]:
    meanings = {
        "mean": f"mean of {of}",
        "std": f"standard deviation of {of}",
        "min": f"smallest of {of}",
        "p25": f"first quartile of {of}",
        "p50": f"median of {of}",
        "p75": f"third quartile of {of}",
        "max": f"largest of {of}",
        "hist/*": f"counts in {NUM_BINS} bins of equal width from `{name}_min` to `{name}_max`, numbered from 0",
    }
    return {f"{name}_{part}": Metric(meaning, when) for part, meaning in meanings.items()}


PLAN_METRICS: dict[str, Metric] = {
    "data/step_num_groups_submitted": Metric("number of submitted groups"),
    "data/step_num_groups_trainable": Metric("number of groups with something to learn from"),
    "data/step_num_trajectories": Metric("number of submitted rollouts"),
    "data/step_num_trajectories_repeated": Metric(
        "number of rollouts with the very answers of an earlier rollout of the step", "steps that have such rollouts"
    ),
    "data/step_num_pairs": Metric("number of pairs of rollouts that were compared", DPO),
    "data/step_truncated_share": Metric("share of rollouts in which the token limit cut off an answer"),
    "data/step_malformed_share": Metric(
        'share of rollouts that the policy spoilt: `metadata["outcome"]` is "policy_fault", a metric `invalid_...`, '
        "`malformed_...` (with or without `num_` before it) or `protocol_error` is above 0, or an answer has a tool "
        "call that could not be read"
    ),
    "data/step_answers_per_rollout": Metric("mean number of answers that the model gave in a rollout"),
    "data/step_tokens_per_rollout": Metric("mean number of tokens that the model sampled in a rollout"),
    **_distribution_metrics("data/reward", "the rewards of all submitted rollouts"),
    **_distribution_metrics(
        "data/advantage", "the advantages of the trained rollouts, each the mean over its tokens", WEIGHED
    ),
    "offpolicy/max_staleness": Metric("largest staleness of a token: current step minus the step that sampled"),
    "ledger/sampled_tokens": Metric("number of tokens that were sampled for the submitted rollouts"),
    "ledger/trained_tokens": Metric("number of sampled tokens that were trained on"),
    "ledger/context_tokens": Metric("number of sampled tokens that came from another model; they are context only"),
    "ledger/observed_tokens": Metric(
        "number of tokens of the environment that were learnt; they were not sampled", OBSERVATIONS
    ),
    "ledger/untracked_choices": Metric("number of answers that this server has no record of; they are context only"),
    "ledger/dropped_tokens/*": Metric("number of sampled tokens left out, by reason", "steps that left tokens out"),
}
"""Metrics that the server adds to a step of reinforcement learning. They follow from the submitted groups alone."""

SFT_METRICS: dict[str, Metric] = {
    "data/step_num_trajectories": Metric("number of submitted trajectories"),
    "data/step_num_sft_trajectories": Metric("number of trajectories of `sft`", f"{RL} that have supervised data too"),
    "ledger/retokenised_messages": Metric("number of assistant messages trained on, tokenised from their text"),
    "ledger/dropped_messages/template_rewrites_history": Metric(
        "number of assistant messages that were left out, because the chat template changes their text"
    ),
}
"""Metrics that the server adds to a step with supervised data."""

JOB_METRICS: dict[str, Metric] = {
    "publish/probe_gap": Metric("largest difference between log-probs of engine and trainer on the probe, in nats"),
    "publish/base_gap": Metric("`publish/probe_gap` for the base model: effect of number types and kernels"),
    "publish/probe_effect": Metric("largest difference that training has made to a log-prob of the probe, in nats"),
    "publish/adapter_norm": Metric(
        "`loss/adapter_norm`, computed by the engine from the weights that it holds", "with the embedded engine"
    ),
    "time/publish_s": Metric("seconds for loading the checkpoint into the engine and checking it"),
    "time/step_job_s": Metric("seconds of the whole job on the server: training and publishing"),
    "time/since_last_step_s": Metric(
        "seconds since the step before ended, on this base model; the two metrics below are about this time", LATER
    ),
    "time/engine_idle_share": Metric("share of the time in which the engine computed no request, asleep or not", LATER),
    "time/trainer_idle_share": Metric("share of the time in which the trainer had nothing to do", LATER),
    "findings/*": Metric("1 for each finding of the step, by its name", "steps with findings"),
}
"""Metrics that the server adds to every step when it loads the step's checkpoint into the engine."""

LOG_METRICS: dict[str, Metric] = {
    "costs/*": Metric(
        "USD of the row by source, with sums: `costs/train/judge/ruler`, `costs/train`", "rows with costs"
    ),
    "costs/all": Metric("all costs of the row in USD", "rows with costs"),
    "costs/cum/*": Metric("costs since the model was created, in USD", "models with costs"),
    "data/step_tokens/*": Metric(
        "tokens by source and kind, e.g. `train/policy/prompt`, its part `cached`, and `completion`", "rows with tokens"
    ),
    "data/cum/tokens/*": Metric("tokens since the model was created", "models with tokens"),
    "time/step_s/gpu/trainer": Metric("seconds that the trainer worked since the row before", "registered models"),
    "time/step_s/gpu/rollouts": Metric(
        "the other seconds since the row before: rollouts, rewards, waiting", "registered models"
    ),
    "time/cum/s/gpu/*": Metric("sums of `time/step_s/gpu/*` since the model was created", "registered models"),
    "throughput/avg_trainer_tok_per_s": Metric(
        "`data/cum/trainer_tokens` / `time/cum/trainer_s`", "rows of training steps"
    ),
    "throughput/avg_actor_tok_per_s": Metric(
        "`data/cum/actor_tokens` / `time/cum/actor_s`", "rows with both as metrics of your own"
    ),
    "data/cum/num_unique_scenarios": Metric(
        "number of different scenarios since the model was created: by `scenario_id` in the metadata of the groups or "
        "rollouts of `train`, and by `add_data(scenario_ids=)` of the metrics builder",
        "rows with such ids",
    ),
    "data/cum/*": Metric(
        "sums of `data/step_*` since the first row, including your own metrics; shares are not summed"
    ),
    "time/cum/*": Metric("sums of `time/step_*` since the first row"),
    "throughput/cum/*": Metric(
        "sums of `throughput/step_*` since the first row", "rows with such a metric of your own"
    ),
}
"""Metrics that `model.log` adds to every row of `history.jsonl`."""

FAULT_METRICS: dict[str, Metric] = {
    "data/infra_fault_rate": Metric(
        "share of the rollouts since the step before that failed through no fault of the policy"
    ),
    "data/infra_faults/*": Metric(
        "number of such rollouts by what failed: `timeout`, `rate_limit`, `tool_server`, `server`, `judge`, or the "
        "error's name",
        "steps with faults",
    ),
    "data/policy_fault_rate": Metric(
        "share of the step's rollouts that the policy spoilt; these are scored", "steps with such rollouts"
    ),
    "data/judge_fault_rate": Metric("share of the step's groups that no judge could score", "steps with `GroupScorer`"),
    "data/judge_faults/*": Metric("number of such groups, by what failed", "steps with such groups"),
}
"""Metrics of failed rollouts and failed judges, which `FaultWatch` and `GroupScorer` count."""
CATALOGUE: dict[str, Metric] = {
    **LOG_METRICS, **FAULT_METRICS, **JOB_METRICS, **PIPELINE_METRICS, **SFT_METRICS, **PLAN_METRICS,
    **TRAINER_METRICS,
}  # fmt: skip
"""Every metric of ART, by name. A name that ends in `*` is for all that begin like it."""


def describe(name: str, values: Sequence[float]) -> dict[str, float]:
    """Compute the metrics of the distribution of `values` (at least one, all finite). Their names begin with `name`.

    They are mean, standard deviation, quantiles (interpolated linearly) and a histogram.

    Example: 0, 0, 1 for "data/reward" gives a mean of 1/3, a median of 0, and 2 and 1 in the first and the last bin.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    mean = math.fsum(ordered) / len(ordered)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    counts = [0] * NUM_BINS
    for value in ordered:
        counts[min(int((value - low) / (high - low) * NUM_BINS), NUM_BINS - 1) if high > low else 0] += 1
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        f"{name}_min": low,
        **dict(zip((f"{name}_p25", f"{name}_p50", f"{name}_p75"), quartiles, strict=True)),
        f"{name}_max": high,
        **{f"{name}_hist/{number}": float(count) for number, count in enumerate(counts)},
    }


_PATTERNS = sorted((name for name in CATALOGUE if name.endswith("*")), key=len, reverse=True)
"""Names that end in `*` are for all that begin like them; the longest counts."""
_OF_GROUPS = {
    "reward": "mean reward of the rollouts",
    "reward_std_dev": "mean over groups of the standard deviation of their rewards",
    "exception_rate": "share of the rollouts that failed",
}


def meaning_of(name: str) -> str | None:
    """Return what a metric means; `None` for a metric of the user.

    Example: `ledger/dropped_tokens/truncated` means "number of sampled tokens left out, by reason".
    """
    if name in CATALOGUE:
        return CATALOGUE[name].meaning
    if (pattern := next((pattern for pattern in _PATTERNS if name.startswith(pattern[:-1])), None)) is not None:
        return CATALOGUE[pattern].meaning
    split, _, key = name.partition("/")
    return None if split in SECTIONS else _OF_GROUPS.get(key)
