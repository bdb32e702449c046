"""Settings that would do nothing together, or not what they say, are refused."""

from __future__ import annotations

from typing import Any

import pytest

from art.config import (
    DistillConfig,
    DpoConfig,
    DppoConfig,
    EngineConfig,
    GspoConfig,
    KlConfig,
    MismatchConfig,
    ModelSettings,
    OptimizerConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
)
from art.config.training import train_config
from art.errors import ConfigError

DISTILL = DistillConfig(teacher="p/teacher")
REWARD_KL = KlConfig(where="reward")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": ()}, "no term that learns anything"),
        ({"loss": KlConfig()}, "no term that learns anything"),
        ({"loss": (PpoConfig(weight=0), KlConfig())}, "no term that learns anything"),
        ({"loss": (DppoConfig(), PpoConfig())}, "several objectives that learn from rewards: dppo, ppo"),
        ({"loss": (DppoConfig(), KlConfig(), KlConfig(reference=3))}, "two terms of the same type"),
        ({"loss": "dr_grpo"}, "needs a number as `normalize`"),
        ({"constant_tokens": 5}, "is no setting any more; give the number as `normalize`"),
        ({"mismatch": MismatchConfig(truncate=2)}, "needs anchor='step_start'"),
        ({"scale_rewards": "mean", "baseline": "leave_one_out"}, "do not apply"),
        *[
            ({"loss": loss} | setting, f"{name} needs an objective that weighs advantages")
            for loss in (SftConfig(), DISTILL)
            for name, setting in (
                ("scale_rewards", {"scale_rewards": "group"}),
                ("baseline", {"baseline": "leave_one_out"}),
            )
        ],
        ({"loss": (SftConfig(), REWARD_KL)}, "KL in the reward needs an objective"),
        ({"loss": SftConfig(), "anchor": "step_start"}, "sft has no importance ratio"),
        ({"loss": DpoConfig(), "baseline": "leave_one_out"}, "baseline needs an objective"),
        ({"loss": DpoConfig(), "scale_rewards": "group"}, "scale_rewards needs an objective"),
        ({"loss": DpoConfig(), "normalize": "rollout"}, "dpo is a mean over pairs"),
        ({"loss": DpoConfig(), "num_minibatches": 2}, "dpo takes no other terms"),
        ({"loss": (DpoConfig(), KlConfig())}, "dpo takes no other terms"),
        ({"loss": DpoConfig(), "anchor": "step_start"}, "dpo has no importance ratio"),
        ({"loss": DpoConfig(), "mismatch": MismatchConfig(mask_tokens=(0.5, 2))}, "dpo compares whole rollouts"),
    ],
)
def test_combinations_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


def test_terms_may_be_summed() -> None:
    loss = (DppoConfig(weight=0.5), SftConfig(), DISTILL, KlConfig(where="reward"))
    config = TrainConfig.model_validate_json(TrainConfig(loss=loss).model_dump_json())
    assert config.terms == loss
    assert config.learns_from_rewards
    assert not TrainConfig(loss=(DISTILL, KlConfig())).learns_from_rewards


# -- presets: only what differs from the defaults is listed --

PRESETS: list[tuple[TrainConfig, dict[str, Any]]] = [
    (TrainConfig(loss="grpo"), {"loss": PpoConfig(clip_high=0.2), "scale_rewards": "group", "normalize": "rollout"}),
    (
        TrainConfig(loss="dr_grpo", normalize=9),
        {"loss": PpoConfig(clip_high=0.2), "normalize": 9},
    ),
    (TrainConfig(loss="dapo"), {"loss": PpoConfig(clip_low=0.2, clip_high=0.28), "scale_rewards": "group"}),
    (TrainConfig(loss="gspo"), {"loss": GspoConfig(), "scale_rewards": "group", "normalize": "rollout"}),
    (TrainConfig(loss="rloo"), {"loss": ReinforceConfig(), "baseline": "leave_one_out"}),
    (TrainConfig(loss="maxrl"), {"loss": ReinforceConfig(), "scale_rewards": "mean"}),
]


@pytest.mark.parametrize(("preset", "settings"), PRESETS)
def test_presets(preset: TrainConfig, settings: dict[str, Any]) -> None:
    assert preset == TrainConfig(**settings)


