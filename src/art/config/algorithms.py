"""Makes the settings of a training step from a config, single settings, and the name of a loss or algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar

from pydantic import ValidationError

from art.config.base import describe_invalid
from art.config.losses import (
    CispoConfig,
    DpoConfig,
    DppoConfig,
    LossConfig,
    MismatchConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
)
from art.config.schedules import ScheduleConfig
from art.config.training import OptimizerConfig, TrainConfig, TrainSFTConfig
from art.errors import ConfigError

LossName = Literal[
    "dppo", "ppo", "cispo", "reinforce", "sft", "dpo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "maxrl"
]
"""Values of `loss_fn`: a loss, or an algorithm, which is a loss with its baseline, scale and normalisation."""

OnNothing = Literal["skip", "raise"]
"""What `train` does when no group can be learnt from: return a result with `trained=False`, or raise an error."""

_LOSSES = (DppoConfig(), PpoConfig(), CispoConfig(), ReinforceConfig(), SftConfig(), DpoConfig())
_ALGORITHMS: dict[str, Callable[..., TrainConfig]] = {
    **{loss.type: partial(TrainConfig, loss=loss) for loss in _LOSSES},
    "grpo": TrainConfig.grpo,
    "dr_grpo": TrainConfig.dr_grpo,
    "dapo": TrainConfig.dapo,
    "gspo": TrainConfig.gspo,
    "rloo": TrainConfig.rloo,
    "maxrl": TrainConfig.maxrl,
}


class TrainSettings(TypedDict, total=False):
    """Keyword settings of `train`: every field of `TrainConfig`, and the loss by its name."""

    learning_rate: float | ScheduleConfig
    loss: LossConfig | tuple[LossConfig, ...]
    anchor: Literal["sampler", "step_start"]
    baseline: Literal["mean", "leave_one_out"]
    scale_rewards: Literal["none", "group", "batch", "mean"]
    normalize: Literal["token", "rollout", "group", "constant"]
    constant_tokens: int | None
    mask_truncated: bool
    num_minibatches: int
    mismatch: MismatchConfig | None
    sft_weight: float
    observation_weight: float
    optimizer: OptimizerConfig
    loss_fn: LossName
    """A loss or an algorithm by its name. An algorithm is a preset of `TrainConfig`."""
    loss_fn_config: dict[str, Any]
    """Settings of the loss, see `DppoConfig`, `PpoConfig` and the others."""
    on_nothing: OnNothing
    """What to do when no group can be learnt from: "skip" returns a result with `trained=False`, "raise" raises
    `NothingTrainableError`. The default is "skip"."""


SETTINGS = frozenset(TrainSettings.__annotations__)
_LOSS_WORDS = ("loss_fn", "loss_fn_config")

C = TypeVar("C", TrainConfig, TrainSFTConfig)


def check_config(config: C | Mapping[str, Any] | None, kind: type[C]) -> C:
    """Return `config` as an object of the class `kind`. A dictionary is validated, and `None` gives the defaults.

    Raises:
        ConfigError: `config` is of another class, or holds a wrong value.
    """
    if isinstance(config, kind):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"`config` takes an art.{kind.__name__}(...), got {config!r}", param="config")
    with plain_errors():
        return kind.model_validate(dict(config or {}))


def sft_config(config: TrainSFTConfig | None, settings: Mapping[str, Any]) -> TrainSFTConfig:
    """Make the settings of supervised fine-tuning from a config, single settings, or both if they do not overlap.

    Raises:
        ConfigError: a setting is given twice, unknown or out of range.
    """
    whole = check_config(config, TrainSFTConfig)
    _check_known(settings, TrainSFTConfig.model_fields)
    with plain_errors():
        return TrainSFTConfig.model_validate(merge_settings(whole, settings)[0]) if settings else whole


def train_config(config: TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Make the settings of a training step from a config, single settings, or both if they do not overlap.

    Raises:
        ConfigError: a setting is given twice, unknown or out of range.
    """
    whole = None if config is None else check_config(config, TrainConfig)
    _check_known(settings, SETTINGS - {"on_nothing"})
    settings = without_none(settings)
    if whole is not None and not settings:
        return whole
    with plain_errors():
        words = [word for word in _LOSS_WORDS if word in settings]
        values = {name: value for name, value in settings.items() if name not in _LOSS_WORDS}
        values, kept = merge_settings(whole, values, words)
        if not words:
            return TrainConfig.model_validate(values)
        chosen = algorithm(settings.get("loss_fn", "dppo"), values)
        return add_terms(tune_loss(chosen, settings.get("loss_fn_config", {})), kept)


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that are `None`, which means the default. `mismatch=None` stays: it means no gate.

    Raises:
        ConfigError: `loss` is a name.
    """
    if isinstance(settings.get("loss"), str):
        raise ConfigError(
            f"`loss` takes settings such as art.config.PpoConfig(); for a name use loss_fn={settings['loss']!r}"
        )
    return {name: value for name, value in settings.items() if value is not None or name == "mismatch"}


def merge_settings(
    config: TrainConfig | TrainSFTConfig | None, values: Mapping[str, Any], words: Collection[str] = ()
) -> tuple[dict[str, Any], tuple[LossConfig, ...]]:
    """Join the fields that are set in `config` with the single settings `values`.

    `words` are settings by which the user chose or tuned the loss. They may replace the default objective of a config
    to which `TrainConfig(beta=...)` added terms. These terms are returned too, for the caller to add to the new loss.

    Raises:
        ConfigError: a setting is given twice.
    """
    whole = {} if config is None else _given(config)
    kept: tuple[LossConfig, ...] = ()
    if words and isinstance(config, TrainConfig) and config.terms[0] is TrainConfig.model_fields["loss"].default:
        kept = config.terms[1:]
    if kept:
        del whole["loss"]
    twice = [*(values.keys() & whole.keys()), *(words if "loss" in whole.keys() | values.keys() else ())]
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))}: given twice, by `config` or `loss` and by itself; keep one")
    return whole | dict(values), kept


def algorithm(name: str, values: Mapping[str, Any]) -> TrainConfig:
    """Make the settings of a training step for a named loss or algorithm, with `values` in place of its own.

    Raises:
        ConfigError: there is no such name.
    """
    for known, preset in _ALGORITHMS.items():
        if name == known:
            return preset(**values)
    raise ConfigError(f"loss_fn must be one of {', '.join(_ALGORITHMS)}; got {name!r}")


def tune_loss(config: TrainConfig, options: Mapping[str, Any], term: LossConfig | None = None) -> TrainConfig:
    """Return `config` with `options` set on its only loss term, which `term` replaces first if it is given."""
    term = config.terms[0] if term is None else term
    settings = term.model_dump(exclude_unset=True) | dict(options)
    return TrainConfig.model_validate(_given(config) | {"loss": type(term).model_validate(settings)})


def add_terms(config: TrainConfig, terms: Iterable[LossConfig]) -> TrainConfig:
    """Return `config` with further terms in its loss."""
    terms = tuple(terms)
    return TrainConfig.model_validate(_given(config) | {"loss": (*config.terms, *terms)}) if terms else config


def _given(config: TrainConfig | TrainSFTConfig) -> dict[str, Any]:
    """Return the fields that are set in `config`. The others keep counting as not set in what is made of it."""
    return {name: getattr(config, name) for name in config.model_fields_set}


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Context manager: turn errors about training settings into a `ConfigError` in plain words."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"wrong training settings: {describe_invalid(error)}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"these training settings do not fit together: {error}") from error


def _check_known(settings: Iterable[str], known: Iterable[str]) -> None:
    if unknown := [name for name in settings if name not in known]:
        raise ConfigError(f"training has no setting {', '.join(unknown)}; it knows {', '.join(sorted(known))}")
