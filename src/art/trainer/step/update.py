"""Optimiser updates: forward and backward over micro-batches, then a change of the weights. RL and SFT alike.

    run_updates          every update of a step: gradient, then AdamW
      compute_gradient   one update: its micro-batches on all processes, the gate's judgement, the sum of gradients
        train_micro_batch   one forward and backward pass: log-probs, gate, losses

    L = L_rl / N_rl + L_sft / N_sft + L_observation / N_observation

where each L is the weighted sum of the losses of a component's targets, and each N is the sum of the samples' shares
over the *whole* update (by default the sum of the targets' weights). N is known before the first micro-batch runs, so
the gradient does not depend on how the update is cut into micro-batches, or on which processes run them. Targets that a
loss or the gate masks still count in N: masking tokens must not increase the weight of the others.

Where several processes train together, each holds AdamW's moments of its own part of the policy's flat vector, updates
that part, and sends it to the others (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054). Gradients are summed before,
so all parts are updated as one process would update them.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from art.config import EntropyConfig, LossConfig, OptimizerConfig
from art.errors import TrainingError
from art.storage.step_files import TokenReason
from art.trainer.distributed import ALONE, Team
from art.trainer.gate import BoolArray, Correction, Gate, check_verdict, correct
from art.trainer.logprobs import TargetRows, target_logprobs
from art.trainer.losses import LossInputs, LossOutput, term_loss, unclipped
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import (
    MicroBatch,
    MicroBatcher,
    StepProgress,
    count_idle_passes,
    idle_layout,
    run_fitting,
)
from art.trainer.step.record import GateView, MicroBatchRecord, StepRecord
from art.trainer.tensor_files import PIECE_BYTES, file_order, make_header, read_named, stream_tensor
from art.trainer.tree import ANCHOR, BASE, SAMPLED_BASE, SAMPLER, SamplePath, sum_shares

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Everything that determines one optimiser update: its samples (a mini-batch), learning rate and losses."""

    paths: list[SamplePath]
    learning_rate: float
    terms: tuple[LossConfig, ...] = ()
    """Losses of the "rl" samples. Their weighted sum is trained."""
    anchor: Literal["sampler", "step_start"] = "sampler"
    """Denominator of importance ratios: the sampler's probability, or the policy's at the start of the step. The latter
    is the stream `ANCHOR`, or without it (a single update) the current policy's."""
    mismatch: Gate | None = None
    masked: BoolArray | None = None  # [R]
    """Rollouts that the gate masks, by its index of them. `None`: each micro-batch judges by the tokens that its
    process has seen so far, and the update is computed again if a rollout is judged otherwise once all are known."""


def run_updates(
    policy: Policy,
    optimizer: Optimizer,
    updates: list[Update],
    config: OptimizerConfig,
    batcher: MicroBatcher,
    progress: StepProgress,
) -> StepRecord:
    """Change the weights by all of `updates`, one after the other. Return the measurements of the step."""
    record = StepRecord()
    batches = [batcher.split(update.paths) for update in updates]
    progress.expect(sum(map(len, batches)))
    for number, update in enumerate(updates):
        fitting = compute_gradient(policy, update, batches[number], record, progress, batcher.team)
        if fitting is not None:  # memory ran out: cut the remaining updates again, into smaller micro-batches
            batcher.shrink(fitting)
            batches[number + 1 :] = [batcher.split(later.paths) for later in updates[number + 1 :]]
        record.grad_norms.append(optimizer.update(update.learning_rate, config))
    return record


