"""`art.dev`: the settings dictionaries of older code, translated.

They were written for another trainer and for vLLM. What has an equal here is honoured, what only tells vLLM or CUDA how
to use a GPU is listed in one warning, and anything else is an error. New code passes `TrainableModel(settings=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar

from pydantic import ValidationError

from art.compat.internal_config import in_older_names, optimizer_from_internal_config, settings_from_internal_config
from art.config import (
    CispoConfig,
    DpoConfig,
    DppoConfig,
    GspoConfig,
    LossConfig,
    MismatchConfig,
    ModelSettings,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
)
from art.config import TrainConfig as TrainingConfig
from art.config import TrainSFTConfig as SFTTrainingConfig
from art.config.base import describe_invalid
from art.config.training import kl_penalties
from art.errors import ConfigError

__all__ = [
    "EngineArgs",
    "InitArgs",
    "InternalModelConfig",
    "LossName",
    "PeftArgs",
    "TrainConfig",
    "TrainSFTConfig",
    "TrainerArgs",
    "in_older_names",
    "optimizer_from_internal_config",
    "settings_from_internal_config",
    "train_config",
]


class InitArgs(TypedDict, total=False):
    max_seq_length: int
    load_in_4bit: bool
    full_finetuning: bool
    gpu_memory_utilization: float
    fast_inference: bool


class EngineArgs(TypedDict, total=False):
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    enforce_eager: bool
    enable_sleep_mode: bool
    num_scheduler_steps: int


class PeftArgs(TypedDict, total=False):
    r: int
    lora_alpha: float
    target_modules: list[str]
    random_state: int


class TrainerArgs(TypedDict, total=False):
    """The optimiser of every training step, unless `art.TrainConfig(optimizer=...)` gives it."""

    max_grad_norm: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float


class TrainConfig(TypedDict, total=False):
    """Training options of `model.train(_config=...)`; see `art.Backend.train` for what they become."""

    epsilon: float
    epsilon_high: float
    importance_sampling_level: Literal["token", "sequence"]
    kl_penalty_coef: float
    kl_penalty_reference_step: int
    logprob_calculation_chunk_size: int
    scale_rewards: bool
    truncated_importance_sampling: float


class TrainSFTConfig(TypedDict, total=False):
    """Options of `model.train_sft(_config=...)`, of which there are none."""


class InternalModelConfig(TypedDict, total=False):
    settings: ModelSettings
    """The new, direct way; stands alone."""
    init_args: InitArgs
    engine_args: EngineArgs
    peft_args: PeftArgs
    trainer_args: TrainerArgs
    chat_template_kwargs: dict[str, bool | int | float | str]
    rollout_weights_mode: Literal["lora", "merged"]
    """`merged` is `VllmConfig(weights="merged")`; the embedded engine, which is the default, has no such choice."""


# -- training options --

LossName = Literal[
    "dppo", "ppo", "cispo", "reinforce", "sft", "dpo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "maxrl"
]
"""What `loss_fn` may be: a loss, or an algorithm with its baseline, scale and normalisation."""

_LOSSES: dict[LossName, Callable[..., TrainingConfig]] = {
    "dppo": partial(TrainingConfig, loss=DppoConfig()),
    "ppo": partial(TrainingConfig, loss=PpoConfig()),
    "cispo": partial(TrainingConfig, loss=CispoConfig()),
    "reinforce": partial(TrainingConfig, loss=ReinforceConfig()),
    "sft": partial(TrainingConfig, loss=SftConfig()),
    "dpo": partial(TrainingConfig, loss=DpoConfig()),
    "grpo": TrainingConfig.grpo,
    "dr_grpo": TrainingConfig.dr_grpo,
    "dapo": TrainingConfig.dapo,
    "gspo": TrainingConfig.gspo,
    "rloo": TrainingConfig.rloo,
    "maxrl": TrainingConfig.maxrl,
}
_LOSS_OPTIONS = ("loss_fn", "loss_fn_config", "epsilon", "epsilon_high", "importance_sampling_level")
_KL_OPTIONS = ("kl_penalty_coef", "kl_penalty_reference_step", "beta")
_TRAIN_HONOURED = (
    *TrainingConfig.model_fields,
    *_LOSS_OPTIONS,
    *_KL_OPTIONS,
    "normalize_advantages",
    "truncated_importance_sampling",
)
_TRAIN_HINTS = {"logprob_calculation_chunk_size", "plot_tensors", "precalculate_logprobs", "verbose"}
"""Had to do with memory or output only."""
_TRAIN_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "adam_params": (None,),
    "advantage_balance": (0,),
    "allow_training_without_logprobs": (False,),
    "beta": (0,),
    "grad_accumulation_sequences": (None,),
    "importance_sampling_level": ("token",),
    "kimi_k2_tau": (None,),
    "kl_penalty_coef": (0,),
    "kl_ref_adapter_path": (None,),
    "mask_prob_ratio": (False,),
    "max_negative_advantage_importance_sampling_weight": (None,),
    "num_trajectories_learning_rate_multiplier_power": (0,),
    "packed_sequence_length": (None,),
    "save_checkpoint": (True,),
    "scale_learning_rate_by_reward_std_dev": (False,),
}
"""Options of older code, with the values that ask for what is done anyway."""


C = TypeVar("C", TrainingConfig, SFTTrainingConfig)


def check_config(config: C | Mapping[str, Any], kind: type[C]) -> C:
    """`config` if it is of this kind, or made of a dictionary.

    Raises:
        ConfigError: it is something else, or holds a wrong value.
    """
    if isinstance(config, kind):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"`config` takes an art.{kind.__name__}(...), got {config!r}", param="config")
    try:
        return kind.model_validate(dict(config))
    except ValidationError as error:
        raise ConfigError(f"wrong training settings: {describe_invalid(error)}") from error


def train_config(config: TrainingConfig | None, settings: Mapping[str, Any]) -> TrainingConfig:
    """The settings of a training step, given as a whole, one by one, or both ways where they do not overlap.

    Raises:
        ConfigError: a setting is given twice, unknown, out of range or cannot be honoured.
    """
    given = {key: value for key, value in settings.items() if key not in _TRAIN_HINTS}
    given = {key: value for key, value in given.items() if value not in _TRAIN_NEUTRAL.get(key, ())}
    if refused := [f"{key}={value!r}" for key, value in given.items() if key not in _TRAIN_HONOURED]:
        raise ConfigError(f"training cannot honour {', '.join(refused)}; it knows {', '.join(_TRAIN_HONOURED)}")
    given = {key: value for key, value in given.items() if value is not None}
    config = None if config is None else check_config(config, TrainingConfig)
    if config is not None and not given:
        return config
    if isinstance(given.get("loss"), str):
        raise ConfigError(
            f"`loss` takes settings such as art.config.PpoConfig(); for a name use loss_fn={given['loss']!r}"
        )
    try:
        return _train_config(config, given)
    except ValidationError as error:
        raise ConfigError(f"wrong training settings: {describe_invalid(error)}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"these training settings do not fit together: {error}") from error


def _train_config(config: TrainingConfig | None, given: Mapping[str, Any]) -> TrainingConfig:
    values = _own_settings(given)
    of_config = {} if config is None else {key: getattr(config, key) for key in config.model_fields_set}
    tuned = [key for key in _LOSS_OPTIONS if key in given]
    kept: tuple[LossConfig, ...] = ()
    if tuned and config is not None and config.terms[0] is TrainingConfig.model_fields["loss"].default:
        # `TrainConfig(beta=...)` adds to the default objective, which `loss_fn` may replace.
        kept = config.terms[1:]
        of_config.pop("loss", None)
    again = [*(values.keys() & of_config.keys()), *(tuned if "loss" in of_config | values else ())]
    if again:
        raise ConfigError(f"{', '.join(sorted(again))}: given twice, by `config` or `loss` and by itself; keep one")
    values = of_config | values
    if "truncated_importance_sampling" in given:
        values.setdefault("anchor", "step_start")
    found = _with_loss(values, given) if tuned else TrainingConfig.model_validate(values)
    penalties = kl_penalties(**{key: given[key] for key in _KL_OPTIONS if key in given})
    return _changed(found, loss=(*found.terms, *kept, *penalties)) if kept or penalties else found


def _own_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is a setting of `TrainConfig` by its own name, or an older name of one."""
    values = {key: given[key] for key in TrainingConfig.model_fields if key in given}
    scale = given.get("scale_rewards", given.get("normalize_advantages"))
    if scale is not None:
        values["scale_rewards"] = ("group" if scale else "none") if isinstance(scale, bool) else scale
    if (limit := given.get("truncated_importance_sampling")) is not None:
        if "mismatch" in values:
            raise ConfigError("truncated_importance_sampling is `truncate` of `mismatch`: set it there")
        values["mismatch"] = MismatchConfig(truncate=limit)
    return values


