"""Judge which rollouts of an update come from the trained policy.

For a rollout of n tokens, m is the mean of log pi - log mu, with pi the policy at the start of the step and mu the
sampler. Two correct implementations differ by noise of s nats per token, so that m scatters by s / sqrt(n) around a
shift of about -s^2 / 2. A rollout is left out if

    |m| > shift + 5 s / sqrt(n)     shift = max(0.001, s^2)

or if a single token is too far off. s is the noise that this update shows, but at least the usual noise of the number
types and at most the largest that they explain (`noise.py`): samples that are all wrong cannot excuse themselves.
The policy may have moved since an older policy sampled a rollout. Its bounds therefore allow a KL divergence of 0.01.

Five standard deviations keep false alarms below 0.5 % for noise with heavy tails and for neighbouring tokens whose
errors are alike, see `benchmarks/gate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from art.config import MismatchConfig
from art.trainer.gate.evidence import Array, BoolArray, Evidence, find_repeats
from art.trainer.gate.noise import Noise
from art.trainer.tree.tree import SamplePath

_DEVIATIONS = 5.0
"""Standard deviations of a rollout's mean that noise may explain."""
_LEAST_SHIFT = 1e-3
"""Shift of the mean that is allowed in every number type, in nats per token."""
_STALE_KL = 0.01
"""KL divergence, in nats per token, by which the policy may have moved since an older one sampled: training is stable
below it (Tinker's documentation), and SkyRL masks beyond it in asynchronous training (geometric mean 0.99 to 1.01)."""
_CUT = 3.0
"""A token counts in the noise with at most this many times the largest noise."""
_ENOUGH_ROLLOUTS = 16
"""Number of rollouts from which on the scatter of their means is an estimate of the noise too."""
_NORMAL_SPREAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate found out about the R rollouts of an update. Arrays are [R]."""

    masked: BoolArray
    seen: BoolArray
    """Whether the rollout has reinforcement-learning targets."""
    means: Array
    """Mean log-ratio of the rollout, in nats per token."""
    counts: Array
    low: Array
    high: Array
    """Bounds of `means`."""
    has_outlier: BoolArray
    measured: float | None
    """Noise of the tokens that the policy itself sampled, in nats (root mean square); `None` if there are none."""
    noise: float
    """Noise that the bounds allow for."""
    shift: float
    """Mean over rollouts of `means`, each cut at its bounds."""
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
    is_stale: BoolArray  # [R]
    """Whether an older policy sampled a token of the rollout."""
    repeats: dict[str, BoolArray] = field(default_factory=dict)
    """Targets that count for an earlier branch, by sample id."""

    @classmethod
    def over(cls, paths: Sequence[SamplePath], config: MismatchConfig, noise: Noise, *, step: int) -> Gate:
        """Make the gate of an update of `paths` in a training step that starts from checkpoint `step`."""
        rl = [path for path in paths if path.sample.component == "rl"]
        rollouts = {name: index for index, name in enumerate(dict.fromkeys(path.sample.rollout_id for path in rl))}
        is_stale = np.zeros(len(rollouts), dtype=np.bool_)
        for path in rl:
            is_stale[rollouts[path.sample.rollout_id]] |= path.sample.policy_version < step
        return cls(config, noise, rollouts, is_stale, find_repeats(rl))

    def collect(self, paths: Sequence[SamplePath], log_ratio: NDArray[np.float32]) -> Evidence:
        """Sum up the log-ratios [N] of the targets of `paths`, in their order. Only component "rl" counts."""
        index = self.rollouts_of(paths)
        counts = index >= 0
        if self.repeats:
            nothing = [np.zeros(len(path.query_positions), dtype=np.bool_) for path in paths]
            again = [self.repeats.get(path.sample.sample_id, none) for path, none in zip(paths, nothing, strict=True)]
            counts &= ~np.concatenate(again)
        return Evidence.collect(
            log_ratio[counts].astype(np.float64), index[counts], len(self.rollouts), limit=self.limit
        )

    @property
    def limit(self) -> float:
        """Largest log-ratio that counts in full when the noise of an update is measured."""
        return _CUT * self.noise.most

    def rollouts_of(self, paths: Sequence[SamplePath]) -> NDArray[np.int64]:
        """Return the index [N] of the rollout of each target of `paths`; -1 where its component is not "rl"."""
        is_rl = [path.sample.component == "rl" for path in paths]
        indices = [self.rollouts[path.sample.rollout_id] if rl else -1 for path, rl in zip(paths, is_rl, strict=True)]
        return np.repeat(np.asarray(indices, dtype=np.int64), [len(path.query_positions) for path in paths])

    def judge(self, evidence: Evidence) -> Verdict:
        """Compare the rollouts with the bounds. A rollout without tokens in `evidence` is not masked."""
        config, counts = self.config, np.maximum(evidence.counts, 1.0)
        seen, means = evidence.counts > 0, evidence.totals / counts
        measured, noise = self._measure(evidence, means)
        shift = max(_LEAST_SHIFT, noise**2)
        shifts = np.where(self.is_stale, max(shift, _STALE_KL), shift)
        # A policy that has moved by a KL divergence of k differs by sqrt(2 k) per token.
        spread = np.where(self.is_stale, math.hypot(noise, math.sqrt(2 * _STALE_KL)), noise) / np.sqrt(counts)
        allowed = shifts + _DEVIATIONS * spread
        low = -allowed if config.low is None else np.full_like(allowed, math.log(config.low))
        high = allowed if config.high is None else np.full_like(allowed, math.log(config.high))
        has_outlier = (evidence.lowest < math.log(config.token_low)) | (evidence.highest > math.log(config.token_high))
        num = max(int(seen.sum()), 1)
        is_automatic = config.low is None and config.high is None
        return Verdict(
            masked=seen & ((means < low) | (means > high) | has_outlier),
            seen=seen,
            means=means,
            counts=evidence.counts,
            low=low,
            high=high,
            has_outlier=has_outlier,
            measured=measured,
            noise=noise,
            shift=float(np.clip(means, low, high)[seen].sum() / num),
            largest_shift=(
                float(shifts[seen].sum() / num + _DEVIATIONS * math.sqrt((spread[seen] ** 2).sum()) / num)
                if is_automatic
                else math.inf
            ),
        )

    def _measure(self, evidence: Evidence, means: Array) -> tuple[float | None, float]:
        """Return the noise of the update, in nats, and the noise to allow for."""
        fresh = (evidence.counts > 0) & ~self.is_stale
        if not fresh.any():
            return None, self.noise.usual
        counts = evidence.counts[fresh]
        measured = math.sqrt(evidence.squares[fresh].sum() / counts.sum())
        scatter = 0.0
        if len(counts) >= _ENOUGH_ROLLOUTS:  # larger than `measured` where errors of neighbouring tokens are alike
            center = np.median(means[fresh])
            scatter = _NORMAL_SPREAD * float(np.median(np.sqrt(counts) * np.abs(means[fresh] - center)))
        return measured, min(max(measured, scatter, self.noise.usual), self.noise.most)


@dataclass(frozen=True, slots=True)
class Correction:
    """What the gate does to the losses of N targets."""

    factors: Tensor  # [N]
    truncated: Tensor  # [N] booleans: the importance weight was cut
    masked_rollouts: Tensor  # [N] booleans: the target's rollout is left out

    @property
    def num_truncated(self) -> int:
        return int(self.truncated.sum())


def correct(log_ratio: Tensor, is_masked: Tensor, config: MismatchConfig) -> Correction:
    """Compute the masks and truncated importance weights of N targets.

    Args:
        log_ratio: [N] log-prob of each target under the policy at the step's start minus that of its sampler.
        is_masked: [N] whether the target's rollout is left out.
    """
    factors = (~is_masked).float()
    ratio = log_ratio.exp()
    if config.mask_token_low is not None:
        factors = factors * (ratio >= config.mask_token_low)
    if config.mask_token_high is not None:
        factors = factors * (ratio <= config.mask_token_high)
    if config.truncate is None:
        return Correction(factors, torch.zeros_like(is_masked), is_masked)
    truncated = (ratio > config.truncate) & (factors > 0)
    return Correction(factors * torch.clamp(ratio, max=config.truncate), truncated, is_masked)