def compute_gradient(
    policy: Policy,
    update: Update,
    micro_batches: list[MicroBatch],
    record: StepRecord,
    progress: StepProgress | None = None,
    team: Team = ALONE,
) -> int | None:
    """Compute the gradient of an update's loss into `policy.grads`, and add its measurements to `record`.

    `micro_batches` are those of this process. Gradient, record and errors are those of all processes, on every process.
    Where memory runs out, a process starts again on smaller micro-batches of the same samples, which have the same
    gradient. All start again if the gate judges a rollout otherwise than a micro-batch did that held a part of it.

    Returns:
        The token limit of the micro-batches that fitted, the same on every process; `None` if memory did not run out.
    """
    num_idle = count_idle_passes(micro_batches, policy.base, team)

    def accumulate(update: Update, micro_batches: Iterator[MicroBatch]) -> tuple[float, StepRecord]:
        """Loss and record of this process. Its gradient is left in the policy."""
        loss, part = 0.0, StepRecord()
        with policy.accumulate_gradients():
            for micro_batch in micro_batches:
                loss += train_micro_batch(policy, update, micro_batch, part, number=len(record.losses))
                if progress is not None:
                    progress.tick()
            for _ in range(num_idle):
                (policy.hidden_states(idle_layout(policy.base.device)) * 0.0).sum().backward()
        return loss, part

    def run(update: Update) -> list[tuple[tuple[float, StepRecord], int | None]]:
        """Loss, record and the token limit that fitted, of each process."""
        gathered = team.gather(run_fitting(micro_batches, partial(accumulate, update), policy.base))
        if not math.isfinite(sum(loss for (loss, _), _ in gathered)):
            raise TrainingError(
                "the loss is not finite, so nothing was trained; look at the learning rate, the rewards and the "
                "sampling log-probs of this step"
            )
        return gathered

    gathered = run(update)
    if update.mismatch is not None:
        masked, was_known = _judge(update, update.mismatch, [part for (_, part), _ in gathered], record)
        if not was_known:
            _log.info("the gate judges rollouts otherwise now that it has seen all their branches: computing again")
            gathered += run(replace(update, masked=masked))
    last = gathered[-team.size :]  # the gradient is of the last pass over the samples; so are loss and record
    for (_, part), _ in last:  # counts are added, lists are joined
        for each in fields(StepRecord):
            setattr(record, each.name, getattr(record, each.name) + getattr(part, each.name))
    record.losses.append(sum(loss for (loss, _), _ in last))
    team.sum_gradients(policy.grads)
    return min((fitting for _, fitting in gathered if fitting is not None), default=None)


def train_micro_batch(
    policy: Policy, update: Update, micro_batch: MicroBatch, record: StepRecord, *, number: int
) -> float:
    """Run one micro-batch forward and backward, and add what it shows to `record`. Returns its part of the loss."""
    rows, targets, layout = micro_batch.rows, micro_batch.targets, micro_batch.layout
    hidden = policy.hidden_states(layout)
    needs_entropy = any(isinstance(term, EntropyConfig) for term in update.terms)
    by_row, entropy_by_row = target_logprobs(hidden, policy.base.head, rows, entropy_gradient=needs_entropy)
    # There are few numbers per target: the CPU handles them, in the order of the targets.
    logprobs, entropy = rows.spread(by_row), rows.spread(entropy_by_row.index_select(0, rows.rows))
    streams = {name: torch.from_numpy(values) for name, values in targets.streams.items()}
    sampling = torch.from_numpy(targets.sampling_logprobs)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        anchor_logprobs=sampling if update.anchor == "sampler" else streams.get(ANCHOR, logprobs.detach()),
        sampling_logprobs=sampling,
        entropy=entropy,
        advantages=torch.from_numpy(targets.advantages),
        samples=torch.from_numpy(targets.samples),
        num_samples=len(micro_batch.paths),
        streams=streams,
    )
    is_rl = torch.from_numpy(targets.is_rl)
    # Each target's loss counts with its weight, divided by the N of its component in the whole update.
    weights = (targets.weights / sum_shares(update.paths)[targets.components]).astype(np.float32)
    scales = torch.from_numpy(weights)
    correction = None if update.mismatch is None else _correct(inputs, micro_batch, update, update.mismatch, record)
    if correction is not None:
        scales = scales * correction.factors
    losses = _target_losses(inputs, update.terms, is_rl)
    total = torch.dot(losses.values, scales)
    for tensor in (logprobs, entropy):  # `find_reasons` reads their gradients
        if tensor.requires_grad:
            tensor.retain_grad()
    total.backward()
    unknown = np.full(len(logprobs), np.nan, dtype=np.float32)
    record.micro_batches.append(
        MicroBatchRecord(
            update=np.full(len(logprobs), number),
            policy_logprobs=logprobs.detach().numpy(),
            sampling_logprobs=targets.sampling_logprobs,
            advantages=targets.advantages,
            entropy=entropy.detach().numpy(),
            clipped_low=losses.clipped_low.numpy(),
            clipped_high=losses.clipped_high.numpy(),
            components=targets.components,
            base_logprobs=targets.streams.get(BASE, targets.streams.get(SAMPLED_BASE, unknown)),
            anchor_logprobs=inputs.anchor_logprobs.numpy(),
            ranks=np.repeat([path.rank for path in micro_batch.paths], np.bincount(targets.samples)),
            reasons=find_reasons(inputs, losses, correction, rows, is_rl),
        )
    )
    record.num_tree_tokens += layout.num_tokens
    return float(total.detach())


