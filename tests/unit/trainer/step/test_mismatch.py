from __future__ import annotations

import logging
import math

import pytest
import torch

from art.config import MismatchConfig
from art.errors import ConfigError, TrainingError
from art.trainer.step.mismatch import find_mismatched, judge_mismatch


def mismatched(log_ratios: list[list[float]], **config: float) -> list[bool]:
    flat = [value for sample in log_ratios for value in sample]
    samples = [i for i, sample in enumerate(log_ratios) for _ in sample]
    found = find_mismatched(
        torch.tensor(flat, dtype=torch.float32),
        torch.tensor(samples, dtype=torch.int64),
        len(log_ratios),
        MismatchConfig(**config),
    )
    return found.tolist()


def test_geometric_mean_decides_whatever_the_length() -> None:
    inside, outside = 0.009, 0.02
    assert mismatched([[inside], [inside] * 500, [outside], [outside] * 500]) == [False, False, True, True]
    assert mismatched([[-inside] * 3, [-outside] * 3]) == [False, True]


def test_opposite_errors_cancel_in_the_mean() -> None:
    assert mismatched([[0.5, -0.5]]) == [False]


def test_a_single_outlier_masks_its_sample() -> None:
    far = math.log(101)
    assert mismatched([[far, -far], [-math.log(1.01e4), math.log(1.01e4) / 2, math.log(1.01e4) / 2]]) == [True, True]


def test_a_sample_without_targets_is_no_mismatch() -> None:
    assert mismatched([[0.0], [], [1.0]]) == [False, False, True]


def test_bounds_are_the_configured_ones() -> None:
    assert mismatched([[0.4]], high=1.5) == [False]
    assert mismatched([[0.41]], high=1.5) == [True]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mask_token_low": 1e-5}, "`mask_token_low` must be above `token_low`"),
        ({"mask_token_high": 5.0, "token_high": 4.0}, "`mask_token_high` must be below `token_high`"),
        ({"truncate": 2.0, "mask_token_high": 2.0}, "never truncates"),
        ({"truncate": 200.0}, "never truncates"),
        ({"token_low": 2.0}, "less than or equal to 1"),
        ({"token_high": 0.5}, "greater than or equal to 1"),
    ],
)
def test_bounds_that_would_do_nothing_are_refused(config: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MismatchConfig(**config)


def test_share_alarm_and_abort(caplog: pytest.LogCaptureFixture) -> None:
    config = MismatchConfig(alarm=0.1, abort=0.5)
    with caplog.at_level(logging.WARNING):
        assert judge_mismatch(1, 10, config) == 0.1
        assert not caplog.records
        assert judge_mismatch(5, 10, config) == 0.5
    assert "5 of 10 samples" in caplog.text
    with pytest.raises(TrainingError, match=r"6 of 10 samples .* nothing was trained"):
        judge_mismatch(6, 10, config)
    assert judge_mismatch(0, 0, config) == 0.0
