"""Settings of one training step, by reinforcement learning or by supervised fine-tuning, and how calls give them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from art.config.base import Config, describe_invalid
from art.config.losses import (
    CispoConfig,
    CustomLossConfig,
    DpoConfig,
    DppoConfig,
    EntropyConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    MismatchConfig,
    Objective,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
)
from art.config.schedules import AnyRate, AnyRates, ScheduleConfig
from art.errors import ConfigError

SPREAD_TOLERANCE = 1e-6
"""A group whose rewards are all within this distance of their mean has no spread: it teaches nothing, and is left out
and counted. Only a KL term in the loss learns from it, if another group of the step has spread."""


OnNothing = Literal["skip", "raise"]
"""What `train` does when no group can be learnt from: return a result with `trained=False`, or raise an error."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{loss.type: {"loss": loss}
       for loss in (DppoConfig(), PpoConfig(), CispoConfig(), ReinforceConfig(), SftConfig(), DpoConfig())},
    "grpo": {"loss": PpoConfig(clip_high=0.2), "scale_rewards": "group", "normalize": "rollout"},
    "dr_grpo": {"loss": PpoConfig(clip_high=0.2), "normalize": "constant"},
    "dapo": {"loss": PpoConfig(), "scale_rewards": "group"},
    "gspo": {"loss": GspoConfig(), "scale_rewards": "group", "normalize": "rollout"},
    "rloo": {"loss": ReinforceConfig(), "baseline": "leave_one_out"},
    "maxrl": {"loss": ReinforceConfig(), "scale_rewards": "mean"},
}  # fmt: skip
"""What `loss` may name: a loss, or an algorithm, which is a loss with its baseline, scale and normalisation."""


class OptimizerConfig(Config):
    """Settings of the optimiser, AdamW."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square, against division by zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Share of each weight, times the learning rate, that an update takes away."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which larger gradients are scaled down."""


