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
    max_move: float = Field(default=0.2, gt=0)
    """A token is dropped once its probability has moved by more than this to where its advantage pushes it
    (prime-rl)."""
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


class GspoConfig(LossTerm):
    """PPO's surrogate on the geometric mean of a sample's importance ratios: whole samples are clipped."""

    type: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Lower bound of a sample's ratio, as an offset from 1 (GSPO, arXiv 2507.18071)."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper bound of a sample's ratio, as an offset from 1 (GSPO, arXiv 2507.18071)."""


class SapoConfig(LossTerm):
    """SAPO: each token's importance ratio goes through a soft gate, so no token is dropped and none can run away."""

    type: Literal["sapo"] = "sapo"
    """Name of the loss."""
    temperature_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate of tokens with a positive advantage (SAPO, arXiv 2511.20347)."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate of tokens with a negative advantage. A larger one lets them move less: they are the less
    stable ones (SAPO, arXiv 2511.20347)."""


class CispoConfig(LossTerm):
    """CISPO: a policy gradient whose importance weights are clipped constants, so every token trains (MiniMax-M1)."""

    type: Literal["cispo"] = "cispo"
    """Name of the loss."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Lower bound of the importance weight, as an offset from 1; 1 means no lower bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper bound of the importance weight, as an offset from 1; 4 follows ScaleRL (arXiv 2510.13786)."""


class ReinforceConfig(LossTerm):
    """REINFORCE with importance weights, unbiased off-policy. With an upper bound of the weights it is
    `CispoConfig`."""

    type: Literal["reinforce"] = "reinforce"
    """Name of the loss."""


class SftConfig(LossTerm):
    """Cross-entropy on the sampled tokens of the rollouts with positive advantage: rejection fine-tuning."""

    type: Literal["sft"] = "sft"
    """Name of the loss."""


class DpoConfig(LossTerm):
    """Direct preference optimisation on the best and the worst rollout of each group."""

    type: Literal["dpo"] = "dpo"
    """Name of the loss."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-ratios to the reference; a larger value keeps the policy nearer to it."""
    reference: int | Literal["base", "sampler"] = "base"
    """Frozen policy to compare with: the base model, the sampler's recorded log-probs, or a checkpoint by its step."""


class DistillConfig(LossTerm):
    """On-policy distillation: the reverse KL from the policy to a teacher, on the policy's own samples."""

    type: Literal["distill"] = "distill"
    """Name of the loss."""
    teacher: str
    """Inference name of a model on this server with the same vocabulary: `project/name` or `project/name@step`. Without
    `project/` it is a model of the same project."""


class Regulariser(LossTerm):
    """Base of the terms that stand beside a loss and learn nothing alone."""

    weight: float = Field(default=1e-3, ge=0)
    """Factor of the term. Other code calls it beta (KL) or the entropy coefficient."""


class KlConfig(Regulariser):
    """A KL divergence that keeps the policy near a frozen reference."""

    type: Literal["kl"] = "kl"
    """Name of the loss."""
    reference: int | Literal["base"] = "base"
    """Frozen policy to stay near: the base model (adapter off), or a checkpoint by its step."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token, see http://joschu.net/blog/kl-approx.html; k3 is never negative."""
    where: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss. `reward` subtracts it from the advantages, centred, so that it only moves credit
    between tokens."""


class EntropyConfig(Regulariser):
    """A bonus for entropy, which keeps the policy exploring: `weight` times the entropy is subtracted from the loss.

    The entropy is in nats, averaged over tokens as `normalize` says. Too large a weight makes the policy random: watch
    `loss/entropy`.
    """

    type: Literal["entropy"] = "entropy"
    """Name of the loss."""


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


Objective = DppoConfig | PpoConfig | GspoConfig | SapoConfig | CispoConfig | ReinforceConfig | DpoConfig
"""Losses that learn from rewards; a step has at most one."""
LossConfig = Annotated[
    Objective | SftConfig | DistillConfig | KlConfig | EntropyConfig | CustomLossConfig, Field(discriminator="type")
]


MASKED_ALARM = 0.05
"""Share of rollouts masked by the gate above which a warning is logged."""


Bounds = tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(ge=1)]]
"""A lower and an upper bound of a ratio of probabilities."""


class MismatchConfig(Config):
    """The gate, which masks rollouts that another policy seems to have sampled.

    Per token, r is the probability under the policy at the step's start over that under the sampler. A rollout is
    judged as a whole, with all its branches.
    """

    rollouts: Bounds | None = None
    """A rollout is masked if the geometric mean of its r is outside of these bounds, whatever its length. `None`
    computes them from the number of tokens, the number types of trainer and engine, and the noise of the step
    (`objectives.md`)."""
    tokens: Bounds = (1e-4, 1e2)
    """A rollout is masked if any of its tokens has r outside of these bounds (SkyRL)."""
    mask_tokens: Bounds | None = None
    """A single token is masked if its r is outside of these bounds, and the rest of its rollout is kept; (0.5, 2) is
    usual."""
    truncate: float | None = Field(default=None, ge=1)
    """Truncated importance sampling: each token's loss is multiplied by min(r, truncate); 2 is usual. It needs
    `anchor="step_start"`: with the sampler as the anchor the ratio is already in the loss."""
    abort: float = Field(default=0.5, ge=0, le=1)
    """Share of masked rollouts above which the step fails and trains nothing. It fails too, unless this is 1, if all
    rollouts together are shifted further than noise explains; not with bounds for `rollouts`."""

    @property
    def has_default_bounds(self) -> bool:
        """Whether no bound of whole rollouts was changed. A changed one holds for rollouts of any age."""
        return self.rollouts is None and self.tokens == MismatchConfig.model_fields["tokens"].default

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Reject bounds that a stricter bound makes unreachable."""
        low, high = self.mask_tokens or (1.0, 1.0)
        if low <= self.tokens[0] or high >= self.tokens[1]:
            raise ValueError("`mask_tokens` must be within `tokens`, outside of which the whole rollout is masked")
        if self.truncate is not None and self.truncate >= (self.mask_tokens or self.tokens)[1]:
            raise ValueError("`truncate` must be below the upper bounds of the tokens, or it never truncates")
        return self
