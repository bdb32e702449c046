"""Older words of `train`, and fields of models that older code sets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from art.config import CispoConfig, GspoConfig, LossConfig, MismatchConfig, PpoConfig, TrainConfig
from art.config.training import ALGORITHMS, add_terms, check_config, kl_penalties, plain_errors
from art.config.training import train_config as todays_config
from art.errors import ConfigError

logger = logging.getLogger(__name__)

_LOSS_WORDS = ("loss_fn", "loss_fn_config", "epsilon", "epsilon_high", "importance_sampling_level", "ppo")
_KL_WORDS = ("kl_penalty_coef", "kl_penalty_reference_step", "beta")
_HONOURED = (
    *TrainConfig.model_fields,
    *_LOSS_WORDS,
    *_KL_WORDS,
    "normalize_advantages",
    "truncated_importance_sampling",
)
HINTS = {"logprob_calculation_chunk_size", "plot_tensors", "precalculate_logprobs", "verbose"}
"""Settings of `train` in older code about memory or output only. They have no effect, and a warning says so once."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "adam_params": (None,),
    "advantage_balance": (0,),
    "allow_training_without_logprobs": (False, True),
    "beta": (0,),
    "grad_accumulation_sequences": (None,),
    "idempotency_key": (None,),
    "importance_sampling_level": ("token",),
    "kimi_k2_tau": (None,),
    "kl_penalty_coef": (0,),
    "kl_penalty_source": ("current_learner",),
    "kl_penalty_step_lag": (None,),
    "kl_ref_adapter_path": (None,),
    "mask_prob_ratio": (False,),
    "max_negative_advantage_importance_sampling_weight": (None,),
    "num_trajectories_learning_rate_multiplier_power": (0,),
    "objectives": (None,),
    "packed_sequence_length": (None,),
    "ppo": (False,),
    "save_checkpoint": (True,),
    "scale_learning_rate_by_reward_std_dev": (False,),
    "session": (None,),
}
"""Settings of `train` in older code, with values that ask for what is done anyway."""
_warned: set[str] = set()


def with_nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Join settings of `train` with those in `_config`, the dictionary in which older code gives some of them."""
    flat = dict(settings)
    nested = dict(flat.pop("_config", None) or {})
    if twice := sorted(flat.keys() & nested.keys()):
        raise ConfigError(f"{', '.join(twice)}: given twice, by `_config` and by itself; keep one")
    return flat | nested


def train_config(config: TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Make the settings of a training step from a config and single settings, by today's names or older ones.

    Raises:
        ConfigError: a setting is given twice, unknown, out of range or cannot be honoured.
    """
    config = None if config is None else check_config(config, TrainConfig)
    if new := sorted((settings.keys() & HINTS) - {"verbose"} - _warned):
        logger.warning("without effect, because they concern memory or output of another trainer: %s", ", ".join(new))
        _warned.update(new)
    asked = {key: value for key, value in settings.items() if key not in HINTS and value not in NEUTRAL.get(key, ())}
    if refused := [f"{name}={value!r}" for name, value in asked.items() if name not in _HONOURED]:
        raise ConfigError(f"training cannot honour {', '.join(refused)}; it knows {', '.join(_HONOURED)}")
    settings = {name: value for name, value in asked.items() if value is not None or name == "mismatch"}
    if config is not None and not settings:
        return config
    with plain_errors():
        values = _in_todays_words(settings)
        if words := [word for word in _LOSS_WORDS if word in settings]:
            # `TrainConfig(beta=...)` sets the loss too, but to the default.
            has_loss = config is not None and "loss" in config.model_fields_set
            is_default = config is not None and config.terms[0] is TrainConfig.model_fields["loss"].default
            if "loss" in values or (has_loss and not is_default):
                raise ConfigError(f"{', '.join(words)}: given twice, by `config` or `loss` and by itself; keep one")
            values = _with_loss(settings) | values
        if "truncated_importance_sampling" in settings and (config is None or "anchor" not in config.model_fields_set):
            values.setdefault("anchor", "step_start")
        penalties = kl_penalties(**{word: settings[word] for word in _KL_WORDS if word in settings})
        return add_terms(todays_config(config, values), penalties)


