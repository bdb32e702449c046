"""The base class of all settings, types that several of them use, and what a setting must never hold."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from art.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic exports no name for it

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "nf4"]
LearningRate = Annotated[float, Field(gt=0, le=1)]


LEFT: dict[str, dict[str, Any]] = {
    "TrainConfig": {
        "spread_tolerance": 1e-6, "overlong": None, "length_penalty": None, "constant_tokens": None,
        "normalize_over": "submitted",
    },
    "MismatchConfig": {
        "alarm": 0.05, "low": None, "high": None, "token_low": 1e-4, "token_high": 1e2, "mask_token_low": None,
        "mask_token_high": None,
    },
    "DppoConfig": {"mask_low": 0.2, "mask_high": 0.2, "max_ratio": 5.0},
    "PpoConfig": {"dual_clip": None},
    "ReinforceConfig": {"max_ratio": None},
    "DpoConfig": {"label_smoothing": 0.0, "pairs": "best_worst"},
    "DistillConfig": {"max_advantage": None},
    "CustomLossConfig": {"entropy_gradient": False},
    "LoraConfig": {"use_rslora": False},
    "EngineConfig": {"quantization": "none", "max_waiting": 4096, "prefill_tokens": 4096},
    "TrainerConfig": {
        "compile_layers": False, "loader": None, "keep_token_files": 500, "moment_bits": 32, "num_nodes": 1,
    },
    "VllmConfig": {"max_loras": 4, "max_waiting": 4096},
    "LimitsConfig": {
        "max_json_depth": 64, "max_json_values": 100_000, "max_training_json_values": 2_000_000, "read_timeout_s": 30.0,
        "write_timeout_s": 60.0, "max_requests_per_minute_per_key": 60_000,
    },
    "ServerConfig": {
        "drain_s": 0.0, "max_chat_body_bytes": 8 * 2**20, "public_urls": [], "promotion": {"require": None},
        "job_timeout_s": 24 * 3600.0, "llama_cpp": None, "vllm_python": None, "preflight": True,
        "handshake_tolerance": None, "restarts": None, "memory": None, "memory_limit_bytes": None,
        "min_free_bytes": 2**30, "stall_timeout_s": 1800.0, "report_after_s": 60.0, "nodes": None,
    },
    "PricesConfig": {"cached_usd": None},
    "PipelineConfig": {
        "refill": 0.0, "early_stop": None, "curriculum": False, "curriculum_floor": 0.1, "every": 20,
        "max_barren_steps": 5, "report_after_s": 60.0,
    },
}  # fmt: skip
"""Settings that have left ART, by class, with the defaults that they had, as JSON data. ART does today what these say.
One with another value is refused, with what to do instead."""
INSTEAD: dict[str, str] = {
    "overlong": "take the punishment off the reward in the rollout",
    "length_penalty": "take the penalty off the reward in the rollout or in `after_each`",
    "constant_tokens": "give the number as `normalize`",
    "normalize_over": "leave out groups without spread before `train`",
    **dict.fromkeys(("low", "high"), "set `rollouts=(low, high)`"),
    **dict.fromkeys(("token_low", "token_high"), "set `tokens=(low, high)`"),
    **dict.fromkeys(("mask_token_low", "mask_token_high"), "set `mask_tokens=(low, high)`"),
    **dict.fromkeys(("mask_low", "mask_high"), "set `max_move`, which holds both ways"),
    "max_ratio": "leave it out, or use `CispoConfig(clip_high=max_ratio - 1)`",
    "dual_clip": "write a loss of your own, `CustomLossConfig`",
    "pairs": "leave it out: a group gives one pair, its best and its worst rollout",
    "entropy_gradient": "add an `EntropyConfig` to `loss`",
    "use_rslora": "set `alpha` to sqrt(rank) times as much, which is the same",
    "quantization": "set `trainer.quantization`, which the engine follows",
    "max_waiting": "leave it out, and see `limits.max_chats_per_project` of the server",
    "loader": "leave it out: transformers loads every model",
    "keep_token_files": "leave it out: those of the newest 500 steps are kept",
    "num_nodes": "set `num_processes`: one model trains on one machine",
    "max_loras": 'set `flags={"max_loras": ...}`',
    "max_training_json_values": "leave it out, and train smaller steps",
    "max_requests_per_minute_per_key": "set `max_requests_per_key`",
    "drain_s": "let what stops the server wait before SIGTERM, like `preStop` in deploy/kubernetes",
    "public_urls": "add the addresses to `cors_origins`",
    "promotion": "set `require_gain`",
    "job_timeout_s": "leave it out, and cancel a job that takes too long",
    "llama_cpp": "export `merged`, and run llama.cpp's converter on that folder",
    "vllm_python": "set the variable ART_VLLM_PYTHON",
    "preflight": "leave it out, and mend what the checks find",
    "handshake_tolerance": "leave it out, and give trainer and engine the same dtype",
    **dict.fromkeys(("memory", "memory_limit_bytes"), "limit the memory of the server's container or service"),
    "nodes": "leave it out: a server trains on its own machine",
    "cached_usd": "set `prompt_usd` to what a prompt token costs on average",
    "refill": "use more `groups_per_step`",
    **dict.fromkeys(("early_stop", "curriculum"), "leave scenarios that are always or never solved out of the list"),
    "every": "pass it to `art.pipeline`",
}
"""What to do in place of a setting that has left, as the end of a sentence; for all others it is "leave it out"."""

STORED = "stored"
"""Validation context of settings that an older server accepted and stored."""


class _PlainErrors(ModelMetaclass):
    """Metaclass whose classes report invalid settings as a `ConfigError` in plain words.

    `model_validate` still raises pydantic's error, for callers that add where in a file a setting is.
    """

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {describe_invalid(error)}") from None


class Config(BaseModel, metaclass=_PlainErrors):
    """Base class of all settings. An object cannot be changed, and text or a truth value is not taken for a number.
    Raises `ConfigError` if a setting is unknown or has an invalid value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_left(cls, data: Any, info: ValidationInfo) -> Any:
        """Drop settings that have left ART if they ask for what is done anyway: older servers and programs wrote each
        setting down, with its default. With the context `STORED` drop them all."""
        known = LEFT.get(cls.__name__)
        if known is None or not isinstance(data, dict):
            return data
        left = {key for key in data.keys() & known.keys() if info.context == STORED or data[key] == known[key]}
        return {key: value for key, value in data.items() if key not in left}

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, data: Any) -> Any:
        numbers = _numbers_of(cls)
        for name in numbers.keys() & data.keys() if isinstance(data, dict) else ():
            for value in data[name] if isinstance(data[name], (list, tuple)) else [data[name]]:
                if isinstance(value, (str, bytes, bool)) and value not in numbers[name]:
                    hint = ", without quotes" if isinstance(value, str) else ""
                    raise ValueError(f"`{name}` takes a number{hint}; got {value!r}")
        return data


