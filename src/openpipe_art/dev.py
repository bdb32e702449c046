"""`art.dev`: the dictionaries of settings in older code, and `_internal_config` in today's settings.

They were written for another trainer and for vLLM. What has an equal here is honoured, what only tells vLLM or CUDA how
to use a GPU is named in a warning, and anything else is an error. New code passes `TrainableModel(settings=...)`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from pydantic import ValidationError

from art.config import LoraConfig, ModelSettings, OptimizerConfig
from art.config.base import describe_invalid
from art.errors import ArtError, ConfigError

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
    """Settings of the optimiser in older code, for every step that has no `art.TrainConfig(optimizer=...)`."""

    max_grad_norm: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float


class TrainOptions(TypedDict, total=False):
    """Options of `backend.train` in older code."""

    epsilon: float
    epsilon_high: float
    importance_sampling_level: Literal["token", "sequence"]
    kl_penalty_coef: float
    kl_penalty_reference_step: int
    logprob_calculation_chunk_size: int
    scale_rewards: bool
    truncated_importance_sampling: float


class TrainSFTOptions(TypedDict, total=False):
    """Options of `model.train_sft(_config=...)` in older code. There are none today."""


TrainConfig, TrainSFTConfig = TrainOptions, TrainSFTOptions


class InternalModelConfig(TypedDict, total=False):
    settings: ModelSettings
    """Today's settings of a model; no other key may be set beside them."""
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
    "trainer_args": {
        "bf16", "disable_tqdm", "fp16", "log_level", "logging_steps", "logging_strategy", "output_dir", "report_to",
        "run_name", "save_steps", "save_strategy", "save_total_limit",
    },
}  # fmt: skip
"""Settings without effect here: how vLLM and Unsloth share a GPU, and what another trainer prints and saves. A warning
names them."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("init_args.load_in_4bit", "init_args.max_seq_length", "peft_args.loftq_config"), (None,)),
    **dict.fromkeys(("init_args.full_finetuning", "peft_args.use_dora"), (False,)),
    **dict.fromkeys(("init_args.trust_remote_code", "engine_args.trust_remote_code"), (False,)),
    **dict.fromkeys(("engine_args.pipeline_parallel_size", "trainer_args.gradient_accumulation_steps"), (1,)),
    "init_args.load_in_8bit": (False, None),
    "engine_args.generation_config": ("vllm",),
    "peft_args.bias": ("none",),
    "peft_args.lora_dropout": (0,),
    "trainer_args.lr_scheduler_type": ("constant",),
    "allow_unvalidated_arch": (True, False),
    "chat_template_kwargs": ({}, None),
    "rollout_weights_mode": ("lora",),
}
"""Values that ask for what is done anyway."""


_Target = tuple[tuple[str, ...], str, Callable[[Any], Any]]

_HONOURED: dict[str, _Target] = {
    "init_args.max_seq_length": (("engine",), "max_context", int),
    "init_args.load_in_4bit": (("trainer",), "quantization", lambda is_4bit: "nf4" if is_4bit else "none"),
    "engine_args.max_model_len": (("engine",), "max_context", int),
    "engine_args.max_num_seqs": (("engine",), "max_running", int),
    "peft_args.r": (("lora",), "rank", int),
    "peft_args.lora_alpha": (("lora",), "alpha", float),
    "peft_args.target_modules": (("lora",), "target_modules", list),
    "peft_args.random_state": (("lora",), "seed", int),
    "peft_args.use_gradient_checkpointing": (("trainer",), "gradient_checkpointing", bool),
    "chat_template_kwargs": (("render",), "chat_template_kwargs", dict),
    "rollout_weights_mode": (("engine",), "weights", str),
}
"""Parts of `ModelSettings`, setting and type of each older name."""

_OPTIMIZER = {
    "max_grad_norm": "max_grad_norm", "weight_decay": "weight_decay", "adam_epsilon": "eps", "adam_beta1": "betas",
    "adam_beta2": "betas",
}  # fmt: skip
"""Setting of the optimiser for each name in `trainer_args`."""

_SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args")
_FULL = "init_args.full_finetuning"
_Names = dict[tuple[str, str], str]
"""The user's name of each setting, by part and setting."""


