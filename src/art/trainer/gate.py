"""The mismatch gate: which rollouts of an update come from the policy that is trained.

How much do the log-probs of two correct implementations of one policy differ? The unit is nats per token, root mean
square. Where that is s, the mean log-ratio of sampled tokens is about -s^2 / 2, because minus the mean is the KL
divergence of the two distributions.

    float32     1e-6 between trainer and embedded engine; with TF32 matrix products about 1e-3
    bfloat16    0.032 for layers of a 4B model; a KL of 0.001, which is usual for vLLM, is 0.045
    mixtures    a KL of 0.0015 for Qwen3-30B-A3B in bfloat16, with single tokens that differ by whole nats, where
                engine and trainer choose experts independently (prime-rl, pull request 2808; arXiv 2510.11370)

In float32 these differ by a factor of 1,000, so the handshake decides: how well the engine reproduced the probe.

For a rollout of n tokens, m is the mean of log pi - log mu, with pi the policy at the start of the step and mu the
sampler. It scatters by s / sqrt(n) around a shift of about -s^2 / 2. A rollout is left out if

    |m| > shift + 5 s / sqrt(n)     shift = max(0.001, s^2)

or if a single token is too far off. s is the noise that this update shows, but at least the usual noise of the number
types and at most the largest that they explain (`Noise`): samples that are all wrong cannot excuse themselves. Five
standard deviations keep false alarms below 0.5 % for noise with heavy tails and for neighbouring tokens whose errors
are alike, see `benchmarks/gate.py`.

The policy has moved since an older one sampled a rollout. The trainer compares a few of these *stale* rollouts with the
checkpoints that sampled them (`step/plans.py`). These are judged like the others, with the log-probs of that
checkpoint as log pi. A stale rollout that was not compared is not left out: what is unusual about it is how far the
policy has moved, and the loss bounds what old tokens can do. But if some of those that were compared are wrong, as many
of the others are suspected, and the step may stop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from art.config import MismatchConfig
from art.config.losses import MASKED_ALARM
from art.errors import TrainingError
from art.protocol.calls import QUANTIZED
from art.trainer.tree import SAMPLER, SamplePath

BoolArray = NDArray[np.bool_]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatioSums:
    """Log-ratios (log pi - log mu of sampled tokens) of the R rollouts of an update, as sums. All arrays are [R].

    Branches of a rollout may lie in different micro-batches, on different processes. Each adds its part, so the
    judgement does not depend on how an update was cut.
    """

    counts: Array
    """Number of tokens; 0 for a rollout that was not seen."""
    totals: Array
    squares: Array
    """Sum of the squares, each cut at the square of `limit`."""
    lowest: Array
    """Smallest log-ratio of a token, at most 0."""
    highest: Array
    """Largest log-ratio of a token, at least 0."""

    @classmethod
    def collect(cls, log_ratio: Array, rollouts: NDArray[np.int64], num_rollouts: int, *, limit: float) -> LogRatioSums:
        """Sum up the log-ratios [N] of tokens of the rollouts with the indices `rollouts` [N].

        `limit`: a token that is further off counts as this far off in `squares`, so that a few do not decide.
        """
        squares = np.minimum(np.abs(log_ratio), limit) ** 2
        lowest, highest = np.zeros(num_rollouts), np.zeros(num_rollouts)
        np.minimum.at(lowest, rollouts, log_ratio)
        np.maximum.at(highest, rollouts, log_ratio)
        return cls(
            counts=np.bincount(rollouts, minlength=num_rollouts).astype(np.float64),
            totals=np.bincount(rollouts, log_ratio, minlength=num_rollouts).astype(np.float64),
            squares=np.bincount(rollouts, squares, minlength=num_rollouts).astype(np.float64),
            lowest=lowest,
            highest=highest,
        )

    def __add__(self, other: LogRatioSums) -> LogRatioSums:
        return LogRatioSums(
            counts=self.counts + other.counts,
            totals=self.totals + other.totals,
            squares=self.squares + other.squares,
            lowest=np.minimum(self.lowest, other.lowest),
            highest=np.maximum(self.highest, other.highest),
        )


_BOUNDS = {"float32": (0.005, 0.02), "bfloat16": (0.05, 0.1), QUANTIZED: (0.1, 0.2)}
"""Usual and largest noise by number type, the finest type first."""
_LEAST = 1e-4
"""Usual noise in float32 where the handshake measured less: 20 times the largest difference of one token that 25,000
tokens of five model families showed at temperature 1."""
_OVER_PROBE = 10.0
"""Usual noise in float32 over what the handshake measured: a probe is short, and adapters and prompts differ."""
_MIXTURE = 2.0
"""Factor for a mixture of experts: rounding changes which experts compute a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of log-ratios that rounding explains, in nats per token (root mean square)."""

    trainer: str = "float32"
    engine: str = "float32"
    is_mixture: bool = False
    probe_gap: float | None = None
    """Largest difference, in nats, that the handshake measured between the two; `None` if it is unknown."""

    @property
    def usual(self) -> float:
        """Noise that is always allowed for."""
        return self.bounds[0]

    @property
    def most(self) -> float:
        """Largest noise that rounding explains. What a step shows beyond it widens no bound."""
        return self.bounds[1]

    @property
    def bounds(self) -> tuple[float, float]:
        factor = _MIXTURE if self.is_mixture else 1.0
        usual, most = max(_BOUNDS.get(name, _BOUNDS["bfloat16"]) for name in (self.trainer, self.engine))
        if self.probe_gap is not None and (usual, most) == _BOUNDS["float32"] and not self.is_mixture:
            learnt = min(usual, max(_LEAST, _OVER_PROBE * self.probe_gap))
            usual, most = learnt, learnt * most / usual
        return factor * usual, factor * most

    def __str__(self) -> str:
        kinds = f"trainer in {self.trainer}, engine in {self.engine}"
        return f"{kinds}, mixture of experts" if self.is_mixture else kinds


def is_mixture(config: Any) -> bool:
    """Whether a transformers config describes a mixture of experts."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


