"""Rules speak at their bounds and not before, about metrics and settings that exist, and not on a healthy step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from art.config import TrainConfig
from art.metrics import catalogue
from art.metrics.findings import BEFORE, RULES, Limit, Rule, find_findings
from tests.support.metric_names import find_metric

HEALTHY = {
    "loss/entropy": 0.4,
    "loss/entropy_varying": 0.9,
    "loss/grad_norm": 0.15,
    "loss/grad_clipped_share": 0.0,
    "loss/adapter_change": 0.05,
    "loss/masked_share": 0.02,
    "loss/kl_to_base_k1": 0.7,
    "loss/kl_to_base_targets": 60.0,
    "offpolicy/ratio_mean": 1.0,
    "offpolicy/ratio_p10": 0.9,
    "offpolicy/ratio_p90": 1.1,
    "offpolicy/first_update_kl": 1e-4,
    "offpolicy/first_update_outside_share": 0.01,
    "offpolicy/last_update_kl": 0.1,
    "offpolicy/mean_staleness": 0.0,
    "offpolicy/max_staleness": 0.0,
    "offpolicy/mismatch_noise": 0.03,
    "offpolicy/mismatch_noise_allowed": 0.1,
    "offpolicy/mismatch_masked_share": 0.0,
    "offpolicy/mismatch_masked_tokens": 0.0,
    "offpolicy/truncated_share": 0.0,
    "data/step_trainable_tokens": 1024.0,
    "data/step_num_gradient_steps": 4.0,
    "data/step_num_rollouts_trained": 96.0,
    "data/step_num_groups_submitted": 16.0,
    "data/step_num_groups_trainable": 12.0,
    "data/step_num_trajectories": 128.0,
    "data/step_truncated_share": 0.02,
    "data/step_malformed_share": 0.1,
    "data/reward_hist/9": 70.0,
}
"""As a step in the middle of the demo, with four updates."""

EVERY_METRIC = catalogue.TRAINER_METRICS | catalogue.PLAN_METRICS | catalogue.SFT_METRICS | catalogue.JOB_METRICS


def edges() -> Iterator[tuple[str, Limit, float, float]]:
    """Each rule and limit with its bounds, and a number just beyond each; those of entropy have a test of their own."""
    for name, rule in RULES.items():
        for limit in rule.limits:
            if limit.over == BEFORE and name.startswith("entropy"):
                continue
            for bound, direction in ((limit.low, -math.inf), (limit.high, math.inf)):
                if math.isfinite(bound):
                    yield name, limit, bound, math.nextafter(math.nextafter(bound, direction), direction)


def names(metrics: dict[str, float], before: dict[str, float]) -> set[str]:
    return {finding.name for finding in find_findings(metrics, before)}


def step_where(rule: Rule, limit: Limit, value: float) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of a step that the rule is for, with `value` for what the limit compares, and of the step before."""
    metrics, before = dict(HEALTHY), dict(HEALTHY)
    for condition in rule.only_if:
        inside = next((bound for bound in (condition.low, condition.high) if math.isfinite(bound)), 1.0)
        metrics[condition.metric] = inside * (metrics[condition.over] if condition.over else 1.0)
    if limit.over == BEFORE:
        before[limit.metric] = 1.0
    metrics[limit.metric] = value * metrics.get(limit.over or "", 1.0)
    return metrics, before


@pytest.mark.parametrize(("name", "limit", "bound", "beyond"), list(edges()))
def test_a_rule_speaks_just_beyond_its_bound(name: str, limit: Limit, bound: float, beyond: float) -> None:
    assert name not in names(*step_where(RULES[name], limit, bound))
    assert name in names(*step_where(RULES[name], limit, beyond))


@pytest.mark.parametrize(
    ("entropy", "before", "varying", "found"),
    [
        (0.2, 0.4, 0.9, set()),
        (0.2, 0.41, 0.9, {"entropy_fell"}),
        (0.3, 0.4, 0.45, set()),
        (0.3, 0.4, 0.44, {"entropy_fell"}),  # the JSON around them has kept its own
        (0.0099, 0.41, 0.6, {"entropy_gone"}),  # one finding says enough
        (0.0099, 0.01, 1.1, set()),  # one token in a hundred still varies, and much
        (1.0, 0.49, 0.9, set()),
    ],
)
def test_entropy_is_compared_with_the_step_before(
    entropy: float, before: float, varying: float, found: set[str]
) -> None:
    metrics = HEALTHY | {"loss/entropy": entropy, "loss/entropy_varying": varying}
    assert names(metrics, HEALTHY | {"loss/entropy": before}) == found


