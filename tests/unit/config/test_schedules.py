"""Learning rates by step."""

from __future__ import annotations

import math

import pytest

from art.config import ScheduleConfig, TrainConfig, TrainSFTConfig
from art.errors import ConfigError
from art.task import TaskDefaults


def rates(schedule: ScheduleConfig, count: int) -> list[float]:
    return [schedule.rate_at(step) for step in range(count)]


def test_linear_falls_to_the_last_step() -> None:
    assert rates(ScheduleConfig(peak=1.0, total_steps=4), 4) == [1.0, 0.75, 0.5, 0.25]


def test_warm_up_rises_to_the_peak() -> None:
    schedule = ScheduleConfig(peak=0.8, warmup_steps=3, total_steps=5)
    assert rates(schedule, 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.4])
    assert rates(ScheduleConfig(type="constant", peak=0.8, warmup_steps=1), 3) == [0.4, 0.8, 0.8]


def test_cosine_ends_at_the_smallest_rate_and_stays_there() -> None:
    schedule = ScheduleConfig(type="cosine", peak=1.0, total_steps=4, min_ratio=0.2)
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(5)]
    assert rates(schedule, 5) == pytest.approx(expected)
    assert schedule.rate_at(400) == 0.2


def test_a_step_after_the_end_would_change_nothing() -> None:
    config = TrainConfig(learning_rate=ScheduleConfig(peak=1e-3, total_steps=4))
    assert config.rate_at(3) == 1e-3 / 4
    with pytest.raises(ConfigError, match="the learning rate is 0 at step 4: its schedule ended at `total_steps`=4"):
        config.rate_at(4)
    assert TrainConfig(learning_rate=1e-3).rate_at(400) == 1e-3


def test_a_schedule_crosses_the_wire() -> None:
    for config in (
        TrainConfig(learning_rate=ScheduleConfig(type="constant", peak=1e-3)),
        TrainSFTConfig(learning_rate=ScheduleConfig(type="cosine", peak=1e-3)),
        TrainSFTConfig(learning_rate=[1e-3, 1e-4]),
    ):
        assert type(config).model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"peak": 2.0}, "`peak` must be less than or equal to 1"),
        ({"peak": 0.1, "type": "constant", "total_steps": 4}, 'a "constant" schedule does not fall'),
        ({"peak": 0.1, "type": "constant", "min_ratio": 0.5}, 'a "constant" schedule does not fall'),
        ({"peak": 0.1, "warmup_steps": 4, "total_steps": 4}, "`warmup_steps` must be below `total_steps`; got 4 of 4"),
        ({"peak": 0.1, "type": "cubic"}, "`type` must be 'constant', 'linear' or 'cosine'"),
    ],
)
def test_schedules_that_make_no_sense(settings: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ScheduleConfig(**settings)


def test_a_run_must_say_when_it_ends() -> None:
    with pytest.raises(ConfigError, match='a "linear" schedule needs `total_steps`'):
        TrainConfig(learning_rate=ScheduleConfig(peak=0.1))
    TrainSFTConfig(learning_rate=ScheduleConfig(peak=0.1))  # the call has a number of batches


def test_a_task_has_a_schedule_over_its_run() -> None:
    linear = TaskDefaults(learning_rate=1e-3).rate_schedule(10)
    assert isinstance(linear, ScheduleConfig)
    assert rates(linear, 10) == pytest.approx([1e-3 * (10 - step) / 10 for step in range(10)])
    constant = TaskDefaults(learning_rate=1e-3, schedule="constant", warmup_steps=1).rate_schedule(10)
    assert isinstance(constant, ScheduleConfig)
    assert rates(constant, 3) == [5e-4, 1e-3, 1e-3]
    assert TaskDefaults(learning_rate=1e-3, schedule="constant").rate_schedule(10) == 1e-3


def test_a_short_run_of_a_task_warms_up_in_half_of_its_steps() -> None:
    defaults = TaskDefaults(learning_rate=1e-3, warmup_steps=4)
    assert [
        schedule.warmup_steps if isinstance(schedule := defaults.rate_schedule(steps), ScheduleConfig) else None
        for steps in (1, 2, 3, 8, 30)
    ] == [0, 1, 1, 4, 4]
