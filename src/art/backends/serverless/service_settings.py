"""Which settings the service honours: each is sent, done here, left to the service, or refused by name.

`left`: the service decides it in its own way, so a value of the user's would have no effect. It is refused if it was
set at all, and the default of other backends is not what happens. `fixed`: the service does what the default says, and
nothing else. Tests hold the tables to the fields of the settings, and to docs/serverless.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from art.backends.serverless.wire import RlConfig, SftConfig
from art.config import (
    CispoConfig,
    KlConfig,
    MismatchConfig,
    ModelSettings,
    OptimizerConfig,
    PpoConfig,
    ScheduleConfig,
    TrainConfig,
    TrainSFTConfig,
)
from art.config.base_models import looks_like_path, resolve_base_model
from art.errors import ConfigError

AUTO_BATCH_SIZE = 2
"""Trajectories per update with `batch_size="auto"`, as in `TrainSFTConfig`."""


class Decision(NamedTuple):
    """What becomes of a setting."""

    fate: Literal["sent", "here", "left", "fixed"]
    how: str
    """What is sent or done, or why not, in words that end an error message."""


RL: Mapping[str, Decision] = {
    "learning_rate": Decision("sent", "as the rate of the step; a schedule is worked out here"),
    "loss": Decision("sent", "cispo or ppo with its clips; with a KL term if that is in the reward"),
    "anchor": Decision("sent", "as `precalculate_logprobs`"),
    "baseline": Decision("fixed", "it subtracts the mean reward of the group"),
    "scale_rewards": Decision("sent", 'only "none" and "group"'),
    "normalize": Decision("left", "it normalises its loss in its own way"),
    "constant_tokens": Decision("fixed", "it normalises its loss in its own way"),
    "mask_truncated": Decision("fixed", "it learns from truncated rollouts too; leave them out of the groups"),
    "num_minibatches": Decision("left", "it chooses the number of its updates itself"),
    "mismatch": Decision("sent", "only `None`, and `truncate` as `truncated_importance_sampling`: it has no gate"),
    "sft_weight": Decision("fixed", "it trains no supervised data in the same step; call `train_sft` in between"),
    "observation_weight": Decision("fixed", "it learns sampled tokens only"),
    "optimizer": Decision("left", "it chooses its optimiser itself"),
}
"""Fields of `TrainConfig`."""

SFT: Mapping[str, Decision] = {
    "learning_rate": Decision("sent", "a schedule as one rate per batch"),
    "batch_size": Decision("sent", f'"auto" as {AUTO_BATCH_SIZE}'),
    "optimizer": Decision("left", "it chooses its optimiser itself"),
}
"""Fields of `TrainSFTConfig`."""

MODEL: Mapping[str, Decision] = {
    "lora": Decision("left", "it chooses the adapter itself, and has no full fine-tuning"),
    "engine": Decision("left", "it samples with engines of its own"),
    "trainer": Decision("left", "it trains on machines of its own"),
    "render": Decision("left", "it renders messages with the base model's own template"),
    "sampling": Decision("fixed", "it samples as each request asks; set the sampling in the agent"),
}
"""Fields of `ModelSettings`."""

LOSSES: Mapping[str, Mapping[str, Decision]] = {
    "cispo": {
        "type": Decision("sent", "as `loss_fn`"),
        "weight": Decision("fixed", "its loss has no weight; change the learning rate"),
        "clip_low": Decision("sent", "as `epsilon`"),
        "clip_high": Decision("sent", "as `epsilon_high`"),
    },
    "ppo": {
        "type": Decision("sent", "as `loss_fn`"),
        "weight": Decision("fixed", "its loss has no weight; change the learning rate"),
        "clip_low": Decision("sent", "as `epsilon`"),
        "clip_high": Decision("sent", "as `epsilon_high`"),
        "dual_clip": Decision("fixed", "its ppo has no dual clip"),
    },
    "kl": {
        "type": Decision("sent", ""),
        "weight": Decision("sent", "as `kl_penalty_coef`"),
        "reference": Decision("sent", "as `kl_penalty_reference_step`"),
        "estimator": Decision("sent", 'only "k1"'),
        "where": Decision("sent", 'only "reward"'),
    },
}
"""Losses that the service has, with their fields. Any other loss is refused."""


def check_model(settings: ModelSettings, optimizer: OptimizerConfig | None, base_model: str) -> str:
    """Check what a model is registered with. Returns the hub id of its base model.

    Raises:
        ConfigError: a setting cannot be honoured, or the base model is a folder or a name that nobody knows.
    """
    refused = _refused_fields(settings, MODEL, "settings.")
    if optimizer is not None:
        refused.append(f"trainer_args ({RL['optimizer'].how})")
    _raise_if(refused)
    if looks_like_path(base_model):
        raise ConfigError(
            f"base model {base_model!r} is a folder, which the service cannot read; expected a hub id that it trains, "
            "see `await backend.base_models()`",
            param="base_model",
        )
    return resolve_base_model(base_model)


def rl_config(config: TrainConfig, step: int) -> RlConfig:
    """Make the service's settings of a step that starts from checkpoint `step`.

    Raises:
        ConfigError: a setting cannot be honoured, or the schedule of the learning rate has ended.
    """
    refused = _refused_fields(config, RL, "")
    loss, kl = _loss_terms(config, refused)
    if config.scale_rewards not in ("none", "group"):
        refused.append(f'scale_rewards={config.scale_rewards!r} (it knows only "none" and "group")')
    truncate = _truncate(config, refused)
    _raise_if(refused)
    scales = config.scale_rewards == "group"
    return RlConfig(
        learning_rate=config.rate_at(step), loss_fn=loss.type, ppo=loss.type == "ppo", epsilon=loss.clip_low,
        epsilon_high=loss.clip_high, scale_rewards=scales, normalize_advantages=scales,
        precalculate_logprobs=config.anchor == "step_start", truncated_importance_sampling=truncate,
        kl_penalty_coef=0.0 if kl is None else kl.weight,
        kl_penalty_reference_step=kl.reference if kl is not None and isinstance(kl.reference, int) else None,
    )  # fmt: skip


def uses_default_loss(config: TrainConfig) -> bool:
    """Whether the user has chosen no objective, so that the service's cispo is used in place of ART's default."""
    return config.terms[0] is TrainConfig.model_fields["loss"].default


def sft_config(config: TrainSFTConfig, num_trajectories: int) -> SftConfig:
    """Make the service's settings of supervised fine-tuning.

    Raises:
        ConfigError: a setting cannot be honoured.
    """
    _raise_if(_refused_fields(config, SFT, ""))
    size = AUTO_BATCH_SIZE if config.batch_size == "auto" else config.batch_size
    rate = config.learning_rate
    if isinstance(rate, ScheduleConfig):
        num_batches = math.ceil(num_trajectories / size)
        return SftConfig(
            batch_size=size, learning_rate=[rate.rate_at(i, total_steps=num_batches) for i in range(num_batches)]
        )
    return SftConfig(batch_size=size, learning_rate=rate)


def _loss_terms(config: TrainConfig, refused: list[str]) -> tuple[CispoConfig | PpoConfig, KlConfig | None]:
    """The objective and the KL term of a step. What cannot be honoured is added to `refused`."""
    loss: CispoConfig | PpoConfig = CispoConfig()
    kl: KlConfig | None = None
    for term in config.terms[1:] if uses_default_loss(config) else config.terms:
        if term.type not in LOSSES:
            refused.append(f"the loss {term.type} (it has only cispo and ppo: loss='cispo')")
            continue
        refused += _refused_fields(term, LOSSES[term.type], f"{term.type}.")
        if isinstance(term, KlConfig):
            kl = term
            if (term.where, term.estimator) != ("reward", "k1"):
                refused.append(
                    f"a KL term with where={term.where!r} and estimator={term.estimator!r} (it knows only "
                    'where="reward" with estimator="k1", which is `kl_penalty_coef`)'
                )
        elif isinstance(term, (CispoConfig, PpoConfig)):
            loss = term
    return loss, kl


def _truncate(config: TrainConfig, refused: list[str]) -> float | None:
    """The bound of truncated importance sampling. Bounds of a gate that were set are added to `refused`."""
    gate = config.mismatch
    if gate is None or "mismatch" not in config.model_fields_set:
        return None
    defaults = MismatchConfig().model_dump()
    bounds = [name for name, value in gate.model_dump().items() if name != "truncate" and value != defaults[name]]
    if bounds or gate.truncate is None:
        names = ", ".join(f"mismatch.{name}" for name in bounds) or "mismatch"
        refused.append(f"{names} (it has no gate; pass mismatch=None, or only `truncate`)")
    return gate.truncate


def _refused_fields(settings: BaseModel, decisions: Mapping[str, Decision], prefix: str) -> list[str]:
    refused = []
    for name, decision in decisions.items():
        value, default = getattr(settings, name), type(settings).model_fields[name].default
        is_set = name in settings.model_fields_set
        if (decision.fate == "left" and is_set) or (decision.fate == "fixed" and value != default):
            refused.append(f"{prefix}{name}={_short(value)} ({decision.how})")
    return refused


def _short(value: Any) -> str:
    """A setting in an error message: of an object only what was set."""
    if isinstance(value, BaseModel):
        fields = ", ".join(f"{name}={getattr(value, name)!r}" for name in sorted(value.model_fields_set))
        return f"{type(value).__name__}({fields})"
    return repr(value)


def _raise_if(refused: Iterable[str]) -> None:
    if texts := list(refused):
        raise ConfigError(
            f"the serverless service cannot honour {'; '.join(texts)}. Leave it out, or train with a backend that has "
            "an ART server, such as art.LocalBackend"
        )