def kl_penalties(
    *, beta: float = 0.0, kl_penalty_coef: float = 0.0, kl_penalty_reference_step: int | None = None
) -> list[KlConfig]:
    """Make the KL terms that older settings ask for: `beta` a KL in the loss, `kl_penalty_coef` one in the reward.

    Raises:
        ValueError: a coefficient is below 0, or a step is given that no coefficient uses.
    """
    for name, value in (("kl_penalty_coef", kl_penalty_coef), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
            raise ValueError(f"{name} must be a number from 0 up, got {value!r}")
    if kl_penalty_reference_step is not None and not kl_penalty_coef:
        raise ValueError("kl_penalty_reference_step does nothing without kl_penalty_coef above 0")
    reference: int | Literal["base"] = "base" if kl_penalty_reference_step is None else kl_penalty_reference_step
    in_reward = KlConfig(weight=kl_penalty_coef, reference=reference, estimator="k1", where="reward")
    return [term for term in (in_reward, KlConfig(weight=beta)) if term.weight]


class TrainConfig(Config):
    """Settings of one reinforcement-learning step. Older `beta` and `kl_penalty_coef` add a `KlConfig` to `loss`."""

    learning_rate: AnyRate = 1e-5
    """Learning rate of the adapter; full fine-tuning needs about a tenth of it ("LoRA without regret"). A
    `ScheduleConfig` gives each step its own, by the number of the checkpoint that the step starts from."""
    loss: LossConfig | tuple[LossConfig, ...] = DppoConfig()
    """One loss term, or several that are summed; or the name of a loss or an algorithm, such as "grpo" (`ALGORITHMS`),
    whose other settings hold unless they are given too."""
    anchor: Literal["sampler", "step_start"] = "sampler"
    """Log-probs that importance ratios compare the policy with: those recorded when sampling, or the trainer's own
    before the first update of the step (one more forward pass if there are several updates)."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Subtracted from each reward: the mean of its group, or of the group's other rollouts."""
    scale_rewards: Literal["none", "group", "batch", "mean"] = "none"
    """Divisor of advantages: 1 (Dr.GRPO), the standard deviation of the group or of the batch (plus 1e-6), or the mean
    reward of the group, which is maximum-likelihood weighting and only for rewards of 0 and 1."""
    normalize: Literal["token", "rollout", "group", "constant"] = "token"
    """What counts equally in the loss: every token, every rollout as a whole, or every group. `constant` divides sums
    over tokens by `constant_tokens` per rollout, so that length has no influence (Dr.GRPO)."""
    constant_tokens: int | None = Field(default=None, ge=1)
    """Divisor per rollout with normalize="constant", e.g. the largest completion length in tokens."""
    mask_truncated: bool = False
    """Learn nothing from a rollout in which the token limit cut off an answer (DAPO's overlong filtering). Its reward
    still counts in the baseline of its group."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimiser updates from one batch of groups; more than 1 is slightly off-policy. A mini-batch holds whole groups,
    which are shuffled with the step's number as seed."""
    mismatch: MismatchConfig | None = MismatchConfig()
    """Gate against samples from another policy; `None` switches it off. It compares the sampler with the policy at the
    start of the step. With anchor="sampler" that policy is known in the first mini-batch only, and later ones pass."""
    sft_weight: float = Field(default=1.0, gt=0)
    """Weight of supervised data in the step, `train(..., sft=...)`: the mean cross-entropy of its tokens, times this
    weight, is added to the loss."""
    observation_weight: float = Field(default=0.0, ge=0)
    """Weight of what the environment answered in the rollouts (tool results and later messages of users). The mean
    cross-entropy of these tokens, times this weight, is added to the loss. ECHO (arXiv 2605.24517) takes 0.05."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW."""

    @property
    def terms(self) -> tuple[LossConfig, ...]:
        """The terms of `loss`, as a tuple even if there is one."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def learns_from_rewards(self) -> bool:
        """Whether any term of the loss reads rewards; distillation alone does not."""
        return any(isinstance(term, (Objective, SftConfig, CustomLossConfig)) for term in self.terms)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of the step that starts from checkpoint `step`.

        Raises:
            ConfigError: the schedule has ended.
        """
        rate = self.learning_rate
        return rate.rate_at(step) if isinstance(rate, ScheduleConfig) else rate

    @property
    def learns_without_spread(self) -> bool:
        """Whether a group whose rewards do not differ has a gradient: that of a KL term over all submitted rollouts."""
        return any(isinstance(term, KlConfig) and term.where == "loss" and term.weight for term in self.terms)

    @model_validator(mode="before")
    @classmethod
    def _name_algorithm(cls, data: Any) -> Any:
        """Put the settings of a loss or algorithm in place of its name. Validators of this kind run last one first."""
        if not isinstance(data, dict) or not isinstance(name := data.get("loss"), str):
            return data
        if name not in ALGORITHMS:
            raise ValueError(f"`loss` must be one of {', '.join(ALGORITHMS)}; got {name!r}")
        return ALGORITHMS[name] | {key: value for key, value in data.items() if key != "loss"}

    @model_validator(mode="before")
    @classmethod
    def _translate_older_names(cls, data: Any) -> Any:
        names = {"beta", "kl_penalty_coef"}
        if not isinstance(data, dict) or not names & data.keys():
            return data
        penalties = kl_penalties(**{name: data[name] for name in names & data.keys()})
        data = {name: value for name, value in data.items() if name not in names}
        if penalties:
            loss = data.get("loss", cls.model_fields["loss"].default)
            if isinstance(loss, str) and loss in ALGORITHMS:
                data, loss = ALGORITHMS[loss] | data, ALGORITHMS[loss]["loss"]
            data["loss"] = (*(loss if isinstance(loss, (tuple, list)) else (loss,)), *penalties)
        return data

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Reject settings that would do nothing together."""
        objectives = [term.type for term in self.terms if isinstance(term, Objective)]
        if all(isinstance(term, (KlConfig, EntropyConfig)) or term.weight == 0 for term in self.terms):
            raise ValueError("`loss` has no term that learns anything; expected e.g. DppoConfig()")
        if len(objectives) > 1:
            raise ValueError(
                f"`loss` has several objectives that learn from rewards: {', '.join(objectives)}; keep one"
            )
        if len({(term.type, getattr(term, "function", None)) for term in self.terms}) < len(self.terms):
            raise ValueError(
                "`loss` has two terms of the same type or custom function; keep one of them (`beta` and "
                '`kl_penalty_coef` are terms of the type "kl")'
            )
        if self.normalize == "constant" and self.constant_tokens is None:
            raise ValueError("normalize='constant' needs `constant_tokens`, e.g. the largest completion length")
        if self.constant_tokens is not None and self.normalize != "constant":
            raise ValueError(f"`constant_tokens` does nothing with normalize={self.normalize!r}; use 'constant'")
        if self.mismatch is not None and self.mismatch.truncate is not None and self.anchor == "sampler":
            raise ValueError("`mismatch.truncate` needs anchor='step_start': with 'sampler' the ratio is in the loss")
        rate = self.learning_rate
        if isinstance(rate, ScheduleConfig) and rate.type != "constant" and rate.total_steps is None:
            raise ValueError(f'a "{rate.type}" schedule needs `total_steps`, the number of steps of the whole run')
        self._check_dpo()
        is_custom = any(isinstance(term, CustomLossConfig) for term in self.terms)
        self._check_rewards(weighs_advantages=is_custom or any(name != "dpo" for name in objectives))
        if self.anchor != "sampler" and all(isinstance(term, (SftConfig, EntropyConfig)) for term in self.terms):
            raise ValueError("sft has no importance ratio: `anchor` does not apply")
        return self

    def _check_rewards(self, *, weighs_advantages: bool) -> None:
        """Reject settings of rewards that the loss does not read.

        sft reads the sign of an advantage, dpo the order of rewards, distillation neither.
        """
        for name, is_set in (
            ("scale_rewards", self.scale_rewards != "none"),
            ("baseline", self.baseline != "mean"),
            ("KL in the reward", any(isinstance(term, KlConfig) and term.where == "reward" for term in self.terms)),
        ):
            if is_set and not weighs_advantages:
                raise ValueError(f"{name} needs an objective that weighs advantages, e.g. DppoConfig()")
        if self.scale_rewards == "mean" and self.baseline != "mean":
            raise ValueError(
                "scale_rewards='mean' (maximum likelihood) weighs rewards of 0 and 1 against their mean: other "
                "baselines do not apply"
            )

    def _check_dpo(self) -> None:
        if not any(isinstance(term, DpoConfig) for term in self.terms):
            return
        if self.normalize != "token":
            raise ValueError("dpo is a mean over pairs: `normalize` does not apply")
        if len(self.terms) > 1 or self.num_minibatches > 1:
            raise ValueError("dpo takes no other terms and makes one update: `num_minibatches` above 1 does not apply")
        if self.anchor != "sampler":
            raise ValueError("dpo has no importance ratio: `anchor` does not apply")
        if self.observation_weight:
            raise ValueError("dpo is a loss of pairs alone: `observation_weight` does not apply")
        gate = self.mismatch
        if gate is not None and (gate.mask_token_low is not None or gate.mask_token_high is not None):
            raise ValueError("dpo compares whole rollouts: `mask_token_low` and `mask_token_high` do not apply")

    @classmethod
    def grpo(cls, **settings: Any) -> Self:
        """GRPO (arXiv 2402.03300): advantages over the group's standard deviation, PPO's clip, a mean per rollout."""
        return cls._named("grpo", settings)

    @classmethod
    def dr_grpo(cls, *, constant_tokens: int, **settings: Any) -> Self:
        """Dr.GRPO (arXiv 2503.20783): GRPO without division by the deviation of rewards or the length of rollouts."""
        return cls._named("dr_grpo", {"constant_tokens": constant_tokens, **settings})

    @classmethod
    def dapo(cls, **settings: Any) -> Self:
        """DAPO (arXiv 2503.14476): GRPO with a wider upper clip and a mean over all tokens. Its punishment of long
        answers belongs in the reward."""
        return cls._named("dapo", settings)

    @classmethod
    def gspo(cls, **settings: Any) -> Self:
        """GSPO (arXiv 2507.18071): GRPO with one importance ratio, and so one clip, per sample instead of per token."""
        return cls._named("gspo", settings)

    @classmethod
    def rloo(cls, **settings: Any) -> Self:
        """RLOO (arXiv 2402.14740): REINFORCE whose baseline is the mean reward of the group's other rollouts."""
        return cls._named("rloo", settings)

    @classmethod
    def maxrl(cls, **settings: Any) -> Self:
        """MaxRL, maximum-likelihood RL (arXiv 2602.02710): for rewards of 0 and 1; a rare 1 counts more."""
        return cls._named("maxrl", settings)

    @classmethod
    def _named(cls, name: str, settings: Mapping[str, Any]) -> Self:
        return cls(**{"loss": name, **settings})


class TrainSFTConfig(Config):
    """Settings of supervised fine-tuning on the assistant messages of trajectories."""

    learning_rate: AnyRates = 5e-5
    """Learning rate, a list with one rate per batch, or a schedule over the batches of the call."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trajectories per optimiser update; `auto` is 2."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW."""


# -- settings that a call gives, as a whole or by name --

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
    with plain_errors():
        return TrainSFTConfig.model_validate(merge_settings(given(whole), settings)) if settings else whole


def train_config(config: TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Make the settings of a training step from a config, single settings, or both if they do not overlap.

    `None` means the default, except for `mismatch`, where it means no gate. A `loss` among the single settings replaces
    the default objective of a config to which `TrainConfig(beta=...)` added terms, and the terms stay.

    Raises:
        ConfigError: a setting is given twice, unknown or out of range.
    """
    whole = None if config is None else check_config(config, TrainConfig)
    settings = {name: value for name, value in settings.items() if value is not None or name == "mismatch"}
    if whole is not None and not settings:
        return whole
    with plain_errors():
        kept: tuple[LossConfig, ...] = ()
        if whole is not None and "loss" in settings and whole.terms[0] is TrainConfig.model_fields["loss"].default:
            kept = whole.terms[1:]
        known = {} if whole is None else given(whole)
        if kept:
            del known["loss"]
        return add_terms(TrainConfig.model_validate(merge_settings(known, settings)), kept)


def merge_settings(known: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Join the fields that are set in a config with single settings.

    Raises:
        ConfigError: a setting is given twice.
    """
    if twice := sorted(known.keys() & settings.keys()):
        raise ConfigError(f"{', '.join(twice)}: given twice, by `config` and by itself; keep one")
    return {**known, **settings}


def add_terms(config: TrainConfig, terms: Iterable[LossConfig]) -> TrainConfig:
    """Return `config` with further terms in its loss."""
    terms = tuple(terms)
    return TrainConfig.model_validate(given(config) | {"loss": (*config.terms, *terms)}) if terms else config


def given(config: TrainConfig | TrainSFTConfig) -> dict[str, Any]:
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