_DEVIATIONS = 5.0
"""Standard deviations of a rollout's mean that noise may explain."""
_LEAST_SHIFT = 1e-3
"""Shift of the mean that is allowed in every number type, in nats per token."""
_CUT = 3.0
"""A token counts in the noise with at most this many times the largest noise."""
_ENOUGH_ROLLOUTS = 16
"""Number of rollouts from which on the scatter of their means is an estimate of the noise too."""
_NORMAL_SPREAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """What the gate found out about the R rollouts of an update. Arrays are [R]."""

    masked: BoolArray
    checked: BoolArray
    """Stale rollouts that were compared with the checkpoint that sampled them."""
    num_suspected: float
    """Number of other stale rollouts to expect wrong, if they are wrong as often as the checked ones."""
    seen: BoolArray
    """Whether the rollout has reinforcement-learning targets."""
    means: Array
    """Mean log-ratio of the rollout, in nats per token."""
    counts: Array
    low: Array
    high: Array
    """Bounds of `means`; infinite where a rollout is not judged."""
    has_outlier: BoolArray
    measured: float | None
    """Noise of the tokens that the policy itself sampled, in nats (root mean square); `None` if there are none."""
    noise: float
    """Noise that the bounds allow for."""
    exact: BoolArray
    """Rollouts that were judged under the policy that sampled them."""
    shift: float
    """Mean over the exact rollouts of `means`, each cut at its bounds."""
    largest_shift: float
    """Bound of `shift`; infinite with bounds that the user set."""

    @property
    def num_masked(self) -> int:
        return int(self.masked.sum())

    @property
    def num_judged(self) -> int:
        return int(self.seen.sum())

    @property
    def is_shifted(self) -> bool:
        """Whether the rollouts together come from another policy, even if each alone could be chance."""
        return abs(self.shift) > self.largest_shift


