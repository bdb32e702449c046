"""Say what the gate observed, at which bound and noise, and what to check. Stop a step that is mostly wrong."""

from __future__ import annotations

import logging

import numpy as np

from art.config import MismatchConfig
from art.errors import TrainingError
from art.trainer.gate.gate import Gate, Verdict

_log = logging.getLogger(__name__)

_CAUSES = (
    "Check whether the samples come from another or an older policy, from another temperature, from top_p below 1, or "
    "have changed tokens, and whether the engine applies the adapter"
)
_UNKNOWN = (
    "The checkpoints that sampled them are gone, or are whole models too large to load, so nobody knows how far the "
    "policy has moved since. If it has moved far, use a lower `learning_rate` or a lower `max_staleness`, or set "
    "`mismatch=None`"
)
_MIXTURE = (
    "The base model is a mixture of experts: engine and trainer each choose the experts of a token, and rounding can "
    "change the choice and with it the log-prob. ART does not replay the engine's choice in the trainer (router "
    "replay). Its bounds are already twice as wide as those of a dense model. If the samples do come from this policy, "
    'set dtype "float32" for engine and trainer, mask single tokens with `mask_token_low=0.5` and `mask_token_high=2`, '
    "set wider `low`, `high`, `token_low` and `token_high` of `mismatch`, or train a dense model"
)


def check_verdict(gate: Gate, verdict: Verdict, *, num_masked: int, num_judged: int) -> None:
    """Log a warning if the share of masked rollouts is above `alarm`, or if all rollouts together are shifted.

    `num_masked` and `num_judged` count the rollouts of the step so far, including those of `verdict`.

    Raises:
        TrainingError: the share is above `abort`. A shift of all rollouts counts as a share of 1.
    """
    config, share = gate.config, (num_masked + verdict.num_suspected) / max(num_judged, 1)
    observation = f"{num_masked} of {num_judged} rollouts have sampling log-probs that the trainer does not reproduce"
    if verdict.num_suspected:
        wrong, checked = int(verdict.masked[verdict.checked].sum()), int(verdict.checked.sum())
        observation += f" ({wrong} of {checked} stale ones that it compared with the checkpoint that sampled them)"
    if share > config.abort:
        raise TrainingError(
            f"{observation}: more than the allowed share of {config.abort}, so nothing was trained. "
            f"{_describe_masked(verdict, config)}. {_advise(gate, verdict)}"
        )
    if verdict.is_shifted and config.abort < 1:
        raise TrainingError(f"{_describe_shift(verdict)}, so nothing was trained. {_advise(gate, verdict)}")
    if verdict.is_shifted:
        _log.warning("%s. %s", _describe_shift(verdict), _advise(gate, verdict))
    if share > config.alarm:
        detail, advice = _describe_masked(verdict, config), _advise(gate, verdict)
        _log.warning("%s; they were left out of this step. %s. %s", observation, detail, advice)


def _describe_masked(verdict: Verdict, config: MismatchConfig) -> str:
    """The rollout furthest outside of its bounds, the tokens outside of theirs, and the noise."""
    texts = []
    off = verdict.seen & ((verdict.means < verdict.low) | (verdict.means > verdict.high))
    if off.any():
        excess = np.where(off, verdict.means / np.where(verdict.means < 0, verdict.low, verdict.high), 0.0)
        worst = int(excess.argmax())
        texts.append(
            f"In {int(off.sum())} the mean of log(policy / sampler) is outside of its bounds: at the worst "
            f"{verdict.means[worst]:.3g} nats per token over {verdict.counts[worst]:.0f} tokens, where "
            f"{verdict.low[worst]:.3g} to {verdict.high[worst]:.3g} is allowed"
        )
    if num_outliers := int((verdict.has_outlier & verdict.seen).sum()):
        texts.append(
            f"in {num_outliers} a single token has a ratio outside of [{config.token_low:g}, {config.token_high:g}]"
        )
    return "; ".join(texts) or "None of them is in the last mini-batch"


def _describe_shift(verdict: Verdict) -> str:
    return (
        f"over {int(verdict.shifted.sum())} rollouts ({verdict.counts[verdict.shifted].sum():.0f} tokens) the mean of "
        f"log(policy / sampler) "
        f"is {verdict.shift:.3g} nats per token, at most {verdict.largest_shift:.3g} either way is allowed: the "
        "sampler is not the policy that is trained"
    )


def _advise(gate: Gate, verdict: Verdict) -> str:
    measured = "was not measured" if verdict.measured is None else f"is {verdict.measured:.3g} nats per token"
    noise = (
        f"The noise of this step {measured}; the bounds allow for {verdict.noise:.3g}, at most {gate.noise.most:g} "
        f"({gate.noise})"
    )
    advice = f"{noise}. {_CAUSES}"
    if gate.drift is None and (num_stale := int((gate.ages > 0).sum())):
        advice += f". {num_stale} of the rollouts are up to {gate.ages.max():.0f} steps old. {_UNKNOWN}"
    return advice + (f". {_MIXTURE}" if gate.noise.is_mixture else "")