@pytest.mark.parametrize(("entropy", "name"), [(0.1, "entropy_fell"), (0.005, "entropy_gone")])
def test_answers_may_become_alike_where_most_of_them_are_right(entropy: float, name: str) -> None:
    alike = HEALTHY | {"loss/entropy": entropy}
    assert names(alike, HEALTHY) == {name}
    assert names(alike | {"data/reward_hist/9": 100.0}, HEALTHY) == set()


def test_a_healthy_step_has_no_finding() -> None:
    assert find_findings(HEALTHY, HEALTHY) == []
    assert find_findings(HEALTHY, {}) == []


@pytest.mark.parametrize(("name", "limit", "bound", "beyond"), [edge for edge in edges() if RULES[edge[0]].only_if])
def test_a_rule_is_silent_where_a_condition_was_not_measured(
    name: str, limit: Limit, bound: float, beyond: float
) -> None:
    metrics, before = step_where(RULES[name], limit, beyond)
    del metrics[RULES[name].only_if[0].metric]
    assert name not in names(metrics, before)


def test_steps_of_another_kind_are_not_compared() -> None:
    supervised = {"loss/entropy": 3.0, "loss/grad_norm": 1e-3, "loss/grad_clipped_share": 0.0}
    assert find_findings(HEALTHY, supervised) == []
    assert find_findings(supervised | {"loss/grad_norm": 5.0, "loss/grad_clipped_share": 1.0}, HEALTHY) == []


def test_a_finding_says_what_was_seen_and_then_always_the_same() -> None:
    def said(**changes: float) -> str:
        [finding] = find_findings(HEALTHY | {name.replace("__", "/"): v for name, v in changes.items()}, HEALTHY)
        return str(finding)

    first = said(offpolicy__ratio_p10=0.25, offpolicy__last_update_kl=1.234567)
    assert first.startswith(
        "offpolicy/last_update_kl is 1.23, above 1; offpolicy/ratio_p10 is 0.25, below 0.5: the first updates of this "
    )
    assert said(offpolicy__ratio_p10=0.125).partition(": ")[2] == first.partition(": ")[2]
    assert said(data__step_num_groups_trainable=2.0).startswith(
        "data/step_num_groups_trainable is 0.125 of data/step_num_groups_submitted, below 0.25: most groups had "
    )
    assert said(loss__entropy=0.1).startswith(
        "loss/entropy is 0.25 times that of the step before, below 0.5: the policy lost more than half"
    )


# -- the table --


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_read_metrics_that_exist(rule: Rule) -> None:
    read = {limit.metric for limit in (*rule.limits, *rule.only_if)}
    read |= {limit.over for limit in (*rule.limits, *rule.only_if) if limit.over not in (None, BEFORE)}
    read |= set(re.findall(r"`(\w+/\w+)`", rule.meaning + rule.advice + rule.source))
    assert [name for name in read if find_metric(name, EVERY_METRIC) is None] == []


def settings(config: type[BaseModel], prefix: str = "") -> set[str]:
    """Names of a config's fields, those of configs inside with dots; those of the losses plain."""
    found: set[str] = set()
    for name, field in config.model_fields.items():
        found.add(f"{prefix}{name}")
        for inner in re.findall(r"art\.config\.\w+\.(\w+)", str(field.annotation)):
            import art.config

            found |= settings(getattr(art.config, inner), "" if name == "loss" else f"{name}.")
    return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_name_settings_that_exist(rule: Rule) -> None:
    named = set(re.findall(r"`([a-z_.]+)`", rule.meaning + rule.advice + rule.source))
    assert named <= settings(TrainConfig) | {"max_completion_tokens"}


def test_rules_are_told_apart() -> None:
    texts = {rule.meaning for rule in RULES.values()}
    assert len(texts) == len(RULES)
    assert not any(": " in limit.describe(0.123456) for rule in RULES.values() for limit in rule.limits)