@dataclass(frozen=True, slots=True)
class Gate:
    """The mismatch gate of one update. `Gate.over` makes it."""

    config: MismatchConfig
    noise: Noise
    rollouts: dict[str, int]
    """Index of each rollout by its id."""
    stale: BoolArray  # [R]
    """Whether an older policy sampled a token of the rollout."""
    compared: BoolArray  # [R]
    """Whether all tokens that an older policy sampled are compared with the checkpoint that sampled them."""

    @classmethod
    def over(cls, paths: Sequence[SamplePath], config: MismatchConfig, noise: Noise, *, step: int) -> Gate:
        """Make the gate of an update of `paths` in a training step that starts from checkpoint `step`."""
        rl = [path for path in paths if path.sample.component == "rl"]
        rollouts = {name: index for index, name in enumerate(dict.fromkeys(path.sample.rollout_id for path in rl))}
        stale, compared = np.zeros(len(rollouts), dtype=np.bool_), np.ones(len(rollouts), dtype=np.bool_)
        for path in rl:
            index, old = rollouts[path.sample.rollout_id], path.policy_versions < step
            stale[index] |= old.any()
            sampler = path.streams.get(SAMPLER)
            compared[index] &= not old.any() if sampler is None else not np.isnan(sampler[old]).any()
        return cls(config, noise, rollouts, stale, compared)

    @property
    def is_exact(self) -> BoolArray:  # [R]
        """Whether a rollout is compared with the policy that sampled it, so that only noise may be between the two."""
        is_exact: BoolArray = ~self.stale | self.compared
        return is_exact

    def collect(self, paths: Sequence[SamplePath], log_ratio: NDArray[np.float32]) -> LogRatioSums:
        """Sum up the log-ratios [N] of the targets of `paths`, in their order. Only component "rl" counts."""
        index = self.rollouts_of(paths)
        ratios = log_ratio[index >= 0].astype(np.float64)
        return LogRatioSums.collect(ratios, index[index >= 0], len(self.rollouts), limit=self.limit)

    @property
    def limit(self) -> float:
        """Largest log-ratio that counts in full when the noise of an update is measured."""
        return _CUT * self.noise.most

    def rollouts_of(self, paths: Sequence[SamplePath]) -> NDArray[np.int64]:
        """Return the index [N] of the rollout of each target of `paths`; -1 where its component is not "rl"."""
        samples = [path.sample for path in paths]
        indices = [self.rollouts[one.rollout_id] if one.component == "rl" else -1 for one in samples]
        return np.repeat(np.asarray(indices, dtype=np.int64), [len(path.query_positions) for path in paths])

    def judge(self, sums: LogRatioSums) -> GateVerdict:
        """Compare the rollouts with the bounds. A rollout without tokens in `sums` is not masked."""
        config, counts = self.config, np.maximum(sums.counts, 1.0)
        seen, means = sums.counts > 0, sums.totals / counts
        measured, noise = self._measure(sums, means)
        shift_allowed = max(_LEAST_SHIFT, noise**2)
        allowed = np.where(self.is_exact, shift_allowed + _DEVIATIONS * noise / np.sqrt(counts), np.inf)
        low, high = -allowed, allowed
        if config.rollouts is not None:
            low, high = (np.full_like(allowed, math.log(bound)) for bound in config.rollouts)
        lowest, highest = map(math.log, config.tokens)
        has_outlier = (sums.lowest < lowest) | (sums.highest > highest)
        if config.has_default_bounds:
            has_outlier &= self.is_exact
        masked = seen & ((means < low) | (means > high) | has_outlier)
        # All exact rollouts together: their mean scatters less than that of each.
        exact = seen & self.is_exact
        num_exact = max(int(exact.sum()), 1)
        shift = float(np.clip(means, low, high)[exact].sum() / num_exact)
        largest_shift = math.inf
        if exact.any() and config.rollouts is None:
            largest_shift = shift_allowed + _DEVIATIONS * noise * math.sqrt((1 / counts[exact]).sum()) / num_exact
        checked = exact & self.stale
        unknown = seen & ~self.is_exact & ~masked
        return GateVerdict(
            masked=masked,
            checked=checked,
            num_suspected=int(unknown.sum()) * float(masked[checked].mean()) if checked.any() else 0.0,
            seen=seen,
            means=means,
            counts=sums.counts,
            low=low,
            high=high,
            has_outlier=has_outlier,
            measured=measured,
            noise=noise,
            exact=exact,
            shift=shift,
            largest_shift=largest_shift,
        )

    def _measure(self, sums: LogRatioSums, means: Array) -> tuple[float | None, float]:
        """Return the noise of the update, in nats, and the noise to allow for."""
        exact = (sums.counts > 0) & self.is_exact
        if not exact.any():
            return None, self.noise.usual
        counts = sums.counts[exact]
        measured = math.sqrt(sums.squares[exact].sum() / counts.sum())
        scatter = 0.0
        if len(counts) >= _ENOUGH_ROLLOUTS:  # larger than `measured` where errors of neighbouring tokens are alike
            center = np.median(means[exact])
            scatter = _NORMAL_SPREAD * float(np.median(np.sqrt(counts) * np.abs(means[exact] - center)))
        return measured, min(max(measured, scatter, self.noise.usual), self.noise.most)


