"""Settings of `art.pipeline`, which trains while further rollouts run, and how old those rollouts may be.

Import it from this module where it is needed: `import art` does not load it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.config.base import Config
from art.config.losses import CustomLossConfig, DistillConfig, DppoConfig, GspoConfig, Objective, PpoConfig
from art.config.training import TrainConfig
from art.errors import ConfigError


class PipelineConfig(Config):
    """Settings of `art.pipeline`: sizes of groups and steps, how far rollouts may run ahead, and what is repeated."""

    rollouts_per_group: int = Field(default=8, ge=1)
    """Rollouts of one scenario, whose rewards are compared with each other. 8 is the middle of what GRPO runs use (4 to
    16): fewer make the group's mean a poor baseline, and more cost rollouts of scenarios that are seen already."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups that one training step takes, the default of tasks too. Smaller steps follow each other faster and have
    noisier gradients."""
    max_staleness: int = Field(default=1, ge=0)
    """Most steps between the checkpoint that a rollout began with and the one that its training step starts from. 0
    never samples ahead: each step waits for its rollouts, and they wait for it. 1 overlaps rollouts with training
    and is safe with every loss; 2 also hides most of the slowest rollouts. Above 4, ART demands a loss with a trust
    region (arXiv 2505.24298 and NVIDIA's NeMo-RL #1098 measured where quality is lost)."""
    in_flight: Literal["finish", "switch"] = "finish"
    """What a running rollout does when a step is published. "finish": it ends with the checkpoint that it began with,
    which adapters make free. "switch": it goes on with the new weights, and each token is trained with the version that
    sampled it; engines that hold a single policy need this."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Most rollouts that run at once; `None` starts every rollout that the staleness allows. Give a number where the
    tools or the engine's memory bear no more: rollouts of the oldest group then run first."""
    rollout_timeout_s: float | None = Field(default=1800.0, gt=0)
    """Seconds after which a rollout is cancelled and counts as failed; `None` waits for ever. Half an hour is longer
    than nearly every agent needs, and an agent that hangs delays the step that waits for it by no more than this."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of scenarios, and of the random numbers of rollouts."""
    shuffle: bool = True
    """Go through a list of scenarios in a random order, another in each pass. `False` keeps the order of the list."""
    max_fault_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the last 64 rollouts that may fail through no fault of the policy. Above it the training ends with an
    error, because a machine or a program is broken."""


LARGEST_WITHOUT_REGION = 4
"""Largest `max_staleness` for a loss without a trust region."""
_BOUNDED = (DppoConfig, PpoConfig, GspoConfig)


def check_staleness(config: TrainConfig, max_staleness: int) -> None:
    """Check that `config` can train rollouts that are up to `max_staleness` steps old.

    Up to 4 steps of staleness, importance weights are enough (TRL's `AsyncGRPOTrainer` allows 4). Beyond that, a few
    tokens with large weights dominate the updates: training with truncated weights alone has collapsed (arXiv
    2602.17616). A *trust region* prevents it: a token or sample whose probability has moved beyond a bound away from
    its sampler is not trained any further. AReaL (arXiv 2505.24298) and prime-rl train up to 8 steps late with one.

    Above `LARGEST_WITHOUT_REGION`, every term that weighs tokens by their importance ratio needs a trust region. Losses
    have it that compare with the sampler and stop at a bound: dppo, ppo and gspo. With anchor="step_start" their bounds
    only hold back the step's own updates; then `mismatch.truncate` must cap the weight of the sampler too (decoupled
    PPO, arXiv 2505.24298). Any other loss gets a trust region from `mismatch.mask_tokens`, which leaves out single
    tokens (IcePop, arXiv 2510.18855). The terms sft, dpo, kl and entropy need none: the first two have no importance
    ratio, the others keep the policy where it is.

    Raises:
        ConfigError: a term has none. The message says what to set.
    """
    truncate, mask_tokens = None, None
    if config.mismatch is not None:
        truncate, mask_tokens = config.mismatch.truncate, config.mismatch.mask_tokens
    # Single tokens are masked in every update of the step only while their ratio to the sampler is known.
    is_masked = mask_tokens is not None and (config.num_minibatches == 1 or config.anchor == "step_start")
    if max_staleness <= LARGEST_WITHOUT_REGION or is_masked:
        return
    for term in config.terms:
        has_ratio = term.type != "dpo" and isinstance(term, (Objective, CustomLossConfig, DistillConfig))
        is_bounded = isinstance(term, _BOUNDED)
        if not has_ratio or term.weight == 0 or (is_bounded and (config.anchor == "sampler" or truncate is not None)):
            continue
        name = f"loss {term.type!r}"
        if is_bounded:
            name += " with anchor='step_start'"
            ways = "set anchor='sampler', or mismatch=MismatchConfig(truncate=2)"
        else:
            ways = "use DppoConfig(), PpoConfig() or GspoConfig(), or set mismatch=MismatchConfig(mask_tokens=(0.5, 2))"
            if config.num_minibatches > 1 and config.anchor == "sampler":
                ways += " together with anchor='step_start', because of `num_minibatches` above 1"
        raise ConfigError(
            f"max_staleness={max_staleness} needs a loss with a trust region, and {name} has none; {ways}, or set "
            f"max_staleness to at most {LARGEST_WITHOUT_REGION}"
        )
