"""Settings of one training step, by reinforcement learning or by supervised fine-tuning, and how calls give them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from art.config.base import Config, LearningRate, describe_invalid
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
    SapoConfig,
    SftConfig,
)
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
    "dr_grpo": {"loss": PpoConfig(clip_high=0.2)},
    "dapo": {"loss": PpoConfig(), "scale_rewards": "group"},
    "gspo": {"loss": GspoConfig(), "scale_rewards": "group", "normalize": "rollout"},
    "sapo": {"loss": SapoConfig(), "scale_rewards": "group", "normalize": "rollout"},
    "rloo": {"loss": ReinforceConfig(), "baseline": "leave_one_out"},
    "maxrl": {"loss": ReinforceConfig(), "scale_rewards": "mean"},
}  # fmt: skip
"""What `loss` may name: a loss, or an algorithm, which is a loss with its baseline, scale and normalisation.

    grpo      arXiv 2402.03300   advantages over the group's standard deviation, PPO's clip, a mean per rollout
    dr_grpo   arXiv 2503.20783   GRPO without division by the deviation; `normalize` divides in place of the length
    dapo      arXiv 2503.14476   GRPO with a wider upper clip and a mean over all tokens
    gspo      arXiv 2507.18071   GRPO with one importance ratio, and so one clip, per sample instead of per token
    sapo      arXiv 2511.20347   GRPO with a soft gate on the importance ratio of each token in place of the clip
    rloo      arXiv 2402.14740   REINFORCE whose baseline is the mean reward of the group's other rollouts
    maxrl     arXiv 2602.02710   maximum-likelihood RL: for rewards of 0 and 1; a rare 1 counts more
"""


Shape = Literal["constant", "linear", "cosine"]


class ScheduleConfig(Config):
    """A learning rate by step: `warmup_steps` rise to `peak`, then it falls towards `min_ratio * peak`.

    Steps count from 0. The rate of step s of the warm-up is peak * (s + 1) / (warmup_steps + 1). After it, with
    t = (s - warmup_steps) / (total_steps - warmup_steps), at most 1, the rate is
    peak * (min_ratio + (1 - min_ratio) * f), where f is 1 - t for "linear", (1 + cos(pi t)) / 2 for "cosine" (SGDR,
    arXiv 1608.03983), and 1 for "constant".

    Example: peak=1e-4, warmup_steps=1, total_steps=3, "linear": 5e-5, 1e-4, 5e-5
    """

    type: Shape = "linear"
    """Shape of the rate after the warm-up."""
    peak: LearningRate
    """The largest rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps before the first one with the rate `peak`."""
    total_steps: int | None = Field(default=None, ge=1)
    """Step at which "linear" and "cosine" reach `min_ratio`. In supervised fine-tuning a step is a batch, and `None` is
    the number of batches of the call."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `peak` that "linear" and "cosine" end at. With 0 there is no step `total_steps`: its rate would be 0."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.type == "constant" and (self.total_steps is not None or self.min_ratio):
            raise ValueError('a "constant" schedule does not fall: `total_steps` and `min_ratio` do not apply')
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            given = f"{self.warmup_steps} of {self.total_steps}"
            raise ValueError(f"`warmup_steps` must be below `total_steps`; got {given}")
        return self

    def rate_at(self, step: int, *, total_steps: int | None = None) -> float:
        """Return the learning rate of a step.

        Args:
            step: number of the step, from 0.
            total_steps: what `total_steps` is if it is not set.

        Raises:
            ConfigError: the schedule has ended, so the rate would be 0, or it does not know where it ends.
        """
        total = self.total_steps or total_steps
        if total is None and self.type != "constant":
            raise ConfigError(f'a "{self.type}" schedule needs `total_steps`', param="learning_rate")
        share = share_at(self.type, step, warmup_steps=self.warmup_steps, total_steps=total or 0)
        if share == 0.0 and self.min_ratio == 0.0:
            problem = f"the learning rate is 0 at step {step}: its schedule ended at `total_steps`={total}"
            raise ConfigError(f"{problem}. Set a larger one, or `min_ratio` above 0", param="learning_rate")
        return self.peak * (share if step < self.warmup_steps else self.min_ratio + (1 - self.min_ratio) * share)


def share_at(shape: Shape, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the share, from 0 to 1, of the way from the smallest rate to the peak at a step counted from 0.

    In the warm-up it is the share of the peak itself.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(total_steps - warmup_steps, 1))
    return 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2


def _kind(value: Any) -> str:
    if isinstance(value, (dict, ScheduleConfig)):
        return "[schedule]"
    return "[list]" if isinstance(value, (list, tuple)) else "[number]"


# Brackets keep the name of a member out of error messages.
AnyRate = Annotated[
    Annotated[LearningRate, Tag("[number]")] | Annotated[ScheduleConfig, Tag("[schedule]")],
    Discriminator(lambda value: "[schedule]" if _kind(value) == "[schedule]" else "[number]"),
]
"""A number, or a schedule."""
AnyRates = Annotated[
    Annotated[LearningRate, Tag("[number]")]
    | Annotated[list[Annotated[float, Field(ge=0, le=1)]], Tag("[list]")]
    | Annotated[ScheduleConfig, Tag("[schedule]")],
    Discriminator(_kind),
]
"""A number, a number for each batch, or a schedule over the batches."""


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
    Raises `ValueError` if a coefficient is below 0, or a step is given that no coefficient uses."""
    for name, value in (("kl_penalty_coef", kl_penalty_coef), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
            raise ValueError(f"{name} must be a number from 0 up, got {value!r}")
    if kl_penalty_reference_step is not None and not kl_penalty_coef:
        raise ValueError("kl_penalty_reference_step does nothing without kl_penalty_coef above 0")
    reference: int | Literal["base"] = "base" if kl_penalty_reference_step is None else kl_penalty_reference_step
    in_reward = KlConfig(weight=kl_penalty_coef, reference=reference, estimator="k1", where="reward")
    return [term for term in (in_reward, KlConfig(weight=beta)) if term.weight]


class _OptimizedConfig(Config):
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW."""


