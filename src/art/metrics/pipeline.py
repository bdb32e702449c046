"""The metrics that `art.pipeline` adds to the steps that it trains."""

from __future__ import annotations

from art.metrics.metric import Metric

CURRICULUM = "steps of `art.pipeline` with `curriculum`"
FOLLOWED = 'steps of `art.pipeline` with `max_concurrent="auto"`'
USEFUL = "steps of `art.pipeline` with a useful group"
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
    "pipeline/rollouts_per_useful_group": Metric("`pipeline/rollouts_run` per group with spread", USEFUL),
    "pipeline/seconds_per_useful_group": Metric("seconds since the step before, per group with spread", USEFUL),
    "pipeline/tokens_per_useful_group": Metric("`ledger/sampled_tokens` per group with spread", USEFUL),
    "pipeline/usd_per_useful_group": Metric(
        "costs that the step's rollouts and judges booked, in USD, per group with spread",
        f"{USEFUL}, if costs are booked",
    ),
    "pipeline/choice_spread_chance": Metric(
        "mean chance of spread that the scenarios chosen since the step before had when they were chosen; compare "
        "`pipeline/groups_useful_share`",
        CURRICULUM,
    ),
    "pipeline/choice_pass_rate": Metric(
        "mean pass rate of the scenarios chosen, of those known: their mean reward, from 0 for the lowest reward of any"
        " rollout to 1 for the highest",
        CURRICULUM,
    ),
    "pipeline/choice_by_turn_share": Metric(
        "share of the scenarios chosen because they had waited the longest", CURRICULUM
    ),
    "pipeline/choice_new_share": Metric("share of the scenarios chosen that had not been chosen before", CURRICULUM),
    "pipeline/choice_seen_share": Metric("share of all scenarios that have been chosen so far", CURRICULUM),
    "pipeline/choice_waited_max": Metric(
        "most groups that were started between two groups of one scenario, among the scenarios chosen", CURRICULUM
    ),
    "pipeline/concurrency_limit": Metric(
        "most rollouts at once, at the end of the step", "steps of `art.pipeline` with a limit"
    ),
    "pipeline/concurrency_running": Metric("rollouts that ran at the end of the step"),
    "pipeline/concurrency_wait_s": Metric("seconds that rollouts waited for a slot, summed over those that got one"),
    "pipeline/concurrency_rollouts_mean": Metric(
        "mean number of rollouts that ran, while the engine was awake", FOLLOWED
    ),
    "pipeline/engine_seats_used_share": Metric(
        "mean share of the engine's seats in which a request was computed", FOLLOWED
    ),
    "pipeline/engine_waiting_mean": Metric("mean number of the project's requests that waited at the engine", FOLLOWED),
    "pipeline/concurrency_up": Metric("times that the limit's aim was above it and the engine had room", FOLLOWED),
    "pipeline/concurrency_down": Metric("times that the limit was lowered because requests queued up", FOLLOWED),
    "pipeline/concurrency_hold": Metric(
        "times that the limit stayed: the engine slept or gave no answer, its memory was full, or no rollout had asked",
        FOLLOWED,
    ),
    "pipeline/concurrency_silent": Metric("times that the engine did not say how busy it is", "steps with such times"),
}
"""Metrics that `art.pipeline` adds to a step."""