@dataclass(frozen=True, slots=True)
class Correction:
    """What the gate does to the losses of N targets."""

    factors: Tensor  # [N]
    truncated: Tensor  # [N] booleans: the importance weight was cut
    masked_rollouts: Tensor  # [N] booleans: the target's rollout is left out


def correct(log_ratio: Tensor, is_masked: Tensor, config: MismatchConfig) -> Correction:
    """Compute the masks and truncated importance weights of N targets.

    Args:
        log_ratio: [N] log-prob of each target under the policy at the step's start minus that of its sampler.
        is_masked: [N] whether the target's rollout is left out.
    """
    factors = (~is_masked).float()
    ratio = log_ratio.exp()
    if config.mask_tokens is not None:
        low, high = config.mask_tokens
        factors = factors * ((ratio >= low) & (ratio <= high))
    if config.truncate is None:
        return Correction(factors, torch.zeros_like(is_masked), is_masked)
    truncated = (ratio > config.truncate) & (factors > 0)
    return Correction(factors * torch.clamp(ratio, max=config.truncate), truncated, is_masked)


_log = logging.getLogger(__name__)

_CAUSES = (
    "Check whether the samples come from another or an older policy, from another temperature, from top_p below 1, or "
    "have changed tokens, and whether the engine applies the adapter"
)
_MIXTURE_ADVICE = (
    "The base model is a mixture of experts: engine and trainer each choose the experts of a token (there is no router "
    "replay), and rounding can change the choice. The bounds are already twice as wide as those of a dense model. If "
    'the samples do come from this policy, set dtype "float32" for engine and trainer, mask single tokens with '
    "`mask_tokens=(0.5, 2)`, set wider `rollouts` and `tokens` of `mismatch`, or train a dense model"
)


def check_verdict(gate: Gate, verdict: GateVerdict, *, num_masked: int, num_judged: int) -> None:
    """Log a warning if the share of masked rollouts is above `MASKED_ALARM`, or if all rollouts together are shifted.

    `num_masked` and `num_judged` count the rollouts of the step so far, including those of `verdict`. A share above
    `abort` is a `TrainingError`; a shift of all rollouts counts as a share of 1.
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
    if share > MASKED_ALARM:
        detail, advice = _describe_masked(verdict, config), _advise(gate, verdict)
        _log.warning("%s; they were left out of this step. %s. %s", observation, detail, advice)


def _describe_masked(verdict: GateVerdict, config: MismatchConfig) -> str:
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
            f"in {num_outliers} a single token has a ratio outside of [{config.tokens[0]:g}, {config.tokens[1]:g}]"
        )
    return "; ".join(texts) or "None of them is in the last mini-batch"


def _describe_shift(verdict: GateVerdict) -> str:
    num_tokens = verdict.counts[verdict.exact].sum()
    return (
        f"over {int(verdict.exact.sum())} rollouts ({num_tokens:.0f} tokens) the mean of log(policy / sampler) is "
        f"{verdict.shift:.3g} nats per token, at most {verdict.largest_shift:.3g} either way is allowed: the sampler "
        "is not the policy that is trained"
    )


def _advise(gate: Gate, verdict: GateVerdict) -> str:
    measured = "was not measured" if verdict.measured is None else f"is {verdict.measured:.3g} nats per token"
    noise = (
        f"The noise of this step {measured}; the bounds allow for {verdict.noise:.3g}, at most {gate.noise.most:g} "
        f"({gate.noise})"
    )
    return f"{noise}. {_CAUSES}" + (f". {_MIXTURE_ADVICE}" if gate.noise.is_mixture else "")