def _target_losses(inputs: LossInputs, terms: tuple[LossConfig, ...], is_rl: Tensor) -> LossOutput:
    """Loss of every target: the weighted sum of the terms for component "rl", else cross-entropy."""
    plain = unclipped(-inputs.policy_logprobs)
    if not terms or not bool(is_rl.any()):
        return plain
    rl = inputs.where(is_rl)
    parts = [(term.weight, term_loss(rl, term)) for term in terms]
    values = torch.stack([weight * part.values for weight, part in parts]).sum(0)
    low = torch.stack([part.clipped_low for _, part in parts]).any(0)
    high = torch.stack([part.clipped_high for _, part in parts]).any(0)
    places = (is_rl,)
    return LossOutput(
        plain.values.index_put(places, values),
        plain.clipped_low.index_put(places, low),
        plain.clipped_high.index_put(places, high),
    )


def _correct(inputs: LossInputs, micro_batch: MicroBatch, update: Update, gate: Gate, record: StepRecord) -> Correction:
    """Factors: 0 for targets that this policy did not produce, else the truncated ratio if configured, else 1."""
    is_rl = torch.from_numpy(micro_batch.targets.is_rl)
    start = inputs.streams.get(ANCHOR, inputs.policy_logprobs.detach())
    log_ratio = torch.where(is_rl, start - inputs.sampling_logprobs, 0.0)
    # Stale tokens that were compared with the checkpoint that sampled them are judged by that one's log-probs.
    judged = log_ratio
    if (sampler := inputs.streams.get(SAMPLER)) is not None:
        judged = torch.where(sampler.isnan(), log_ratio, sampler - inputs.sampling_logprobs)
    sums = gate.collect(micro_batch.paths, judged.numpy())
    rollouts = gate.rollouts_of(micro_batch.paths)  # [N], -1 for other components
    if update.masked is None:
        masked = gate.judge(sum((view.sums for view in record.gate_views), sums)).masked
    else:
        masked = update.masked
    is_here = np.isin(np.arange(len(masked)), rollouts)
    record.gate_views = [sum(record.gate_views, GateView(sums, is_here & masked, is_here & ~masked))]
    is_masked = torch.from_numpy(np.append(masked, False)[rollouts])  # index -1 is the last
    correction = correct(log_ratio, is_masked, gate.config)
    record.num_mismatched_targets += int((correction.factors == 0).sum())
    record.num_truncated_targets += int(correction.truncated.sum())
    return correction


def _judge(update: Update, gate: Gate, parts: list[StepRecord], record: StepRecord) -> tuple[BoolArray, bool]:
    """Judge the rollouts by all that the micro-batches saw of them, and count them in `record`.

    Returns:
        The rollouts to mask [R], and whether every micro-batch has masked exactly those.
    """
    views = [view for part in parts for view in part.gate_views]
    if not views:
        return np.zeros(len(gate.rollouts), dtype=np.bool_), True
    seen = reduce(GateView.__add__, views)
    verdict = gate.judge(seen.sums)
    masked = verdict.masked if update.masked is None else update.masked
    record.num_gated += verdict.num_judged
    record.num_mismatched += int((masked & verdict.seen).sum())
    if verdict.measured is not None:
        record.gate_noise.append((verdict.measured, gate.noise.most))
    check_verdict(gate, verdict, num_masked=record.num_mismatched, num_judged=record.num_gated)
    return masked, not (seen.kept & masked).any() and not (seen.masked & ~masked).any()


def find_reasons(
    inputs: LossInputs, losses: LossOutput, correction: Correction | None, rows: TargetRows, is_rl: Tensor
) -> NDArray[np.uint8]:
    """Return the `TokenReason` [N] of each target of a micro-batch, after its backward pass.

    A target was learnt if the loss has a gradient with respect to its log-prob or to its entropy: the same question for
    every loss, a user's own included. The rest tells why there is none, in the order in which it counts.

    Args:
        correction: what the mismatch gate did; `None` without a gate.
        is_rl: [N] targets of component "rl".
    """
    learnt = _has_gradient(inputs.policy_logprobs) | _has_gradient(inputs.entropy)
    bounded = losses.clipped_low | losses.clipped_high
    reasons = torch.full((len(learnt),), int(TokenReason.NO_GRADIENT), dtype=torch.uint8)
    steps: list[tuple[Tensor, TokenReason]] = [
        (learnt, TokenReason.TRAINED),
        (learnt & bounded, TokenReason.CAPPED),
        (~learnt & bounded, TokenReason.CLIPPED),
        (~learnt & is_rl & (inputs.advantages == 0), TokenReason.NO_ADVANTAGE),
    ]
    if correction is not None:
        steps.append((learnt & correction.truncated, TokenReason.TRUNCATED))
    if rows.num_forced:
        forced = torch.ones_like(learnt)
        forced[rows.order.cpu()] = False
        steps.append((forced, TokenReason.FORCED))
    if correction is not None:
        steps.append((correction.factors == 0, TokenReason.MISMATCHED_TOKEN))
        steps.append((correction.masked_rollouts, TokenReason.MISMATCHED_ROLLOUT))
    for chosen, reason in steps:
        reasons[chosen] = int(reason)
    result: NDArray[np.uint8] = reasons.numpy()
    return result


