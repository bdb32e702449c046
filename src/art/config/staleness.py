"""Check that a loss is safe for rollouts whose policy has changed much since they were sampled.

Up to 4 steps of staleness, importance weights are enough (TRL's `AsyncGRPOTrainer` allows 4). Beyond that, a few tokens
with large weights dominate the updates: training with truncated weights alone has collapsed (arXiv 2602.17616). A
*trust region* prevents it: a token or sample whose probability has moved beyond a bound away from its sampler is not
trained any further. AReaL (arXiv 2505.24298) and prime-rl train up to 8 steps late with one.

Import it from this module where it is needed: `import art` does not load it.
"""

from __future__ import annotations

from art.config.losses import CustomLossConfig, DistillConfig, DppoConfig, GspoConfig, LossConfig, Objective, PpoConfig
from art.config.training import TrainConfig
from art.errors import ConfigError

LARGEST_WITHOUT_REGION = 4
"""Largest `max_staleness` for a loss without a trust region."""
_BOUNDED = (DppoConfig, PpoConfig, GspoConfig)


def check_staleness(config: TrainConfig, max_staleness: int) -> None:
    """Check that `config` can train rollouts that are up to `max_staleness` steps old.

    Above `LARGEST_WITHOUT_REGION`, every term that weighs tokens by their importance ratio needs a trust region. Losses
    have it that compare with the sampler and stop at a bound: dppo, ppo and gspo. With anchor="step_start" their bounds
    only hold back the step's own updates; then `mismatch.truncate` must cap the weight of the sampler too (decoupled
    PPO, arXiv 2505.24298). Any other loss gets a trust region from `mismatch.mask_token_low` and `mask_token_high`,
    which leave out single tokens (IcePop, arXiv 2510.18855). The terms sft, dpo, kl and entropy need none: the first
    two have no importance ratio, the others keep the policy where it is.

    Raises:
        ConfigError: a term has none. The message says what to set.
    """
    if max_staleness <= LARGEST_WITHOUT_REGION or _masks_tokens(config):
        return
    for term in config.terms:
        if _has_ratio(term) and not (isinstance(term, _BOUNDED) and _compares_with_sampler(config)):
            raise ConfigError(_advice(config, term, max_staleness))


def _has_ratio(term: LossConfig) -> bool:
    return term.weight > 0 and term.type != "dpo" and isinstance(term, (Objective, CustomLossConfig, DistillConfig))


def _compares_with_sampler(config: TrainConfig) -> bool:
    return config.anchor == "sampler" or (config.mismatch is not None and config.mismatch.truncate is not None)


def _masks_tokens(config: TrainConfig) -> bool:
    """Whether tokens far from their sampler are masked in every update of the step."""
    gate = config.mismatch
    if gate is None or gate.mask_token_low is None or gate.mask_token_high is None:
        return False
    return config.num_minibatches == 1 or config.anchor == "step_start"


def _advice(config: TrainConfig, term: LossConfig, max_staleness: int) -> str:
    name = f"loss {term.type!r}"
    if isinstance(term, _BOUNDED):
        name += " with anchor='step_start'"
        ways = "set anchor='sampler', or mismatch=MismatchConfig(truncate=2)"
    else:
        ways = "use DppoConfig(), PpoConfig() or GspoConfig()"
        ways += ", or set mismatch=MismatchConfig(mask_token_low=0.5, mask_token_high=2)"
        if config.num_minibatches > 1 and config.anchor == "sampler":
            ways += " together with anchor='step_start', because of `num_minibatches` above 1"
    return (
        f"max_staleness={max_staleness} needs a loss with a trust region, and {name} has none; {ways}, or set "
        f"max_staleness to at most {LARGEST_WITHOUT_REGION}"
    )
