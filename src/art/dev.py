"""`art.dev`: the settings dictionaries of older code, translated.

They were written for another trainer and for vLLM. What has an equal here is honoured, what only tells vLLM or CUDA how
to use a GPU is listed in one warning, and anything else is an error. New code passes `TrainableModel(settings=...)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypedDict

from pydantic import ValidationError

from art.config import (
    CispoConfig,
    DpoConfig,
    DppoConfig,
    EngineConfig,
    GspoConfig,
    KlConfig,
    LoraConfig,
    LossConfig,
    MismatchConfig,
    ModelSettings,
    PpoConfig,
    Quantization,
    ReinforceConfig,
    RenderConfig,
    SftConfig,
    TrainerConfig,
    VllmConfig,
)
from art.config import TrainConfig as TrainingConfig
from art.errors import ConfigError

logger = logging.getLogger(__name__)


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
    """Nothing here can be honoured; the optimiser is set by `art.TrainConfig(optimizer=...)`."""


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


_HINTS = {
    "init_args": {
        "disable_log_stats", "device_map", "enable_prefix_caching", "fast_inference", "gpu_memory_utilization",
        "max_lora_rank", "num_scheduler_steps", "use_async",
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
    "init_args": {
        "full_finetuning": (False,), "load_in_4bit": (None,), "load_in_8bit": (False, None), "max_seq_length": (None,),
        "trust_remote_code": (False,),
    },
    "engine_args": {"generation_config": ("vllm",), "pipeline_parallel_size": (1,), "trust_remote_code": (False,)},
    "peft_args": {
        "bias": ("none",), "lora_dropout": (0,), "loftq_config": (None,), "use_dora": (False,), "use_rslora": (False,),
    },
    "": {"rollout_weights_mode": ("lora",), "allow_unvalidated_arch": (True, False)},
}  # fmt: skip
"""Values that ask for what is done anyway."""


def _quantization(load_in_4bit: bool) -> Quantization:
    return "nf4" if load_in_4bit else "none"


_Target = tuple[tuple[str, ...], str, Callable[[Any], Any]]

_HONOURED: dict[str, dict[str, _Target]] = {
    "init_args": {
        "max_seq_length": (("engine",), "max_context", int),
        "load_in_4bit": (("trainer", "engine"), "quantization", _quantization),
    },
    "engine_args": {
        "max_model_len": (("engine",), "max_context", int),
        "max_num_seqs": (("engine",), "max_running", int),
    },
    "": {"rollout_weights_mode": (("engine",), "weights", str)},
    "peft_args": {
        "r": (("lora",), "rank", int),
        "lora_alpha": (("lora",), "alpha", float),
        "target_modules": (("lora",), "target_modules", list),
        "random_state": (("lora",), "seed", int),
        "use_gradient_checkpointing": (("trainer",), "gradient_checkpointing", bool),
    },
}
"""What each older name becomes: the parts of `ModelSettings`, the setting, and its type."""

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
    trains_all = False
    for section, values in [*((name, config.pop(name, None) or {}) for name in _SECTIONS), ("", config)]:
        for key, value in values.items():
            name = f"{section}.{key}" if section else key
            if name == "init_args.full_finetuning" and value is True:
                trains_all = True
                continue
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
    if trains_all and found["lora"]:
        raise ConfigError(
            f"init_args.full_finetuning=True trains all weights, so {', '.join(found['lora'])} of a LoRA would have no "
            "effect; remove one of the two"
        )
    if hints:
        logger.warning("not needed by the embedded engine, and without effect: %s", ", ".join(hints))
    return _build(found | {"lora": None} if trains_all else found)


def _set(found: dict[str, dict[str, Any]], target: _Target, value: Any, name: str) -> None:
    parts, setting, convert = target
    if setting == "target_modules" and isinstance(value, str):
        value = None if value == "all-linear" else [value]
    value = value if value is None else convert(value)
    for part in parts:
        if found[part].get(setting, value) != value:
            raise ConfigError(f"{name}={value} contradicts an earlier {part}.{setting}={found[part][setting]}")
        found[part][setting] = value


def _build(found: Mapping[str, dict[str, Any] | None]) -> ModelSettings:
    models: dict[str, Any] = dict(_MODELS)
    engine = found["engine"] or {}
    if "weights" in engine:  # of vLLM only, which has no word for weights that are not quantised
        models["engine"] = VllmConfig
        if engine.get("quantization") == "none":
            del engine["quantization"]
    try:
        parts = {part: None if values is None else models[part](**values) for part, values in found.items()}
        return ModelSettings.model_validate(parts)
    except ValidationError as error:
        raise ConfigError(f"_internal_config holds a value out of range: {error}") from error


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
    if config is not None and not given:
        return config
    try:
        return _train_config(config, given)
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"these training settings do not fit together: {error}") from error


def _train_config(config: TrainingConfig | None, given: Mapping[str, Any]) -> TrainingConfig:
    values = _own_settings(given)
    of_config = {} if config is None else {key: getattr(config, key) for key in config.model_fields_set}
    tuned = [key for key in _LOSS_OPTIONS if key in given]
    again = [*(values.keys() & of_config.keys()), *(tuned if "loss" in of_config | values else ())]
    if again:
        raise ConfigError(f"{', '.join(sorted(again))}: given twice, by `config` or `loss` and by itself; keep one")
    values = of_config | values
    if "truncated_importance_sampling" in given:
        values.setdefault("anchor", "step_start")
    found = _with_loss(values, given) if tuned else TrainingConfig(**values)
    penalties = _kl_penalties(given)
    return _changed(found, loss=(*found.terms, *penalties)) if penalties else found


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
    return TrainingConfig(**dict(config) | changes)


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
    return _changed(config, loss=type(term)(**settings | clips | options))


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


def _kl_penalties(given: Mapping[str, Any]) -> list[KlConfig]:
    """`kl_penalty_coef` was taken off the advantages, `beta` added to the loss."""
    if "kl_penalty_reference_step" in given and "kl_penalty_coef" not in given:
        raise ConfigError("kl_penalty_reference_step does nothing without kl_penalty_coef above 0")
    penalties = []
    if "kl_penalty_coef" in given:
        reference = given.get("kl_penalty_reference_step", "base")
        coefficient = given["kl_penalty_coef"]
        penalties.append(KlConfig(weight=coefficient, reference=reference, estimator="k1", where="reward"))
    if "beta" in given:
        penalties.append(KlConfig(weight=given["beta"]))
    return penalties