class TrainConfig(_OptimizedConfig):
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
    normalize: Literal["token", "rollout", "group"] | Annotated[int, Field(ge=1)] = "token"
    """What counts equally in the loss: every token, every rollout as a whole, or every group. A number, e.g. the
    largest completion length in tokens, divides the sum over the tokens of each rollout, so that length has no
    influence (Dr.GRPO)."""
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

    @property
    def terms(self) -> tuple[LossConfig, ...]:
        """The terms of `loss`, as a tuple even if there is one."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def learns_from_rewards(self) -> bool:
        """Whether any term of the loss reads rewards; distillation alone does not."""
        return any(isinstance(term, (Objective, SftConfig, CustomLossConfig)) for term in self.terms)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of the step that starts from checkpoint `step`. Raises `ConfigError` if the schedule
        has ended."""
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
        if name == "dr_grpo" and "normalize" not in data:
            raise ValueError("'dr_grpo' needs a number as `normalize`, e.g. the largest completion length in tokens")
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
        terms, mismatch, rate = self.terms, self.mismatch, self.learning_rate
        objectives = [term.type for term in terms if isinstance(term, Objective)]
        names = {(term.type, getattr(term, "function", None)) for term in terms}
        shape = "constant" if not isinstance(rate, ScheduleConfig) or rate.total_steps is not None else rate.type
        is_dpo = "dpo" in objectives
        # sft reads the sign of an advantage, dpo the order of rewards, distillation neither.
        weighs = objectives not in ([], ["dpo"]) or any(isinstance(term, CustomLossConfig) for term in terms)
        is_shaped = any(isinstance(term, KlConfig) and term.where == "reward" for term in terms)
        advantages = "needs an objective that weighs advantages, e.g. DppoConfig()"
        for is_refused, problem in (
            (all(isinstance(term, (KlConfig, EntropyConfig)) or term.weight == 0 for term in terms),
             "`loss` has no term that learns anything; expected e.g. DppoConfig()"),
            (len(objectives) > 1, f"`loss` has several objectives that learn from rewards: {', '.join(objectives)}"),
            (len(names) < len(terms), "`loss` has two terms of the same type or custom function "
             '(`beta` and `kl_penalty_coef` are terms of the type "kl")'),
            (mismatch is not None and mismatch.truncate is not None and self.anchor == "sampler",
             "`mismatch.truncate` needs anchor='step_start': with 'sampler' the ratio is in the loss"),
            (shape != "constant", f'a "{shape}" schedule needs `total_steps`, the number of steps of the whole run'),
            (is_dpo and self.normalize != "token", "dpo is a mean over pairs: `normalize` does not apply"),
            (is_dpo and (len(terms) > 1 or self.num_minibatches > 1),
             "dpo takes no other terms and makes one update: `num_minibatches` above 1 does not apply"),
            (is_dpo and self.anchor != "sampler", "dpo has no importance ratio: `anchor` does not apply"),
            (is_dpo and self.observation_weight, "dpo is a loss of pairs alone: `observation_weight` does not apply"),
            (is_dpo and mismatch is not None and mismatch.mask_tokens is not None,
             "dpo compares whole rollouts: `mask_tokens` does not apply"),
            (self.scale_rewards != "none" and not weighs, f"scale_rewards {advantages}"),
            (self.baseline != "mean" and not weighs, f"baseline {advantages}"),
            (is_shaped and not weighs, f"KL in the reward {advantages}"),
            (self.scale_rewards == "mean" and self.baseline != "mean",
             "scale_rewards='mean' weighs rewards against their mean: other baselines do not apply"),
            (self.anchor != "sampler" and all(isinstance(term, (SftConfig, EntropyConfig)) for term in terms),
             "sft has no importance ratio: `anchor` does not apply"),
        ):  # fmt: skip
            if is_refused:
                raise ValueError(problem)
        return self


class TrainSFTConfig(_OptimizedConfig):
    """Settings of supervised fine-tuning on the assistant messages of trajectories."""

    learning_rate: AnyRates = 5e-5
    """Learning rate, a list with one rate per batch, or a schedule over the batches of the call."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trajectories per optimiser update; `auto` is 2."""


# -- settings that a call gives, as a whole or by name --

C = TypeVar("C", TrainConfig, TrainSFTConfig)


def check_config(config: C | Mapping[str, Any] | None, kind: type[C]) -> C:
    """Return `config` as an object of the class `kind`. A dictionary is validated, and `None` gives the defaults.
    Raises `ConfigError` if `config` is of another class, or holds a wrong value."""
    if isinstance(config, kind):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"`config` takes an art.{kind.__name__}(...), got {config!r}", param="config")
    with plain_errors():
        return kind.model_validate(dict(config or {}))


def sft_config(config: TrainSFTConfig | None, settings: Mapping[str, Any]) -> TrainSFTConfig:
    """Make the settings of supervised fine-tuning from a config, single settings, or both if they do not overlap.
    Raises `ConfigError` if a setting is given twice, unknown or out of range."""
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