@functools.cache
def _numbers_of(config: type[Config]) -> dict[str, set[Any]]:
    """The settings that are numbers or lists of numbers, with the words that they may be instead."""
    parts = {name: _parts(field.annotation) for name, field in config.model_fields.items()}
    return {name: found for name, found in parts.items() if {int, float} & found and not {str, bool} & found}


def _parts(annotation: Any) -> set[Any]:
    """The types in an annotation, and the words of its `Literal` parts."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal or not arguments:
        return set(arguments) or {annotation}
    return set().union(*map(_parts, arguments[:1] if get_origin(annotation) is Annotated else arguments))


def instead_of(name: str) -> str | None:
    """Say what to do in place of a setting that has left ART, as the end of a sentence; `None` if it never was one."""
    return INSTEAD.get(name, "leave it out") if any(name in fields for fields in LEFT.values()) else None


def describe_invalid(error: ValidationError, names: Mapping[str, str] | None = None) -> str:
    """Put pydantic's errors into plain words: the setting, what it must be, and what was given.

    Args:
        names: the user's name of a setting, where it differs from its own name.
    """
    complaints: dict[str, str] = {}
    for one in error.errors(include_url=False):
        # A part with brackets names a member of a union, which the user has not written.
        name = ".".join(str(part) for part in one["loc"] if "[" not in str(part))
        text = one["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if one["type"] == "extra_forbidden":
            text = f"is no setting of {error.title}"
            if advice := instead_of(str(one["loc"][-1])):
                text = f"is no setting any more; {advice}"
        elif one["type"] != "value_error":
            text += f", got {one['input']!r}"
        complaints.setdefault(name, f"`{name}` {text}" if name and one["type"] != "value_error" else text)
    own = names or {}
    return re.sub(r"`(\w+)(?=[`.])", lambda match: f"`{own.get(match[1], match[1])}", "; ".join(complaints.values()))


def check_no_userinfo(address: str, name: str) -> str:
    """Return an address that has no user and no password in it: `http://user:password@host` is refused.

    Addresses are shown in errors, logs and lists of processes, and stored with settings. The message does not show the
    address.

    Args:
        name: the argument or setting that the address was given as.

    Raises:
        ConfigError: there is one.
    """
    try:
        netloc = urlsplit(address).netloc
    except ValueError:  # no address at all, which its user says better
        return address
    if "@" not in netloc:
        return address
    host = netloc.rpartition("@")[2]
    raise ConfigError(
        f"`{name}` has a user or a password before the host {host!r}; give the address without them, and the key where "
        "keys go: in a variable or an argument of its own",
        param=name,
    )
