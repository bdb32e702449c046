"""Options of `Backend.train` and of older code: what `TrainConfig` they become, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from art.config import (
    CispoConfig,
    DpoConfig,
    DppoConfig,
    GspoConfig,
    KlConfig,
    MismatchConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
    TrainConfig,
)
from art.config.training import ALGORITHMS
from art.errors import ConfigError
from openpipe_art.train_words import train_config


def options(**given: Any) -> TrainConfig:
    return train_config(None, given)


# -- settings --


def test_nothing_given_is_the_default() -> None:
    assert options(learning_rate=None) == options(verbose=True, beta=0.0, kl_penalty_coef=0.0) == TrainConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1e-4, "num_minibatches": 2},
        {"baseline": "leave_one_out", "scale_rewards": "batch"},
        {"normalize": 100},
        {"mismatch": MismatchConfig(abort=0.9)},
        {"loss": (PpoConfig(), KlConfig())},
        {"loss": PpoConfig(), "anchor": "step_start"},
    ],
)
def test_every_setting_of_the_config_is_an_option(settings: dict[str, Any]) -> None:
    assert options(**settings) == TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"epsilon": 0.2}, CispoConfig(clip_low=0.2)),
        ({"epsilon_high": 3.0}, CispoConfig(clip_high=3.0)),
        ({"ppo": True}, PpoConfig()),
        ({"ppo": True, "epsilon": 0.3}, PpoConfig(clip_low=0.3, clip_high=0.3)),
        ({"ppo": False, "kl_penalty_source": "current_learner", "objectives": None, "session": None}, DppoConfig()),
    ],
)
def test_the_losses_and_clips_of_older_calls(settings: dict[str, Any], loss: Any) -> None:
    assert options(**settings).terms[0] == loss


def test_config_and_options_complete_each_other() -> None:
    mine = TrainConfig(learning_rate=1e-3)
    assert train_config(mine, {"learning_rate": None, "verbose": True}) is mine
    assert train_config(mine, {"loss_fn": "cispo"}) == TrainConfig(learning_rate=1e-3, loss=CispoConfig())
    assert train_config(mine, {"loss_fn": "grpo"}) == TrainConfig(loss="grpo", learning_rate=1e-3)
    assert train_config(TrainConfig(loss="dapo"), {"learning_rate": 1e-3}) == TrainConfig(
        loss="dapo", learning_rate=1e-3
    )
    assert train_config(mine, {"kl_penalty_coef": 0.1}).terms[0] == DppoConfig()


@pytest.mark.parametrize(
    ("config", "given", "named"),
    [
        ({"learning_rate": 1e-5}, {"learning_rate": 1e-4}, "learning_rate"),
        ({"loss": PpoConfig()}, {"loss_fn": "cispo"}, "loss_fn"),
        ({"loss": PpoConfig()}, {"epsilon": 0.1}, "epsilon"),
        ({}, {"loss": PpoConfig(), "loss_fn": "ppo"}, "loss_fn"),
        ({"scale_rewards": "group"}, {"normalize_advantages": True}, "scale_rewards"),
        ({"mismatch": None}, {"truncated_importance_sampling": 2.0}, "mismatch"),
    ],
)
def test_nothing_is_given_twice(config: dict[str, Any], given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*given twice"):
        train_config(TrainConfig(**config), given)


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ({"scale_rewards": True}, "group"),
        ({"scale_rewards": False}, "none"),
        ({"scale_rewards": "group"}, "group"),
        ({"scale_rewards": "batch"}, "batch"),
        ({"scale_rewards": "mean"}, "mean"),
        ({"normalize_advantages": True}, "group"),
        ({"normalize_advantages": True, "scale_rewards": False}, "none"),
        ({"loss_fn": "grpo", "scale_rewards": False}, "none"),
    ],
)
def test_scale_of_rewards(given: dict[str, Any], scale: str) -> None:
    assert options(**given).scale_rewards == scale


# -- losses --


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dppo", TrainConfig()),
        ("ppo", TrainConfig(loss=PpoConfig())),
        ("cispo", TrainConfig(loss=CispoConfig())),
        ("reinforce", TrainConfig(loss=ReinforceConfig())),
        ("sft", TrainConfig(loss=SftConfig())),
        ("dpo", TrainConfig(loss=DpoConfig())),
        ("grpo", TrainConfig(loss="grpo")),
        ("dr_grpo", TrainConfig(loss="dr_grpo", normalize=64)),
        ("dapo", TrainConfig(loss="dapo")),
        ("gspo", TrainConfig(loss="gspo")),
        ("rloo", TrainConfig(loss="rloo")),
        ("maxrl", TrainConfig(loss="maxrl")),
    ],
)
def test_every_name_of_a_loss(name: str, config: TrainConfig) -> None:
    assert name in ALGORITHMS
    assert options(loss_fn=name, normalize=config.normalize) == config


def test_there_is_no_further_name_of_a_loss() -> None:
    with pytest.raises(ConfigError) as caught:
        options(loss_fn="nope")
    assert str(caught.value) == f"loss_fn must be one of {', '.join(ALGORITHMS)}; got 'nope'"


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ({"loss_fn": "cispo", "epsilon": 0.5}, CispoConfig(clip_low=0.5)),
        ({"loss_fn": "ppo", "epsilon": 0.1}, PpoConfig(clip_low=0.1, clip_high=0.1)),
        ({"loss_fn": "ppo", "epsilon_high": 0.4}, PpoConfig(clip_high=0.4)),
        ({"loss_fn": "grpo", "epsilon_high": 0.28}, PpoConfig(clip_low=0.2, clip_high=0.28)),
        ({"loss_fn": "grpo", "loss_fn_config": {"clip_low": 0.1}}, PpoConfig(clip_low=0.1, clip_high=0.2)),
        ({"loss_fn_config": {"max_move": 0.1}}, DppoConfig(max_move=0.1)),
        ({"loss_fn": "dpo", "loss_fn_config": {"beta": 0.3}}, DpoConfig(beta=0.3)),
        ({"importance_sampling_level": "sequence"}, GspoConfig()),
        ({"importance_sampling_level": "sequence", "epsilon": 1e-3}, GspoConfig(clip_low=1e-3, clip_high=1e-3)),
        ({"importance_sampling_level": "sequence", "loss_fn": "grpo"}, GspoConfig()),
        ({"importance_sampling_level": "sequence", "loss_fn": "gspo"}, GspoConfig()),
        ({"importance_sampling_level": "token", "loss_fn": "ppo"}, PpoConfig()),
    ],
)
def test_options_of_losses(given: dict[str, Any], loss: object) -> None:
    assert options(**given).loss == loss


def test_truncated_importance_sampling() -> None:
    config = options(loss_fn="ppo", truncated_importance_sampling=2.0)
    assert config == TrainConfig(loss=PpoConfig(), anchor="step_start", mismatch=MismatchConfig(truncate=2.0))
    begun = train_config(TrainConfig(anchor="step_start"), {"truncated_importance_sampling": 2.0})
    assert begun == TrainConfig(anchor="step_start", mismatch=MismatchConfig(truncate=2.0))


def test_kl_penalties_of_older_code() -> None:
    shaped = KlConfig(weight=0.1, estimator="k1", where="reward")
    assert options(kl_penalty_coef=0.1).loss == (DppoConfig(), shaped)
    at_step = options(loss_fn="ppo", kl_penalty_coef=0.1, kl_penalty_reference_step=7)
    assert at_step.loss == (PpoConfig(), shaped.model_copy(update={"reference": 7}))
    assert options(beta=0.04, loss_fn="grpo").loss == (PpoConfig(clip_high=0.2), KlConfig(weight=0.04))


def test_kl_penalties_of_an_older_train_config() -> None:
    assert TrainConfig(beta=0.0) == TrainConfig()
    config = TrainConfig(learning_rate=1e-4, beta=0.04)
    assert config.loss == (DppoConfig(), KlConfig(weight=0.04))
    assert train_config(config, {}) is config
    assert train_config(config, {"loss_fn": "ppo", "epsilon": 0.2}) == TrainConfig(
        learning_rate=1e-4, loss=(PpoConfig(clip_low=0.2, clip_high=0.2), KlConfig(weight=0.04))
    )
    assert TrainConfig(loss="grpo", beta=0.1).loss == (PpoConfig(clip_high=0.2), KlConfig(weight=0.1))
    shaped = KlConfig(weight=0.1, estimator="k1", where="reward")
    assert TrainConfig(kl_penalty_coef=0.1, loss=PpoConfig()).loss == (PpoConfig(), shaped)
    with pytest.raises(ConfigError, match="beta must be a number from 0 up, got -1"):
        TrainConfig(beta=-1)
    with pytest.raises(ConfigError, match="loss_fn: given twice"):
        train_config(TrainConfig(loss=DppoConfig(), beta=0.1), {"loss_fn": "ppo"})
    with pytest.raises(ConfigError, match='`kl_penalty_coef` are terms of the type "kl"'):
        train_config(config, {"beta": 0.1})


# -- what is refused --


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"save_checkpoint": False}, "save_checkpoint=False"),
        ({"kl_ref_adapter_path": "x"}, "kl_ref_adapter_path='x'"),
        ({"no_such_thing": 1}, "no_such_thing=1"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"scale_rewards": "rank"}, "scale_rewards"),
        ({"loss_fn": "dppo", "epsilon": 0.2}, "epsilon is a clip of"),
        ({"ppo": True, "loss_fn": "cispo"}, "are two losses"),
        ({"kl_penalty_source": "sample"}, "kl_penalty_source='sample'"),
        ({"loss_fn": "ppo", "loss_fn_config": {"mask_low": 1}}, "mask_low"),
        ({"loss_fn": "ppo", "epsilon": 0.2, "loss_fn_config": {"clip_low": 0.1}}, "clip_low: given by"),
        ({"loss_fn": "dr_grpo"}, "normalize"),
        ({"importance_sampling_level": "average"}, "importance_sampling_level='average'"),
        ({"importance_sampling_level": "sequence", "loss_fn": "cispo"}, "is not supported by the loss cispo"),
        ({"kl_penalty_reference_step": 3}, "kl_penalty_reference_step does nothing without"),
        ({"kl_penalty_coef": 0.1, "beta": 0.1}, "two terms of the same type"),
        ({"kl_penalty_coef": 0.1, "loss_fn": "sft"}, "needs an objective that weighs advantages"),
        ({"kl_penalty_coef": -0.1}, "kl_penalty_coef must be a number from 0 up, got -0.1"),
        ({"beta": "0.1"}, "beta must be a number from 0 up, got '0.1'"),
        ({"truncated_importance_sampling": 2.0, "anchor": "sampler"}, "step_start"),
        ({"truncated_importance_sampling": 2.0, "mismatch": MismatchConfig()}, "`truncate` of `mismatch`"),
    ],
)
def test_what_cannot_be_honoured_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        options(**settings)
