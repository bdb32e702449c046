"""What a useful group costs."""

from __future__ import annotations

import pytest

from art.asynchronous.choice.useful import GroupUse, UsefulGroups
from art.metrics.catalogue import CATALOGUE

GROUPS = [
    GroupUse(rewards=[0.0, 1.0] * 4, num_run=8, num_planned=8),
    GroupUse(rewards=[0.0] * 7 + [1.0], num_run=8, num_planned=8),
    GroupUse(rewards=[1.0] * 8, num_run=8, num_planned=8, is_extra=True),
    GroupUse(rewards=[1.0] * 4, num_run=4, num_planned=8),
    GroupUse(rewards=[], num_run=8, num_planned=8),
]


def test_the_metrics_of_a_step() -> None:
    metrics = UsefulGroups(groups=GROUPS).metrics(wall_s=60.0, sampled_tokens=1200, usd=0.5)
    assert metrics == {
        "pipeline/groups_useful_share": 0.4,
        "pipeline/groups_extra": 1,
        "pipeline/groups_stopped_early": 1,
        "pipeline/groups_lost": 1,
        "pipeline/rollouts_run": 36,
        "pipeline/rollouts_saved": 4,
        "pipeline/rollouts_per_useful_group": 18,
        "pipeline/seconds_per_useful_group": 30,
        "pipeline/tokens_per_useful_group": 600,
        "pipeline/usd_per_useful_group": 0.25,
    }


def test_what_is_not_known_is_left_out() -> None:
    metrics = UsefulGroups(groups=GROUPS[2:4]).metrics(wall_s=60.0)
    assert metrics["pipeline/groups_useful_share"] == 0
    assert not [name for name in metrics if name.endswith("per_useful_group")]
    assert "pipeline/usd_per_useful_group" not in UsefulGroups(groups=GROUPS).metrics(wall_s=1.0)


def test_rewards_that_differ_by_less_than_the_tolerance_are_not_useful() -> None:
    groups = UsefulGroups(groups=[GroupUse(rewards=[1.0, 1.0 + 1e-9], num_run=2, num_planned=2)], tolerance=1e-6)
    assert groups.metrics(wall_s=1.0)["pipeline/groups_useful_share"] == pytest.approx(0)


def test_every_name_is_in_the_catalogue() -> None:
    metrics = UsefulGroups(groups=GROUPS).metrics(wall_s=60.0, sampled_tokens=1200, usd=0.5)
    assert metrics.keys() <= CATALOGUE.keys()
