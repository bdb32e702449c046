"""Settings of losses, and of the gate that masks samples from another policy."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from art.config.base import Config

LOSS_PATH_VARIABLE = "ART_LOSS_PATH"
"""Environment variable with folders in which the trainer looks for the modules of custom losses, after its own path."""
_FUNCTION = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"


class LossTerm(Config):
    """Base of the terms of `TrainConfig.loss`, which are summed."""

    weight: float = Field(default=1.0, ge=0)
    """Factor of the term in the sum."""


class DppoConfig(LossTerm):
    """The default loss, DPPO: a policy gradient with importance weights that drops tokens whose probability has moved
    too far (arXiv 2602.04879)."""

    type: Literal["dppo"] = "dppo"
    """Name of the loss."""
    mask_low: float = Field(default=0.2, gt=0)
    """A token with negative advantage is dropped once its probability fell by more than this (prime-rl)."""
    mask_high: float = Field(default=0.2, gt=0)
    """A token with positive advantage is dropped once its probability rose by more than this (prime-rl)."""
    max_ratio: float = Field(default=5.0, gt=1)
    """Upper clamp of the importance ratio."""
    log_ratio_penalty: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2, which keeps the trained policy near the sampler (prime-rl)."""


class PpoConfig(LossTerm):
    """PPO's clipped surrogate: the loss of GRPO, Dr.GRPO and DAPO."""

    type: Literal["ppo"] = "ppo"
    """Name of the loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower bound of the importance ratio, as an offset: 1 - `clip_low` (DAPO)."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper bound of the importance ratio, as an offset: 1 + `clip_high` (DAPO)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss of a token with negative advantage, as a multiple of its advantage; 3 is usual."""


class GspoConfig(LossTerm):
    """PPO's surrogate on the geometric mean of a sample's importance ratios: whole samples are clipped."""

    type: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Lower bound of a sample's ratio, as an offset from 1 (GSPO, arXiv 2507.18071)."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper bound of a sample's ratio, as an offset from 1 (GSPO, arXiv 2507.18071)."""


class CispoConfig(LossTerm):
    """CISPO: a policy gradient whose importance weights are clipped constants, so every token trains (MiniMax-M1)."""

    type: Literal["cispo"] = "cispo"
    """Name of the loss."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Lower bound of the importance weight, as an offset from 1; 1 means no lower bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper bound of the importance weight, as an offset from 1; 4 follows ScaleRL (arXiv 2510.13786)."""


class ReinforceConfig(LossTerm):
    """REINFORCE with importance weights, unbiased off-policy unless `max_ratio` truncates them."""

    type: Literal["reinforce"] = "reinforce"
    """Name of the loss."""
    max_ratio: float | None = Field(default=None, gt=1)
    """Upper bound of the importance weight; `None` for no bound."""


class SftConfig(LossTerm):
    """Cross-entropy on the sampled tokens of the rollouts with positive advantage: rejection fine-tuning."""

    type: Literal["sft"] = "sft"
    """Name of the loss."""


class DpoConfig(LossTerm):
    """Direct preference optimisation on pairs of rollouts of a group that differ in reward."""

    type: Literal["dpo"] = "dpo"
    """Name of the loss."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-ratios to the reference; a larger value keeps the policy nearer to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed probability that a pair is in the wrong order."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group: the best with the worst rollout, or all whose rewards differ."""
    reference: int | Literal["base", "sampler"] = "base"
    """Frozen policy to compare with: the base model, the sampler's recorded log-probs, or a checkpoint by its step."""


class DistillConfig(LossTerm):
    """On-policy distillation: the reverse KL from the policy to a teacher, on the policy's own samples."""

    type: Literal["distill"] = "distill"
    """Name of the loss."""
    teacher: str
    """Inference name of a model on this server with the same vocabulary: `project/name` or `project/name@step`. Without
    `project/` it is a model of the same project."""
    max_advantage: float | None = Field(default=None, gt=0)
    """Upper bound of a token's |log teacher - log policy|; `None` for no bound."""


