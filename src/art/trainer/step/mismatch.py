"""The gate between sampler and trainer: samples that the trained policy did not really produce are not learnt from.

Both processes should give a sampled token the same probability. Per sample, the geometric mean of pi / mu over its
targets tells how far they disagree, whatever its length (a product would punish long samples); a single token far off
masks its sample too. A wrong adapter, wrong temperature or wrong tokenisation shows here before it does harm.

The bounds are those that SkyRL recommends for dense models.
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
    factors: Tensor  # [N] what each target's loss is multiplied with
    masked_samples: Tensor  # [S] booleans
    num_truncated: int


def correct_mismatch(log_ratio: Tensor, samples: Tensor, num_samples: int, config: MismatchConfig) -> Correction:
    """Masks and truncated importance weights of N targets.

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
    """Which samples disagree: [num_samples] booleans; one without targets does not.

    `log_ratio` [N] is policy minus sampling log-prob of each target, `samples` [N] the index of its sample.
    """
    zeros = log_ratio.new_zeros(num_samples)
    counts = zeros.index_add(0, samples, torch.ones_like(log_ratio))
    ratio = (zeros.index_add(0, samples, log_ratio) / counts.clamp(min=1)).exp()
    token_ratio = log_ratio.exp()
    outlier = (token_ratio < config.token_low) | (token_ratio > config.token_high)
    has_outlier = zeros.index_add(0, samples, outlier.to(zeros.dtype)) > 0
    return (ratio < config.low) | (ratio > config.high) | has_outlier


def judge_mismatch(num_masked: int, num_samples: int, config: MismatchConfig) -> float:
    """The share of masked samples, with a warning above `config.alarm`.

    Raises:
        TrainingError: the share is above `config.abort`.
    """
    share = num_masked / max(num_samples, 1)
    found = (
        f"{num_masked} of {num_samples} samples have sampling log-probs that the trainer does not reproduce (geometric "
        f"mean of the ratio outside [{config.low}, {config.high}], or a token outside [{config.token_low}, "
        f"{config.token_high}])"
    )
    if share > config.abort:
        raise TrainingError(
            f"{found}: more than the allowed share of {config.abort}, so nothing was trained. The usual causes are "
            "samples of another or an older policy, a different sampling temperature, top_p below 1, or changed tokens"
        )
    if share > config.alarm:
        _log.warning("%s; they were left out of this step", found)
    return share
