"""One optimiser update: forward and backward over its micro-batches. Reinforcement learning and SFT alike.

    L = L_rl / N_rl + L_sft / N_sft

where each sum runs over the targets of a component, weighted, and each N is the sum of those weights over the *whole*
update. The denominator is known before the first micro-batch runs, so the gradient does not depend on how the update
was cut into micro-batches, and a short sample's token counts as much as a long one's. Targets that a loss or the gate
masks stay in N: leaving tokens out must not make the others louder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from art.config import LossConfig, MismatchConfig
from art.errors import TrainingError
from art.trainer.attention import TreeLayout, make_layout
from art.trainer.logprobs import TargetRows, group_by_row, target_logprobs
from art.trainer.lora import LoraPolicy
from art.trainer.losses import rl_loss, sft_loss
from art.trainer.metrics import StepRecord, record_targets
from art.trainer.mismatch import find_mismatched, judge_mismatch
from art.trainer.pack import pack
from art.trainer.tree import FloatArray, SamplePath, Targets, build_tree


@dataclass(frozen=True, slots=True)
class MicroBatch:
    layout: TreeLayout
    targets: Targets
    rows: TargetRows
    num_samples: int
    scales: FloatArray  # [N] what a target's loss is multiplied with: weight / N of its component


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimiser update is made of."""

    paths: list[SamplePath]
    learning_rate: float
    loss: LossConfig | None
    """Of the "rl" samples."""
    mismatch: MismatchConfig | None


def split_micro_batches(paths: list[SamplePath], policy: LoraPolicy, *, max_tokens: int) -> list[MicroBatch]:
    """The micro-batches of one update, on the policy's device."""
    totals = {False: 0.0, True: 0.0}  # weight of the targets, by "is SFT"
    for path in paths:
        totals[path.sample.component == "sft"] += path.sample.weight * len(path.query_positions)
    micro_batches = []
    for indices in pack(paths, max_tokens=max_tokens):
        tree = build_tree([paths[index] for index in indices])
        targets = tree.targets
        totals_of = np.where(targets.is_sft, totals[True], totals[False])
        micro_batches.append(
            MicroBatch(
                layout=make_layout(tree, device=policy.base.device),
                targets=targets,
                rows=group_by_row(targets, policy.base.device),
                num_samples=len(indices),
                scales=(targets.weights / totals_of).astype(np.float32),
            )
        )
    return micro_batches


def compute_gradient(
    policy: LoraPolicy, update: Update, micro_batches: list[MicroBatch], record: StepRecord, tick: Callable[[], None]
) -> None:
    """Leave the gradient of the update's loss in `policy.grads`; fill `record`; `tick` after every micro-batch.

    Raises:
        TrainingError: the loss is not finite, or too many samples do not come from this policy.
    """
    loss = 0.0
    with policy.accumulate_gradients():
        for micro_batch in micro_batches:
            loss += _backward(policy, update, micro_batch, record)
            if not math.isfinite(loss):
                raise TrainingError(
                    "the loss is not finite, so nothing was trained; look at the learning rate, the rewards and the "
                    "sampling log-probs of this step"
                )
            tick()
    if update.mismatch is not None:
        judge_mismatch(record.num_mismatched, record.num_gated, update.mismatch)
    record.losses.append(loss)


def _backward(policy: LoraPolicy, update: Update, micro_batch: MicroBatch, record: StepRecord) -> float:
    """Forward and backward of one micro-batch; returns its share of the loss."""
    targets, rows = micro_batch.targets, micro_batch.rows
    hidden = policy.hidden_states(micro_batch.layout)
    by_row, entropy = target_logprobs(hidden, policy.base.head, rows)
    # The few numbers per target are worked on by the CPU, in the targets' own order.
    order = rows.order.cpu()
    logprobs = torch.empty_like(by_row, device="cpu").index_copy(0, order, by_row.cpu())
    scales = torch.from_numpy(micro_batch.scales)
    if update.mismatch is not None:
        scales = scales * _gate(logprobs.detach(), micro_batch, update.mismatch, record)
    losses, masked = _target_losses(logprobs, targets, update.loss)
    total = torch.dot(losses, scales)
    total.backward()
    target_entropy = torch.empty(len(order)).index_copy_(0, order, entropy.index_select(0, rows.rows).cpu())
    loss = float(total.detach())
    record.micro_batches.append(
        record_targets(targets, logprobs.detach().numpy(), target_entropy.numpy(), masked.numpy(), loss)
    )
    record.num_tree_tokens += len(micro_batch.layout.token_ids)
    return loss


def _target_losses(logprobs: Tensor, targets: Targets, loss: LossConfig | None) -> tuple[Tensor, Tensor]:
    """Loss [N] of every target by its component, and which of them were masked [N]."""
    is_sft = torch.from_numpy(targets.is_sft)
    plain = sft_loss(logprobs)
    if loss is None:
        return plain.values, plain.masked
    sampling, advantages = torch.from_numpy(targets.sampling_logprobs), torch.from_numpy(targets.advantages)
    reinforced = rl_loss(logprobs, sampling, advantages, loss)
    if not targets.is_sft.any():
        return reinforced.values, reinforced.masked
    # Both losses are finite everywhere, so the branch not taken sends back zeros.
    return torch.where(is_sft, plain.values, reinforced.values), ~is_sft & reinforced.masked


def _gate(logprobs: Tensor, micro_batch: MicroBatch, config: MismatchConfig, record: StepRecord) -> Tensor:
    """[N] ones, and zeros for the targets of reinforcement-learning samples that this policy did not produce."""
    targets = micro_batch.targets
    is_sft = torch.from_numpy(targets.is_sft)
    samples = torch.from_numpy(targets.samples)
    log_ratio = torch.where(is_sft, 0.0, logprobs - torch.from_numpy(targets.sampling_logprobs))
    mismatched = find_mismatched(log_ratio, samples, micro_batch.num_samples, config)
    record.num_gated += len(np.unique(targets.samples[~targets.is_sft]))
    record.num_mismatched += int(mismatched.sum())
    record.num_mismatched_targets += int(mismatched[samples].sum())
    return (~mismatched[samples]).float()