def settings_from_internal_config(config: Mapping[str, Any] | None) -> ModelSettings:
    """Translate `_internal_config`, the dictionary of settings in older code, to today's `ModelSettings`.

    Raises:
        ConfigError: it asks for something that cannot be honoured; the message names it.
    """
    if config and "settings" in config:
        if others := sorted(config.keys() - {"settings"}):
            raise ConfigError(f"`settings` excludes all other keys; got {', '.join(others)} beside it")
        return ModelSettings.model_validate(config["settings"])
    values = _flatten(config)
    if trains_all := values.get(_FULL) is True:
        del values[_FULL]
    parts: dict[str, dict[str, Any]] = {"lora": {}, "engine": {}, "trainer": {}, "render": {}}
    names: _Names = {}
    hints: list[str] = []
    refused: list[str] = []
    if values.pop("peft_args.use_rslora", False):  # its scale is alpha / sqrt(rank) in place of alpha / rank
        lora = LoraConfig()
        rank = values.get("peft_args.r") or lora.rank
        values["peft_args.lora_alpha"] = values.get("peft_args.lora_alpha", lora.alpha) * rank**0.5
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if value in _NEUTRAL.get(name, ()) or (section == "trainer_args" and key in _OPTIMIZER):
            continue  # for the optimiser see `optimizer_from_internal_config`
        if target := _HONOURED.get(name):
            _set(parts, names, target, value, name)
        elif key in _HINTS.get(section, ()):
            hints.append(name)
        else:
            refused.append(f"{name}={value!r}")
    if refused:
        raise ConfigError(
            f"_internal_config asks for what ART cannot honour: {', '.join(refused)}. Remove it, or use "
            "`TrainableModel(settings=art.ModelSettings(...))` and `art.TrainConfig(...)`, which list all settings"
        )
    if trains_all and parts["lora"]:
        useless = ", ".join(names["lora", setting] for setting in parts["lora"])
        raise ConfigError(
            f"{_FULL}=True trains all weights, so {useless} of a LoRA would have no effect; keep one of the two"
        )
    if hints:
        logger.warning("not needed by the embedded engine, and without effect: %s", ", ".join(hints))
    if "weights" in parts["engine"]:  # only vLLM has this setting
        parts["engine"]["kind"] = "vllm"
    try:
        return ModelSettings.model_validate(parts | {"lora": None} if trains_all else parts)
    except ValidationError as error:
        problems = _in_users_words(describe_invalid(error), names)
        raise ConfigError(f"wrong values in _internal_config: {problems}") from error


def _flatten(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values by names such as `init_args.max_seq_length`."""
    rest = dict(config or {})
    sections = {section: rest.pop(section, None) or {} for section in _SECTIONS}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()} | rest


def _set(all_parts: dict[str, dict[str, Any]], names: _Names, target: _Target, value: Any, name: str) -> None:
    parts, setting, convert = target
    if setting == "target_modules" and isinstance(value, str):
        value = None if value == "all-linear" else [value]
    try:
        value = value if value is None else convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r} is not of type {convert.__name__}") from error
    for part in parts:
        settings = all_parts[part]
        if settings.get(setting, value) != value:
            raise ConfigError(f"{name}={value} contradicts {names[part, setting]}={settings[setting]}; keep one")
        settings[setting] = value
        names[part, setting] = name


def _in_users_words(text: str, names: _Names) -> str:
    text = re.sub(r"`engine\.(torch|vllm)\.", "`engine.", text)  # pydantic adds the kind of the engine
    for (part, setting), name in names.items():
        text = text.replace(f"`{part}.{setting}", f"`{name}")
    return text


def in_older_names(error: ArtError, config: Mapping[str, Any] | None) -> ArtError:
    """Put the names of older code into an error: `init_args.max_seq_length` in place of `engine.max_context`."""
    values = _flatten(config)
    honoured = {name: target for name, target in _HONOURED.items() if name in values}
    names = {(part, setting): name for name, (parts, setting, _) in honoured.items() for part in parts}
    error.message = _in_users_words(error.message, names)
    error.args = (error.message,)
    return error


def optimizer_from_internal_config(config: Mapping[str, Any] | None) -> OptimizerConfig | None:
    """Translate `trainer_args` of older code to settings of the optimiser; `None` if they have none of it.

    Raises:
        ConfigError: a value is out of range.
    """
    own = {key: value for key, value in ((config or {}).get("trainer_args") or {}).items() if key in _OPTIMIZER}
    if not own:
        return None
    settings = {_OPTIMIZER[key]: value for key, value in own.items()}
    if "betas" in settings:
        first, second = OptimizerConfig().betas
        settings["betas"] = own.get("adam_beta1", first), own.get("adam_beta2", second)
    names = {setting: f"trainer_args.{key}" for key, setting in _OPTIMIZER.items() if key in own}
    try:
        return OptimizerConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"wrong values in _internal_config: {describe_invalid(error, names)}") from error
