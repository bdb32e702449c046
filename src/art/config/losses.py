"""Losses, and what a step does about samples of another policy."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from art.config.base import Config


class LossTerm(Config):
    """Base of what `TrainConfig.loss` may name. Terms are summed, each times its weight."""

    weight: float = Field(default=1.0, ge=0)


class DppoConfig(LossTerm):
    """Importance-weighted policy gradient with the binary total-variation mask; the default."""

    type: Literal["dppo"] = "dppo"
    mask_low: float = Field(default=0.2, gt=0)
    """A token with negative advantage is dropped once its probability fell by more than this."""
    mask_high: float = Field(default=0.2, gt=0)
    """A token with positive advantage is dropped once its probability rose by more than this."""
    max_ratio: float = Field(default=5.0, gt=1)
    """Upper clamp of the importance ratio."""
    log_ratio_penalty: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2, which holds the trained policy near the sampler."""


class PpoConfig(LossTerm):
    """PPO's clipped surrogate: the loss of GRPO, Dr.GRPO and DAPO."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token with negative advantage, as a multiple of it; 3 is usual."""


class GspoConfig(LossTerm):
    """PPO's surrogate on the geometric mean of a sample's importance ratios: a clip is of a whole sample."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)


class CispoConfig(LossTerm):
    """Clipped importance weights, gradient through the log-prob (MiniMax-M1)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: float = Field(default=4.0, gt=0)


class ReinforceConfig(LossTerm):
    """REINFORCE with importance weights, unbiased off-policy unless `max_ratio` truncates them."""

    type: Literal["reinforce"] = "reinforce"
    max_ratio: float | None = Field(default=None, gt=1)


class SftConfig(LossTerm):
    """Cross-entropy on the sampled tokens of the rollouts with positive advantage: rejection fine-tuning."""

    type: Literal["sft"] = "sft"


class DpoConfig(LossTerm):
    """Direct preference optimisation on pairs of rollouts of a group that differ in reward."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    pairs: Literal["best_worst", "all"] = "best_worst"
    reference: int | Literal["base", "sampler"] = "base"
    """The frozen policy: the base model, the sampler's recorded log-probs, or a checkpoint by its step."""


class DistillConfig(LossTerm):
    """On-policy distillation: the reverse KL from the policy to a teacher, on the policy's own samples."""

    type: Literal["distill"] = "distill"
    teacher: str
    """Inference name of a model on this server with the same vocabulary: `project/name` or `project/name@step`."""
    max_advantage: float | None = Field(default=None, gt=0)
    """Clamps a token's |log teacher - log policy|."""


class KlConfig(LossTerm):
    """Keeps the policy near a frozen reference. `weight` is what other code calls beta."""

    type: Literal["kl"] = "kl"
    weight: float = Field(default=1e-3, ge=0)
    reference: int | Literal["base"] = "base"
    """The base model (adapter off), or a checkpoint by its step."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    """`reward` takes it off the advantages, centred, so that it moves credit between tokens and adds none."""


Objective = DppoConfig | PpoConfig | GspoConfig | CispoConfig | ReinforceConfig | DpoConfig
"""What learns from rewards; a step has at most one."""
LossConfig = Annotated[Objective | SftConfig | DistillConfig | KlConfig, Field(discriminator="type")]


class MismatchConfig(Config):
    """What is done about the gap between sampler and trainer, by r = policy / sampler at the step's start."""

    low: float = Field(default=0.99, gt=0, le=1)
    high: float = Field(default=1.01, ge=1)
    """A sample whose geometric mean of r is outside [low, high] is masked."""
    token_low: float = Field(default=1e-4, gt=0, le=1)
    token_high: float = Field(default=1e2, ge=1)
    """A sample with any r outside [token_low, token_high] is masked."""
    mask_token_low: float | None = Field(default=None, gt=0, lt=1)
    mask_token_high: float | None = Field(default=None, gt=1)
    """A single token with r outside is masked; the rest of its sample stays. 0.5 and 2 are usual."""
    truncate: float | None = Field(default=None, ge=1)
    """Truncated importance sampling: each token's loss is multiplied by min(r, truncate); 2 is usual. Needs
    `anchor="step_start"`: with the sampler as the anchor the ratio is in the loss already."""
    alarm: float = Field(default=0.05, ge=0, le=1)
    """Share of masked samples above which a warning is logged."""
    abort: float = Field(default=0.5, ge=0, le=1)
    """Share of masked samples above which the step fails and nothing is published."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Refuse bounds that another one forestalls."""
        if self.mask_token_low is not None and self.mask_token_low <= self.token_low:
            raise ValueError("`mask_token_low` must be above `token_low`, below which the whole sample is masked")
        if self.mask_token_high is not None and self.mask_token_high >= self.token_high:
            raise ValueError("`mask_token_high` must be below `token_high`, above which the whole sample is masked")
        if self.truncate is not None and self.truncate >= (self.mask_token_high or self.token_high):
            raise ValueError("`truncate` must be below `mask_token_high` and `token_high`, or it never truncates")
        return self
