"""Every setting is honoured or refused by name; a new field fails here until that is decided."""

from __future__ import annotations

from typing import Any, get_args

import pytest

import art
from art.config import (
    CispoConfig,
    EngineConfig,
    EntropyConfig,
    KlConfig,
    LoraConfig,
    MismatchConfig,
    ModelSettings,
    OptimizerConfig,
    PpoConfig,
    RenderConfig,
    ScheduleConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
)
from art.config.losses import LossConfig
from art.config.training import train_config
from art.errors import ConfigError
from art_cloud.serverless_service import REFUSED, ServiceRlConfig, check_model, rl_config, sft_config
from tests.support.serverless_shapes import faults


def all_losses() -> dict[str, Any]:
    """The classes of losses by their names, from the union in `LossConfig`."""
    found: dict[str, Any] = {}
    queue = [LossConfig]
    while queue:
        annotation = queue.pop()
        if hasattr(annotation, "model_fields"):
            found[annotation.model_fields["type"].default] = annotation
        queue += get_args(annotation)
    return found


HONOURED = {
    TrainConfig: {"learning_rate", "loss", "anchor", "scale_rewards", "mismatch"},
    TrainSFTConfig: {"learning_rate", "batch_size"},
    ModelSettings: set[str](),
    CispoConfig: {"type", "clip_low", "clip_high"},
    PpoConfig: {"type", "clip_low", "clip_high"},
    KlConfig: {"type", "weight", "reference", "estimator", "where"},
}


@pytest.mark.parametrize("settings", REFUSED)
def test_each_field_is_decided(settings: Any) -> None:
    decided = REFUSED[settings].keys() | HONOURED[settings]
    assert decided == settings.model_fields.keys(), "decide what the service does with the new field"


def test_each_loss_is_sent_or_refused() -> None:
    losses = all_losses()
    assert losses.keys() >= {"dppo", "cispo", "ppo", "gspo", "kl", "custom"}
    for name in (name for name, kind in losses.items() if kind not in REFUSED):
        needed = {"distill": {"teacher": "p/m"}, "custom": {"function": "m:f"}}.get(name, {})
        term = losses[name](**needed)
        with_others = (term, CispoConfig()) if name == "entropy" else term
        with pytest.raises(ConfigError, match=rf"the loss {name} \(it has only cispo and ppo"):
            rl_config(TrainConfig(loss=with_others, mismatch=None), 0)


REFUSED_VALUES: dict[str, Any] = {
    "baseline": "leave_one_out",
    "scale_rewards": "batch",
    "normalize": "rollout",
    "mask_truncated": True,
    "num_minibatches": 2,
    "mismatch": MismatchConfig(tokens=(1e-4, 50.0)),
    "sft_weight": 0.5,
    "observation_weight": 0.1,
    "optimizer": OptimizerConfig(weight_decay=0.1),
}


@pytest.mark.parametrize("name", sorted(REFUSED_VALUES))
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot honour {name}"):
        rl_config(TrainConfig(loss=CispoConfig(), **{name: REFUSED_VALUES[name]}), 0)


def test_each_field_that_is_not_sent_has_a_refused_value() -> None:
    assert REFUSED[TrainConfig].keys() <= REFUSED_VALUES.keys()


def test_several_refusals_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"baseline='leave_one_out'.*num_minibatches=3.*the loss reinforce"):
        rl_config(TrainConfig(loss="rloo", num_minibatches=3), 0)


def test_defaults_are_sent_as_they_are() -> None:
    sent = rl_config(TrainConfig(), 5)
    assert sent == ServiceRlConfig(
        learning_rate=1e-5, loss_fn="cispo", ppo=False, epsilon=1.0, epsilon_high=4.0, scale_rewards=False,
        normalize_advantages=False,
    )  # fmt: skip
    assert faults(sent.model_dump(mode="json"), "RlConfig") == []


def test_ppo_with_everything_that_can_be_sent() -> None:
    config = train_config(
        None,
        {
            "loss": (PpoConfig(clip_low=0.1, clip_high=0.3), KlConfig(
                weight=0.02, reference=3, estimator="k1", where="reward")),
            "scale_rewards": "group", "anchor": "step_start", "mismatch": MismatchConfig(truncate=2.0),
            "learning_rate": ScheduleConfig(peak=1e-4, type="linear", total_steps=4),
        },
    )  # fmt: skip
    sent = rl_config(config, 1)
    assert sent.model_dump() == {
        "learning_rate": pytest.approx(7.5e-5), "loss_fn": "ppo", "ppo": True, "epsilon": 0.1, "epsilon_high": 0.3,
        "scale_rewards": True, "normalize_advantages": True, "importance_sampling_level": "token",
        "precalculate_logprobs": True, "truncated_importance_sampling": 2.0, "kl_penalty_coef": 0.02,
        "kl_penalty_reference_step": 3,
    }  # fmt: skip
    assert faults(sent.model_dump(mode="json"), "RlConfig") == []


def test_older_words_arrive() -> None:
    kl = rl_config(TrainConfig(kl_penalty_coef=0.1), 0)
    assert (kl.loss_fn, kl.kl_penalty_coef, kl.kl_penalty_reference_step) == ("cispo", 0.1, None)
    with pytest.raises(ConfigError, match=r"where=.loss. and estimator=.k3."):
        rl_config(TrainConfig(beta=0.1), 0)
    with pytest.raises(ConfigError, match=r"the loss dppo"):
        rl_config(train_config(None, {"loss": "dppo"}), 0)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(CispoConfig(weight=0.5), "cispo.weight=0.5")],
)
def test_parts_of_a_loss_are_refused_too(loss: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        rl_config(TrainConfig(loss=loss), 0)


def test_supervised_settings() -> None:
    assert sft_config(TrainSFTConfig(), 9).model_dump() == {"batch_size": 2, "learning_rate": 5e-5}
    listed = sft_config(TrainSFTConfig(learning_rate=[1e-5, 2e-5], batch_size=5), 9)
    assert listed.learning_rate == [1e-5, 2e-5]
    scheduled = sft_config(TrainSFTConfig(learning_rate=ScheduleConfig(peak=1e-4), batch_size=3), 8)
    assert scheduled.learning_rate == pytest.approx([1e-4, 1e-4 * 2 / 3, 1e-4 / 3])
    assert faults(scheduled.model_dump(mode="json"), "SftConfig") == []
    with pytest.raises(ConfigError, match="optimizer"):
        sft_config(TrainSFTConfig(optimizer=OptimizerConfig()), 9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora", None),
        ("lora", LoraConfig(rank=8)),
        ("engine", EngineConfig(max_running=4)),
        ("trainer", TrainerConfig(max_tokens=512)),
        ("render", RenderConfig(keep_reasoning=True)),
    ],
)
def test_settings_of_a_model_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"settings\.{name}"):
        check_model(ModelSettings(**{name: value}), None, "owner/model")


def test_base_models() -> None:
    assert check_model(ModelSettings(), None, "OpenPipe/Qwen3-14B-Instruct") == "OpenPipe/Qwen3-14B-Instruct"
    with pytest.raises(ConfigError, match="is a folder"):
        check_model(ModelSettings(), None, "./model")
    with pytest.raises(ConfigError, match="trainer_args"):
        check_model(ModelSettings(), OptimizerConfig(), "owner/model")


def test_an_entropy_bonus_is_refused_beside_a_loss_that_is_sent() -> None:
    with pytest.raises(ConfigError, match="the loss entropy"):
        rl_config(art.TrainConfig(loss=(PpoConfig(), EntropyConfig())), 0)