def _in_todays_words(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TrainConfig` by their own names, and those that only have another name or type in older code."""
    values = {name: settings[name] for name in TrainConfig.model_fields if name in settings}
    scale = settings.get("scale_rewards", settings.get("normalize_advantages"))
    if scale is not None:
        values["scale_rewards"] = ("group" if scale else "none") if isinstance(scale, bool) else scale
    if (limit := settings.get("truncated_importance_sampling")) is not None:
        if "mismatch" in values:
            raise ConfigError("truncated_importance_sampling is `truncate` of `mismatch`: set it there")
        values["mismatch"] = MismatchConfig(truncate=limit)
    return values


def _with_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `loss_fn`, `loss_fn_config`, the clips and the level of importance sampling into fields of `TrainConfig`.

    Clips without a loss are those of cispo, which was the default loss of older code.
    """
    level = settings.get("importance_sampling_level")
    has_clips = "epsilon" in settings or "epsilon_high" in settings
    by_default = "ppo" if level or settings.get("ppo") else "cispo" if has_clips else "dppo"
    if settings.get("ppo") and settings.get("loss_fn", "ppo") != "ppo":
        raise ConfigError(f"ppo=True and loss_fn={settings['loss_fn']!r} are two losses; keep one")
    name = settings.get("loss_fn", by_default)
    if name not in ALGORITHMS:
        raise ConfigError(f"loss_fn must be one of {', '.join(ALGORITHMS)}; got {name!r}")
    if name == "dr_grpo" and "normalize" not in settings:
        raise ConfigError("dr_grpo needs a number as `normalize`, e.g. the largest completion length in tokens")
    term: LossConfig = ALGORITHMS[name]["loss"]
    if level is not None and not isinstance(term, GspoConfig):
        if level != "sequence" or not isinstance(term, PpoConfig):
            raise ConfigError(f"importance_sampling_level={level!r} is not supported by the loss {term.type}")
        term = GspoConfig()  # ratios of sequences need clips of their own
    clips, options = _clips(term, settings), settings.get("loss_fn_config", {})
    if twice := clips.keys() & options.keys():
        raise ConfigError(f"{', '.join(twice)}: given by loss_fn_config and by epsilon; keep one")
    tuned = type(term).model_validate(term.model_dump(exclude_unset=True) | clips | dict(options))
    return ALGORITHMS[name] | {"loss": tuned}


def _clips(term: LossConfig, settings: Mapping[str, Any]) -> dict[str, float]:
    """The clips of a loss from `epsilon` and `epsilon_high`. `epsilon` alone sets both, except for cispo."""
    low, high = settings.get("epsilon"), settings.get("epsilon_high")
    if low is None and high is None:
        return {}
    if not isinstance(term, (PpoConfig, GspoConfig, CispoConfig)):
        raise ConfigError(
            f"epsilon is a clip of ppo, gspo and cispo, which {term.type} does not have; choose a loss_fn"
        )
    high = low if high is None and not isinstance(term, CispoConfig) else high
    return {key: value for key, value in (("clip_low", low), ("clip_high", high)) if value is not None}


_REFUSED = {
    "entity": "projects have no owners here. W&B's owner is set by the variable WANDB_ENTITY",
    "id": "a model is identified by `project` and `name`",
    "run_id": "a run in W&B is identified by `project` and `name`, and continues by itself",
}


def drop_older_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a model's fields without those of older code that no longer exist, which may only be empty.

    Raises:
        ConfigError: an older field has a value, which would have no effect.
    """
    for name in _REFUSED.keys() & fields.keys():
        if fields[name] not in (None, []):
            raise ConfigError(f"{name}={fields[name]!r} is not supported: {_REFUSED[name]}. Leave it out", param=name)
    return {name: value for name, value in fields.items() if name not in _REFUSED}