def _has_gradient(values: Tensor) -> Tensor:
    gradient = values.grad if values.requires_grad else None
    return torch.zeros(len(values), dtype=torch.bool) if gradient is None else gradient != 0


# -- the optimiser --

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Running means of the gradient and of its square, as torch names them."""
_ALIGNMENT = 256
"""The part of each process begins at a multiple of this, so that vector instructions round as in one process."""


class Optimizer:
    """AdamW, Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), on `policy.values`."""

    def __init__(self, policy: Policy, team: Team = ALONE) -> None:
        self._values, self._grads, self._team = policy.values, policy.grads, team
        self._like = {f"{moment}.{name}": tensor for moment in MOMENTS for name, tensor in policy.tensors.items()}
        """Names, shapes and number type of the moments in the file."""
        ends = list(accumulate(tensor.numel() for tensor in policy.tensors.values()))
        self._places = dict(zip(policy.tensors, pairwise([0, *ends]), strict=True))
        """Where each trained tensor begins and ends in the vector."""
        size = policy.values.numel()
        part = math.ceil(size / team.size / _ALIGNMENT) * _ALIGNMENT
        self._borders = [*(min(size, part * rank) for rank in range(team.size)), size]
        """Process r updates the numbers from `_borders[r]` up to `_borders[r + 1]`."""
        self._start, self._end = self._borders[team.rank], self._borders[team.rank + 1]
        self._own = torch.nn.Parameter(policy.values[self._start : self._end])  # shares its memory
        self._own.grad = policy.grads[self._start : self._end]
        self._adam = torch.optim.AdamW([self._own], foreach=False)
        self.reset()

    def reset(self) -> None:
        """Forget all updates: set the moments to zero."""
        zeros = {moment: torch.zeros_like(self._own.data) for moment in MOMENTS}
        self._adam.state[self._own] = {"step": torch.tensor(0.0), **zeros}

    @property
    def num_updates(self) -> int:
        return int(self._state["step"].item())

    @property
    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adam.state[self._own]
        return state

    def update(self, learning_rate: float, config: OptimizerConfig) -> float:
        """Update the weights from the accumulated gradient. Returns the norm of the gradient before clipping.

        Raises:
            TrainingError: the gradient is not finite; nothing was changed.
        """
        norm = float(torch.linalg.vector_norm(self._grads))
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is not finite, so nothing was trained; look at the learning rate, the rewards and the "
                "sampling log-probs of this step"
            )
        if norm > config.max_grad_norm:
            self._grads.mul_(config.max_grad_norm / norm)
        group = self._adam.param_groups[0]
        group.update(lr=learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
        self._adam.step()
        for rank in range(self._team.size):
            self._team.send(self._values[self._borders[rank] : self._borders[rank + 1]], rank)
        return norm

    def stream(self) -> Iterator[bytes | memoryview]:
        """Yield the content of `optimizer.safetensors`, piece by piece: both moments of every trained tensor.

        Every process must run it to the end, because each sends its part to the others. All yield the same bytes.
        """
        yield make_header(self._like)
        size = PIECE_BYTES // self._values.element_size()
        for name in file_order(self._like):
            moment, _, trained = name.partition(".")
            first, last = self._places[trained]
            # Pieces that one process holds. It sends each to the others, so that all of them can yield it.
            cuts = sorted({first, last, *range(first, last, size), *(b for b in self._borders if first < b < last)})
            for start, end in pairwise(cuts):
                owner = bisect_right(self._borders, start) - 1
                if owner == self._team.rank:
                    piece = self._state[moment][start - self._start : end - self._start]
                else:
                    piece = torch.empty(end - start, device=self._values.device)
                self._team.send(piece, owner)
                yield from stream_tensor(piece)

    def load(self, file: Path, num_updates: int) -> None:
        """Continue from the moments in `file`, which are those after `num_updates` updates.

        Raises:
            AdapterError: the moments do not fit this policy.
        """
        for name, tensor in read_named(file, self._like, "optimizer"):
            moment, _, trained = name.partition(".")
            first, last = self._places[trained]
            start, end = max(first, self._start), min(last, self._end)
            if start < end:
                numbers = tensor.reshape(-1)[start - first : end - first]
                self._state[moment][start - self._start : end - self._start] = numbers
        self._state["step"].fill_(num_updates)