def _changed(config: TrainingConfig, **changes: Any) -> TrainingConfig:
    """A copy that is validated."""
    return TrainingConfig.model_validate(dict(config) | changes)


def _with_loss(values: dict[str, Any], given: Mapping[str, Any]) -> TrainingConfig:
    """The settings `values` with the loss or algorithm that `loss_fn` names, and its options."""
    level = given.get("importance_sampling_level")
    name = given.get("loss_fn", "ppo" if level else "dppo")
    if name not in _LOSSES:
        raise ConfigError(f"loss_fn must be one of {', '.join(_LOSSES)}; got {name!r}")
    config = _LOSSES[name](**values)
    (term,) = config.terms
    settings = term.model_dump(exclude_unset=True)
    if level is not None and not isinstance(term, GspoConfig):
        if level != "sequence" or not isinstance(term, PpoConfig):
            raise ConfigError(f"importance_sampling_level={level!r} cannot be had with the loss {term.type}")
        term, settings = GspoConfig(), {}  # ratios of sequences want clips of their own
    clips, options = _clips(term, given), given.get("loss_fn_config", {})
    if again := clips.keys() & options.keys():
        raise ConfigError(f"{', '.join(again)}: given by loss_fn_config and by epsilon; keep one")
    return _changed(config, loss=type(term).model_validate(settings | clips | options))


def _clips(term: LossConfig, given: Mapping[str, Any]) -> dict[str, float]:
    """`epsilon` and `epsilon_high` as the clips of a loss; `epsilon` alone is both, but for cispo."""
    low, high = given.get("epsilon"), given.get("epsilon_high")
    if low is None and high is None:
        return {}
    if not isinstance(term, (PpoConfig, GspoConfig, CispoConfig)):
        raise ConfigError(
            f"epsilon is a clip of ppo, gspo and cispo, which {term.type} does not have; choose a loss_fn"
        )
    high = low if high is None and not isinstance(term, CispoConfig) else high
    return {key: value for key, value in (("clip_low", low), ("clip_high", high)) if value is not None}
