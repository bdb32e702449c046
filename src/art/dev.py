"""`art.dev`: the settings dictionaries of older code, translated.

They were written for another trainer and for vLLM. What has an equal here is honoured, what only tells vLLM or CUDA how
to use a GPU is listed in one warning, and anything else is an error. New code passes `TrainableModel(settings=...)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from pydantic import ValidationError

from art.config import (
    CispoConfig,
    DppoConfig,
    EngineConfig,
    LoraConfig,
    ModelSettings,
    PpoConfig,
    RenderConfig,
    TrainerConfig,
)
from art.config import TrainConfig as TrainingConfig
from art.errors import ConfigError

logger = logging.getLogger(__name__)


class InitArgs(TypedDict, total=False):
    max_seq_length: int
    load_in_4bit: bool
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
    """Nothing here can be honoured; the optimiser is set by `art.TrainConfig(optimizer=...)`."""


class TrainConfig(TypedDict, total=False):
    """Training options of `model.train(_config=...)`; see `art.Backend.train` for what they become."""

    epsilon: float
    epsilon_high: float
    scale_rewards: bool
    logprob_calculation_chunk_size: int


class InternalModelConfig(TypedDict, total=False):
    settings: ModelSettings
    """The new, direct way; stands alone."""
    init_args: InitArgs
    engine_args: EngineArgs
    peft_args: PeftArgs
    trainer_args: TrainerArgs
    chat_template_kwargs: dict[str, bool | int | float | str]


_HINTS = {
    "init_args": {
        "disable_log_stats", "device_map", "enable_prefix_caching", "fast_inference", "gpu_memory_utilization",
        "load_in_4bit", "load_in_8bit", "max_lora_rank", "num_scheduler_steps", "use_async",
    },
    "engine_args": {
        "block_size", "cpu_offload_gb", "disable_log_requests", "disable_log_stats", "enable_chunked_prefill",
        "enable_lora", "enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization",
        "max_cpu_loras", "max_lora_rank", "max_loras", "max_num_batched_tokens", "max_seq_len_to_capture",
        "num_scheduler_steps", "preemption_mode", "swap_space", "tensor_parallel_size", "use_v2_block_manager",
    },
    "peft_args": {"max_seq_length"},
}  # fmt: skip
"""How vLLM and Unsloth share a GPU: no effect on what is computed, and nothing that the embedded engine needs."""

_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "init_args": {"full_finetuning": (False,), "trust_remote_code": (False,), "max_seq_length": (None,)},
    "engine_args": {"generation_config": ("vllm",), "pipeline_parallel_size": (1,), "trust_remote_code": (False,)},
    "peft_args": {
        "bias": ("none",), "lora_dropout": (0,), "loftq_config": (None,), "use_dora": (False,), "use_rslora": (False,),
    },
    "": {"rollout_weights_mode": ("lora",), "allow_unvalidated_arch": (True, False)},
}  # fmt: skip
"""Values that ask for what is done anyway."""

_HONOURED: dict[str, dict[str, tuple[str, str, Callable[[Any], Any]]]] = {
    "init_args": {"max_seq_length": ("engine", "max_context", int)},
    "engine_args": {"max_model_len": ("engine", "max_context", int), "max_num_seqs": ("engine", "max_running", int)},
    "peft_args": {
        "r": ("lora", "rank", int),
        "lora_alpha": ("lora", "alpha", float),
        "target_modules": ("lora", "target_modules", list),
        "random_state": ("lora", "seed", int),
        "use_gradient_checkpointing": ("trainer", "gradient_checkpointing", bool),
    },
}
"""What each older name becomes: the part of `ModelSettings`, the setting, and its type."""

_SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args")
_MODELS = {"lora": LoraConfig, "engine": EngineConfig, "trainer": TrainerConfig, "render": RenderConfig}


def settings_from_internal_config(config: Mapping[str, Any] | None) -> ModelSettings:
    """The settings that an `InternalModelConfig` asks for.

    Raises:
        ConfigError: it asks for something that cannot be honoured, by name.
    """
    config = dict(config or {})
    if "settings" in config:
        if len(config) > 1:
            raise ConfigError(
                f"`settings` stands alone; got {', '.join(sorted(config.keys() - {'settings'}))} beside it"
            )
        return ModelSettings.model_validate(config["settings"])
    found: dict[str, dict[str, Any]] = {"lora": {}, "engine": {}, "trainer": {}, "render": {}}
    if kwargs := config.pop("chat_template_kwargs", None):
        found["render"]["chat_template_kwargs"] = kwargs
    hints: list[str] = []
    refused: list[str] = []
    for section, values in [*((name, config.pop(name, None) or {}) for name in _SECTIONS), ("", config)]:
        for key, value in values.items():
            name = f"{section}.{key}" if section else key
            if value in _NEUTRAL.get(section, {}).get(key, ()):
                continue
            if target := _HONOURED.get(section, {}).get(key):
                _set(found, target, value, name)
            elif key in _HINTS.get(section, ()):
                hints.append(name)
            else:
                refused.append(f"{name}={value!r}")
    if refused:
        raise ConfigError(
            f"_internal_config asks for what ART cannot honour: {', '.join(refused)}. Remove it, or use "
            "`TrainableModel(settings=art.ModelSettings(...))` and `art.TrainConfig(...)`, which list all settings"
        )
    if hints:
        logger.warning("not needed by the embedded engine, and without effect: %s", ", ".join(hints))
    return _build(found)


def _set(
    found: dict[str, dict[str, Any]], target: tuple[str, str, Callable[[Any], Any]], value: Any, name: str
) -> None:
    part, setting, convert = target
    if setting == "target_modules" and isinstance(value, str):
        value = None if value == "all-linear" else [value]
    value = value if value is None else convert(value)
    if found[part].get(setting, value) != value:
        raise ConfigError(f"{name}={value} contradicts an earlier {part}.{setting}={found[part][setting]}")
    found[part][setting] = value


def _build(found: dict[str, dict[str, Any]]) -> ModelSettings:
    try:
        return ModelSettings(**{part: _MODELS[part](**values) for part, values in found.items()})
    except ValidationError as error:
        raise ConfigError(f"_internal_config holds a value out of range: {error}") from error


_LOSSES: dict[str, type[DppoConfig] | type[PpoConfig] | type[CispoConfig]] = {
    "dppo": DppoConfig,
    "ppo": PpoConfig,
    "cispo": CispoConfig,
}
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
    "kl_penalty_reference_step": (None,),
    "kl_ref_adapter_path": (None,),
    "mask_prob_ratio": (False,),
    "max_negative_advantage_importance_sampling_weight": (None,),
    "num_trajectories_learning_rate_multiplier_power": (0,),
    "packed_sequence_length": (None,),
    "save_checkpoint": (True,),
    "scale_learning_rate_by_reward_std_dev": (False,),
    "truncated_importance_sampling": (None,),
}
"""Options of older code, with the values that ask for what is done anyway."""
_TRAIN_HONOURED = (
    "learning_rate", "num_minibatches", "loss_fn", "loss_fn_config", "epsilon", "epsilon_high", "scale_rewards",
    "normalize_advantages",
)  # fmt: skip


def train_config(config: TrainingConfig | None, settings: Mapping[str, Any]) -> TrainingConfig:
    """The settings of a training step, given as a whole or one by one.

    Raises:
        ConfigError: both ways at once, or a setting that is unknown, out of range or cannot be honoured.
    """
    given = {key: value for key, value in settings.items() if key not in _TRAIN_HINTS}
    given = {key: value for key, value in given.items() if value not in _TRAIN_NEUTRAL.get(key, ())}
    if refused := [f"{key}={value!r}" for key, value in given.items() if key not in _TRAIN_HONOURED]:
        raise ConfigError(
            f"training cannot honour {', '.join(refused)}; it knows {', '.join(_TRAIN_HONOURED)} and everything in "
            "`art.TrainConfig`"
        )
    given = {key: value for key, value in given.items() if value is not None}
    if config is not None and given:
        raise ConfigError(f"pass either `config` or single settings; got `config` and {', '.join(sorted(given))}")
    if config is not None:
        return config
    values: dict[str, Any] = {key: given[key] for key in ("learning_rate", "num_minibatches") if key in given}
    if {"loss_fn", "loss_fn_config", "epsilon", "epsilon_high"} & given.keys():
        values["loss"] = _loss(given)
    if scale := given.get("scale_rewards", given.get("normalize_advantages")):
        values["scale_rewards"] = "group" if scale is True else scale
    try:
        return TrainingConfig(**values)
    except ValidationError as error:
        raise ConfigError(f"a training setting is out of range: {error}") from error


def _loss(given: Mapping[str, Any]) -> DppoConfig | PpoConfig | CispoConfig:
    """The loss; `epsilon` and `epsilon_high` are the clips of ppo and cispo, and `epsilon` alone is both for ppo."""
    name = given.get("loss_fn", "dppo")
    if name not in _LOSSES:
        raise ConfigError(f"loss_fn must be one of {', '.join(_LOSSES)}; got {name!r}")
    low, high = given.get("epsilon"), given.get("epsilon_high")
    if name == "dppo" and (low is not None or high is not None):
        raise ConfigError(
            "epsilon is a clip of ppo and cispo: add loss_fn='ppo', or set mask_low and mask_high of dppo"
        )
    high = low if high is None and name == "ppo" else high
    clips = {key: value for key, value in (("clip_low", low), ("clip_high", high)) if value is not None}
    try:
        return _LOSSES[name](**clips, **given.get("loss_fn_config", {}))
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"the loss {name} does not take these settings: {error}") from error