class KlConfig(LossTerm):
    """A KL divergence that keeps the policy near a frozen reference."""

    type: Literal["kl"] = "kl"
    """Name of the loss."""
    weight: float = Field(default=1e-3, ge=0)
    """Factor of the term; other code calls it beta."""
    reference: int | Literal["base"] = "base"
    """Frozen policy to stay near: the base model (adapter off), or a checkpoint by its step."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token, see http://joschu.net/blog/kl-approx.html; k3 is never negative."""
    where: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss. `reward` subtracts it from the advantages, centred, so that it only moves credit
    between tokens."""


class EntropyConfig(LossTerm):
    """A bonus for entropy, which keeps the policy exploring: `weight` times the entropy is subtracted from the loss."""

    type: Literal["entropy"] = "entropy"
    """Name of the loss."""
    weight: float = Field(default=1e-3, ge=0)
    """Factor of the entropy in nats, averaged over tokens as `normalize` says; other code calls it the entropy
    coefficient. Too large a factor makes the policy random: watch `loss/entropy`."""


class CustomLossConfig(LossTerm):
    """A loss of your own: a Python function that the trainer's process imports and calls. See docs/objectives.md.

    `LocalBackend` allows it. `art-server` refuses it unless `ServerConfig.custom_losses` names the module.
    """

    type: Literal["custom"] = "custom"
    """Name of the loss."""
    function: str
    """The function as `module:name`, e.g. `my_package.losses:my_loss`, or the function itself. It takes an
    `art.losses.LossInputs` and returns an `art.losses.LossOutput`."""
    settings: dict[str, JsonValue] = {}
    """Keyword arguments of the function."""
    reference: int | Literal["base"] | None = None
    """Frozen policy whose log-probs the function finds in `inputs.streams[str(reference)]`: the base model, or a
    checkpoint by its step."""
    entropy_gradient: bool = False
    """Whether the function is differentiated with respect to `inputs.entropy`. It costs a third product with the
    language-model head."""

    @field_validator("function", mode="before")
    @classmethod
    def _name_function(cls, function: Any) -> Any:
        """Turn a function into `module:name`, and reject one that another process cannot import."""
        if callable(function):
            module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<no name>")
            if module in (None, "__main__") or "<" in name:
                raise ValueError(
                    f"the trainer's process cannot import {name!r} of {module!r}; define the function at the top level "
                    "of a module, e.g. my_losses.py, and import it from there"
                )
            function = f"{module}:{name}"
        if isinstance(function, str) and re.fullmatch(_FUNCTION, function) is None:
            raise ValueError(f"`function` is `module:name`, e.g. 'my_package.losses:my_loss'; got {function!r}")
        return function


Objective = DppoConfig | PpoConfig | GspoConfig | CispoConfig | ReinforceConfig | DpoConfig
"""Losses that learn from rewards; a step has at most one."""
LossConfig = Annotated[
    Objective | SftConfig | DistillConfig | KlConfig | EntropyConfig | CustomLossConfig, Field(discriminator="type")
]


MASKED_ALARM = 0.05
"""Share of rollouts masked by the gate above which a warning is logged."""


class MismatchConfig(Config):
    """The gate, which masks rollouts that another policy seems to have sampled.

    Per token, r is the probability under the policy at the step's start over that under the sampler. A rollout is
    judged as a whole, with all its branches.
    """

    low: float | None = Field(default=None, gt=0, le=1)
    """A rollout is masked if the geometric mean of its r is below this, whatever its length. `None` computes the bound
    from the number of tokens, the number types of trainer and engine, and the noise of the step (`objectives.md`)."""
    high: float | None = Field(default=None, ge=1)
    """A rollout is masked if the geometric mean of its r is above this, whatever its length; `None` like `low`."""
    token_low: float = Field(default=1e-4, gt=0, le=1)
    """A rollout is masked if any of its tokens has r below this (SkyRL)."""
    token_high: float = Field(default=1e2, ge=1)
    """A rollout is masked if any of its tokens has r above this (SkyRL)."""
    mask_token_low: float | None = Field(default=None, gt=0, lt=1)
    """A single token is masked if its r is below this, and the rest of its rollout is kept; 0.5 is usual."""
    mask_token_high: float | None = Field(default=None, gt=1)
    """A single token is masked if its r is above this, and the rest of its rollout is kept; 2 is usual."""
    truncate: float | None = Field(default=None, ge=1)
    """Truncated importance sampling: each token's loss is multiplied by min(r, truncate); 2 is usual. It needs
    `anchor="step_start"`: with the sampler as the anchor the ratio is already in the loss."""
    abort: float = Field(default=0.5, ge=0, le=1)
    """Share of masked rollouts above which the step fails and trains nothing. It fails too, unless this is 1, if all
    rollouts together are shifted further than noise explains; not with `low` or `high`."""

    @property
    def has_default_bounds(self) -> bool:
        """Whether no bound of whole rollouts was changed. A changed one holds for rollouts of any age."""
        bounds = {"low", "high", "token_low", "token_high"}
        return self.model_dump(include=bounds) == MismatchConfig().model_dump(include=bounds)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Reject bounds that a stricter bound makes unreachable."""
        if self.mask_token_low is not None and self.mask_token_low <= self.token_low:
            raise ValueError("`mask_token_low` must be above `token_low`, below which the whole rollout is masked")
        if self.mask_token_high is not None and self.mask_token_high >= self.token_high:
            raise ValueError("`mask_token_high` must be below `token_high`, above which the whole rollout is masked")
        if self.truncate is not None and self.truncate >= (self.mask_token_high or self.token_high):
            raise ValueError("`truncate` must be below `mask_token_high` and `token_high`, or it never truncates")
        return self