def test_presets_take_further_settings_and_other_values() -> None:
    config = TrainConfig(loss="dapo", learning_rate=1e-4, scale_rewards="none")
    assert (config.learning_rate, config.scale_rewards) == (1e-4, "none")
    with pytest.raises(ConfigError, match="epsilon"):
        TrainConfig(loss="grpo", epsilon=0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": TrainerConfig(quantization="nf4")}, "needs whole weights"),
        ({"trainer": TrainerConfig(shard_base=True, num_processes=2)}, "needs whole weights"),
        (
            {"trainer": TrainerConfig(dtype="float32"), "engine": EngineConfig(dtype="bfloat16")},
            "set the same dtype for both",
        ),
        ({"engine": EngineConfig(device="cpu")}, "set the same dtype for both"),
    ],
)
def test_full_finetuning_needs_weights_that_both_sides_have_alike(settings: dict[str, Any], message: str) -> None:
    ModelSettings(**settings)
    with pytest.raises(ConfigError, match=message):
        ModelSettings(lora=None, **settings)
    same = {"device": "cpu", "dtype": "float32"}
    ModelSettings(lora=None, engine=EngineConfig(**same), trainer=TrainerConfig(**same | {"device": "cuda"}))


@pytest.mark.parametrize("as_json", [False, True])
def test_the_engine_follows_the_trainer_where_both_must_agree(as_json: bool) -> None:
    def settings(**parts: Any) -> ModelSettings:
        return ModelSettings.model_validate(
            {name: part.model_dump(exclude_unset=True) if as_json and part else part for name, part in parts.items()}
        )

    assert settings(trainer=TrainerConfig(quantization="nf4")).engine == EngineConfig()
    assert settings(lora=None, trainer=TrainerConfig(dtype="float32")).engine.dtype == "float32"
    assert settings(trainer=TrainerConfig(dtype="float32")).engine.dtype == "auto", "an adapter needs no agreement"
    older = {"trainer": {"quantization": "nf4"}, "engine": {"kind": "torch", "quantization": "nf4", "max_running": 3}}
    assert ModelSettings.model_validate(older).engine == EngineConfig(max_running=3)
    with pytest.raises(ConfigError, match=r"set `trainer\.quantization`"):
        ModelSettings(**older | {"trainer": {}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": "5e-3"}, "wrong training settings: `learning_rate` takes a number, without quotes; got '5e-3'"),
        ({"learning_rate": True}, "wrong training settings: `learning_rate` takes a number; got True"),
        ({"learning_rate": -1}, "wrong training settings: `learning_rate` must be greater than 0, got -1"),
        ({"num_minibatches": "2"}, "wrong training settings: `num_minibatches` takes a number, without quotes; got '2'"),
        ({"optimizer": {"betas": ["0.9", 0.99]}}, "wrong training settings: `betas` takes a number, without quotes; got '0.9'"),
        ({"optimizer": {"foo": 1}}, "wrong training settings: `optimizer.foo` is no setting of TrainConfig"),
        ({"overlong": {"max_tokens": 9}}, "wrong training settings: `overlong` is no setting any more; "
         "take the punishment off the reward in the rollout"),
        ({"learning_rate": 2, "num_minibatches": 0},
         "wrong training settings: `learning_rate` must be less than or equal to 1, got 2; "
         "`num_minibatches` must be greater than or equal to 1, got 0"),
        ({"loss": "pop"}, "wrong training settings: `loss` must be one of dppo, ppo, cispo, reinforce, sft, dpo, grpo, "
         "dr_grpo, dapo, gspo, sapo, rloo, maxrl; got 'pop'"),
    ],
)  # fmt: skip
def test_wrong_values_are_told_in_plain_words(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_config(None, settings)
    assert caught.value.message == message


def test_numbers_may_be_whole_and_words_that_are_allowed_stay() -> None:
    assert train_config(None, {"learning_rate": 1}).learning_rate == 1.0
    assert TrainSFTConfig(batch_size="auto", learning_rate=[1, 0.5]).batch_size == "auto"
    for wrong in ({"batch_size": "4"}, {"learning_rate": [1e-3, "1e-4"]}):
        with pytest.raises(ConfigError, match="takes a number, without quotes"):
            TrainSFTConfig(**wrong)


def test_a_constructor_says_in_plain_words_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"^TrainConfig: `learning_rate` must be greater than 0, got -1$"):
        TrainConfig(learning_rate=-1)
    with pytest.raises(ConfigError, match=r"^TrainSFTConfig: `rate` is no setting of TrainSFTConfig$"):
        TrainSFTConfig(rate=1)  # type: ignore[call-arg]


def test_a_named_loss_leaves_other_settings_open() -> None:
    """A model's own optimiser takes the place of one that was not given, whichever way the loss was chosen."""
    named = train_config(None, {"loss": {"type": "ppo", "clip_high": 0.3}})
    assert isinstance(named.terms[0], PpoConfig)
    assert named.terms[0].clip_high == 0.3
    assert "optimizer" not in named.model_fields_set
    assert "optimizer" in train_config(None, {"loss": "ppo", "optimizer": OptimizerConfig()}).model_fields_set
    with_kl = train_config(TrainConfig(beta=0.1), {"loss": "ppo"})
    assert [term.type for term in with_kl.terms] == ["ppo", "kl"]
    assert "optimizer" not in with_kl.model_fields_set
