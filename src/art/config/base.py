"""The base class of all settings, and types that several of them use."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from art.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic exports no name for it

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "nf4"]
LearningRate = Annotated[float, Field(gt=0, le=1)]


class Left(NamedTuple):
    """A setting that has left ART."""

    default: Any
    """What it was unless it was set, as JSON data. It is what ART does today."""
    instead: str
    """What to do in its place, as the end of a sentence."""


LEFT: dict[str, dict[str, Left]] = {
    "TrainConfig": {
        "spread_tolerance": Left(1e-6, "leave it out"),
        "overlong": Left(None, "take the punishment off the reward in the rollout"),
        "length_penalty": Left(None, "take the penalty off the reward in the rollout or in `after_each`"),
        "normalize_over": Left("submitted", "leave out groups without spread before `train`"),
    },
    "MismatchConfig": {"alarm": Left(0.05, "leave it out")},
    "VllmConfig": {"max_loras": Left(4, 'set `flags={"max_loras": ...}`')},
    "ServerConfig": {
        "restarts": Left(None, "leave it out"),
        "memory": Left(None, "set `memory_limit_bytes`"),
        "min_free_bytes": Left(2**30, "leave it out"),
        "stall_timeout_s": Left(1800.0, "leave it out"),
        "report_after_s": Left(60.0, "leave it out"),
        "nodes": Left(None, "leave it out: a server trains on its own machine"),
    },
    "PipelineConfig": {
        "refill": Left(0.0, "use `curriculum`, or more `groups_per_step`"),
        "early_stop": Left(None, "use `curriculum`"),
        "curriculum_floor": Left(0.1, "leave it out"),
        "every": Left(20, "pass it to `art.pipeline`"),
        "max_barren_steps": Left(5, "leave it out"),
        "report_after_s": Left(60.0, "leave it out"),
    },
}
"""Settings that have left, by class. One with another value than its default is refused, with what to do instead."""


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

    Raises:
        ConfigError: a setting is unknown or has an invalid value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_left(cls, data: Any) -> Any:
        """Drop settings that have left ART if they ask for what is done anyway: older servers and programs wrote each
        setting down, with its default."""
        known = LEFT.get(cls.__name__)
        if known is None or not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in known or value != known[key].default}

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, data: Any) -> Any:
        for name in _numbers_of(cls) & data.keys() if isinstance(data, dict) else ():
            words = _words_of(cls.model_fields[name].annotation)
            for value in data[name] if isinstance(data[name], (list, tuple)) else [data[name]]:
                if isinstance(value, (str, bytes, bool)) and value not in words:
                    hint = ", without quotes" if isinstance(value, str) else ""
                    raise ValueError(f"`{name}` takes a number{hint}; got {value!r}")
        return data


@functools.cache
def _numbers_of(config: type[Config]) -> frozenset[str]:
    """Names of the settings that are numbers or lists of numbers."""
    return frozenset(
        name
        for name, field in config.model_fields.items()
        if {int, float} & (types := set(_types_in(field.annotation))) and not types & {str, bool}
    )


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types in an annotation, without the words of a `Literal`."""
    if get_origin(annotation) is Annotated:
        yield from _types_in(get_args(annotation)[0])
    elif arguments := () if get_origin(annotation) is Literal else get_args(annotation):
        for argument in arguments:
            yield from _types_in(argument)
    else:
        yield annotation


def _words_of(annotation: Any) -> set[Any]:
    """The words that the `Literal` parts of an annotation allow."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*map(_words_of, get_args(annotation)))


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
            if left := next((fields[one["loc"][-1]] for fields in LEFT.values() if one["loc"][-1] in fields), None):
                text = f"is no setting any more; {left.instead}"
        elif one["type"] != "value_error":
            text += f", got {one['input']!r}"
        complaints.setdefault(name, f"`{name}` {text}" if name and one["type"] != "value_error" else text)
    own = names or {}
    return re.sub(r"`(\w+)(?=[`.])", lambda match: f"`{own.get(match[1], match[1])}", "; ".join(complaints.values()))


def check_indices(device: Device, indices: tuple[int, ...]) -> None:
    if indices and device not in ("auto", "cuda"):
        raise ValueError(f'`device_indices` names GPUs, but `device` is "{device}"; leave one of the two out')
    if len(set(indices)) < len(indices) or any(index < 0 for index in indices):
        raise ValueError(f"`device_indices` must be different numbers from 0; got {indices}")
