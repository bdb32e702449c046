"""Which losses may train rollouts of policies that are many steps old."""

from __future__ import annotations

from typing import Any

import pytest

from art.config import (
    CispoConfig,
    CustomLossConfig,
    DistillConfig,
    DpoConfig,
    DppoConfig,
    EntropyConfig,
    GspoConfig,
    KlConfig,
    MismatchConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
    TrainConfig,
)
from art.config.pipeline import LARGEST_WITHOUT_REGION, check_staleness
from art.errors import ConfigError

MASKS = MismatchConfig(mask_tokens=(0.5, 2))
WITHOUT: list[dict[str, Any]] = [
    {"loss": ReinforceConfig()},
    {"loss": ReinforceConfig()},
    {"loss": CispoConfig()},
    {"loss": CustomLossConfig(function="mine:loss")},
    {"loss": (SftConfig(), DistillConfig(teacher="big"))},
    {"loss": PpoConfig(), "anchor": "step_start"},
    {"loss": CispoConfig(), "mismatch": MASKS, "num_minibatches": 4},
]
WITH: list[dict[str, Any]] = [
    {},
    {"loss": (DppoConfig(), KlConfig(), EntropyConfig())},
    {"loss": PpoConfig()},
    {"loss": GspoConfig(), "num_minibatches": 4},
    {"loss": SftConfig()},
    {"loss": DpoConfig()},
    {"loss": (PpoConfig(), DistillConfig(teacher="big", weight=0))},
    {"loss": PpoConfig(), "anchor": "step_start", "mismatch": MismatchConfig(truncate=2)},
    {"loss": CispoConfig(), "mismatch": MASKS},
    {"loss": CispoConfig(), "mismatch": MASKS, "num_minibatches": 4, "anchor": "step_start"},
]


@pytest.mark.parametrize("settings", WITHOUT)
def test_a_loss_without_a_trust_region_is_refused_above_the_limit(settings: dict[str, Any]) -> None:
    config = TrainConfig(**settings)
    check_staleness(config, LARGEST_WITHOUT_REGION)
    with pytest.raises(ConfigError, match="max_staleness=5 needs a loss with a trust region"):
        check_staleness(config, LARGEST_WITHOUT_REGION + 1)


@pytest.mark.parametrize("settings", WITH)
def test_a_loss_with_a_trust_region_is_accepted(settings: dict[str, Any]) -> None:
    check_staleness(TrainConfig(**settings), 100)


@pytest.mark.parametrize("settings", WITHOUT[:2] + WITHOUT[5:])
def test_what_the_message_says_to_set_helps(settings: dict[str, Any]) -> None:
    config = TrainConfig(**settings)
    with pytest.raises(ConfigError) as caught:
        check_staleness(config, 8)
    advice = caught.value.message
    if "truncate=2" in advice:
        better = config.model_copy(update={"mismatch": MismatchConfig(truncate=2)})
    else:
        better = config.model_copy(update={"mismatch": MASKS})
        if "together with anchor='step_start'" in advice:
            better = better.model_copy(update={"anchor": "step_start"})
    check_staleness(better, 8)
