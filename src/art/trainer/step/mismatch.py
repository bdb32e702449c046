"""The mismatch gate: samples are not trained on if the trained policy did not produce them.

Sampler and trainer should give a sampled token the same probability. Per sample, the geometric mean of pi / mu over its
targets measures their disagreement independently of length (a product would grow with it). A sample is also masked if a
single token differs too much. So a wrong adapter, temperature or tokenisation is noticed before it does harm.

The default bounds are those that SkyRL recommends for dense models.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from art.config import MismatchConfig
from art.errors import TrainingError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Correction:
    factors: Tensor  # [N] factor of each target's loss
    masked_samples: Tensor  # [S] booleans
    num_truncated: int


def correct_mismatch(log_ratio: Tensor, samples: Tensor, num_samples: int, config: MismatchConfig) -> Correction:
    """Compute the masks and truncated importance weights of N targets.

    `log_ratio` [N] is the log-prob of each target under the policy at the step's start minus that of its sampler,
    `samples` [N] the index of its sample.
    """
    masked = find_mismatched(log_ratio, samples, num_samples, config)
    factors = (~masked[samples]).float()
    ratio = log_ratio.exp()
    if config.mask_token_low is not None:
        factors = factors * (ratio >= config.mask_token_low)
    if config.mask_token_high is not None:
        factors = factors * (ratio <= config.mask_token_high)
    if config.truncate is None:
        return Correction(factors, masked, 0)
    return Correction(
        factors * ratio.clamp(max=config.truncate), masked, int(((ratio > config.truncate) & (factors > 0)).sum())
    )


def find_mismatched(log_ratio: Tensor, samples: Tensor, num_samples: int, config: MismatchConfig) -> Tensor:
    """Find samples whose probabilities differ too much between trainer and sampler: [num_samples] booleans.

    `log_ratio` [N] is policy minus sampling log-prob of each target, `samples` [N] the index of its sample. A sample
    without targets gets False.
    """
    zeros = log_ratio.new_zeros(num_samples)
    counts = zeros.index_add(0, samples, torch.ones_like(log_ratio))
    ratio = (zeros.index_add(0, samples, log_ratio) / counts.clamp(min=1)).exp()
    token_ratio = log_ratio.exp()
    outlier = (token_ratio < config.token_low) | (token_ratio > config.token_high)
    has_outlier = zeros.index_add(0, samples, outlier.to(zeros.dtype)) > 0
    return (ratio < config.low) | (ratio > config.high) | has_outlier


def judge_mismatch(num_masked: int, num_samples: int, config: MismatchConfig) -> float:
    """Return the share of samples that the mismatch gate masks. Log a warning if it is above `config.alarm`.

    Raises:
        TrainingError: the share is above `config.abort`.
    """
    share = num_masked / max(num_samples, 1)
    observation = (
        f"{num_masked} of {num_samples} samples have sampling log-probs that the trainer does not reproduce (geometric "
        f"mean of the ratio outside [{config.low}, {config.high}], or a token outside [{config.token_low}, "
        f"{config.token_high}])"
    )
    if share > config.abort:
        raise TrainingError(
            f"{observation}: more than the allowed share of {config.abort}, so nothing was trained. The usual causes "
            "are samples of another or an older policy, a different temperature, top_p below 1, or changed tokens"
        )
    if share > config.alarm:
        _log.warning("%s; they were left out of this step", observation)
    return share
