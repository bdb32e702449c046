"""Translates `_internal_config` of older code to today's settings, and errors back to its names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from art.config import (
    EngineConfig,
    LoraConfig,
    ModelSettings,
    OptimizerConfig,
    Quantization,
    RenderConfig,
    TrainerConfig,
    VllmConfig,
)
from art.config.base import describe_invalid
from art.errors import ArtError, ConfigError

logger = logging.getLogger(__name__)

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
    "trainer_args": {
        "bf16", "disable_tqdm", "fp16", "log_level", "logging_steps", "logging_strategy", "output_dir", "report_to",
        "run_name", "save_steps", "save_strategy", "save_total_limit",
    },
}  # fmt: skip
"""Settings without effect here: how vLLM and Unsloth share a GPU, and what another trainer prints and saves. A warning
names them."""

_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "init_args": {
        "full_finetuning": (False,), "load_in_4bit": (None,), "load_in_8bit": (False, None), "max_seq_length": (None,),
        "trust_remote_code": (False,),
    },
    "engine_args": {"generation_config": ("vllm",), "pipeline_parallel_size": (1,), "trust_remote_code": (False,)},
    "peft_args": {
        "bias": ("none",), "lora_dropout": (0,), "loftq_config": (None,), "use_dora": (False,), "use_rslora": (False,),
    },
    "trainer_args": {"gradient_accumulation_steps": (1,), "lr_scheduler_type": ("constant",)},
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
"""Parts of `ModelSettings`, setting and type of each older name."""

_OPTIMIZER = {
    "max_grad_norm": "max_grad_norm", "weight_decay": "weight_decay", "adam_epsilon": "eps", "adam_beta1": "betas",
    "adam_beta2": "betas",
}  # fmt: skip
"""Setting of the optimiser for each name in `trainer_args`."""

_SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args")
_MODELS = {"lora": LoraConfig, "engine": EngineConfig, "trainer": TrainerConfig, "render": RenderConfig}


def settings_from_internal_config(config: Mapping[str, Any] | None) -> ModelSettings:
    """Translate an `InternalModelConfig`.

    Raises:
        ConfigError: it asks for something that cannot be honoured; the message names it.
    """
    config = dict(config or {})
    if "settings" in config:
        if len(config) > 1:
            raise ConfigError(
                f"`settings` excludes all other keys; got {', '.join(sorted(config.keys() - {'settings'}))} beside it"
            )
        return ModelSettings.model_validate(config["settings"])
    sections: dict[str, dict[str, Any]] = {"lora": {}, "engine": {}, "trainer": {}, "render": {}}
    names: _Names = {}
    if kwargs := config.pop("chat_template_kwargs", None):
        sections["render"]["chat_template_kwargs"] = kwargs
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
            if section == "trainer_args" and key in _OPTIMIZER:
                continue  # see `optimizer_from_internal_config`
            if target := _HONOURED.get(section, {}).get(key):
                _set(sections, names, target, value, name)
            elif key in _HINTS.get(section, ()):
                hints.append(name)
            else:
                refused.append(f"{name}={value!r}")
    if refused:
        raise ConfigError(
            f"_internal_config asks for what ART cannot honour: {', '.join(refused)}. Remove it, or use "
            "`TrainableModel(settings=art.ModelSettings(...))` and `art.TrainConfig(...)`, which list all settings"
        )
    if trains_all and sections["lora"]:
        useless = ", ".join(names["lora", setting] for setting in sections["lora"])
        raise ConfigError(
            f"init_args.full_finetuning=True trains all weights, so {useless} of a LoRA would have no effect; keep "
            "one of the two"
        )
    if hints:
        logger.warning("not needed by the embedded engine, and without effect: %s", ", ".join(hints))
    return _build(sections | {"lora": None} if trains_all else sections, names)


_Names = dict[tuple[str, str], str]
"""The user's name of each setting, by part and setting."""


def _set(sections: dict[str, dict[str, Any]], names: _Names, target: _Target, value: Any, name: str) -> None:
    parts, setting, convert = target
    if setting == "target_modules" and isinstance(value, str):
        value = None if value == "all-linear" else [value]
    try:
        value = value if value is None else convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r} is not of type {convert.__name__}") from error
    for part in parts:
        if sections[part].get(setting, value) != value:
            raise ConfigError(f"{name}={value} contradicts {names[part, setting]}={sections[part][setting]}; keep one")
        sections[part][setting] = value
        names[part, setting] = name


def _build(sections: Mapping[str, dict[str, Any] | None], names: _Names) -> ModelSettings:
    models: dict[str, Any] = dict(_MODELS)
    engine = sections["engine"] or {}
    if "weights" in engine:  # only vLLM has this setting, and it has none for quantisation
        models["engine"] = VllmConfig
        if engine.pop("quantization", "none") != "none":
            raise ConfigError(
                f"{names['engine', 'quantization']}=True cannot go with rollout_weights_mode={engine['weights']!r}: "
                "vLLM does not round whole weights as the trainer does; leave one of the two out"
            )
    parts: dict[str, Any] = {}
    for part, values in sections.items():
        try:
            parts[part] = None if values is None else models[part].model_validate(values)
        except ValidationError as error:
            own = {setting: name for (each, setting), name in names.items() if each == part}
            raise ConfigError(f"wrong values in _internal_config: {describe_invalid(error, own)}") from error
    try:
        return ModelSettings.model_validate(parts)
    except ValidationError as error:
        problems = _in_users_words(describe_invalid(error), names)
        raise ConfigError(f"wrong values in _internal_config: {problems}") from error


def _in_users_words(text: str, names: _Names) -> str:
    for (part, setting), name in names.items():
        text = text.replace(f"`{part}.{setting}`", f"`{name}`")
    return text


def in_older_names(error: ArtError, config: Mapping[str, Any] | None) -> ArtError:
    """Put the user's names into an error: `init_args.max_seq_length` in place of `engine.max_context`."""
    names: _Names = {
        (part, setting): f"{section}.{key}" if section else key
        for section, honoured in _HONOURED.items()
        for key, (parts, setting, _) in honoured.items()
        for part in parts
        if key in ((config or {}).get(section) or {} if section else config or {})
    }
    error.message = _in_users_words(error.message, names)
    error.args = (error.message,)
    return error


def optimizer_from_internal_config(config: Mapping[str, Any] | None) -> OptimizerConfig | None:
    """The optimiser that `trainer_args` asks for; `None` if they have no setting of it.

    Raises:
        ConfigError: a value is out of range.
    """
    own = {key: value for key, value in ((config or {}).get("trainer_args") or {}).items() if key in _OPTIMIZER}
    if not own:
        return None
    defaults = OptimizerConfig()
    settings = {_OPTIMIZER[key]: value for key, value in own.items()}
    if "betas" in settings:
        first, second = defaults.betas
        settings["betas"] = own.get("adam_beta1", first), own.get("adam_beta2", second)
    names = {setting: f"trainer_args.{key}" for key, setting in _OPTIMIZER.items() if key in own}
    try:
        return OptimizerConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"wrong values in _internal_config: {describe_invalid(error, names)}") from error
