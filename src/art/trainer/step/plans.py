"""Plan the optimiser updates of a step from checked samples and a configuration. Before the first update of a
reinforcement-learning step, its samples are prepared:

references (KL, DPO)         log-probs of the base model or another checkpoint are added as streams
anchor at the step's start   the policy's own log-probs are added, if several updates follow
KL in the reward             subtracted from the advantages
preference pairs (DPO)       turned into one coefficient per rollout
distance to the base model   measured on a sixteenth of the tokens, which makes a step of 16 rollouts or more about 3 %
                             longer. The policy's own log-probs come from the updates, at no cost
stale rollouts               a few are compared with the checkpoints that sampled them, a sixteenth of the tokens too

These log-probs are *streams* of the samples, computed without a gradient. They are computed over the same prefix trees
as the updates, so a shared prefix is computed once here too.

What an older policy sampled differs from the policy of today because the policy has moved, and perhaps because the
record is wrong. The log-ratio alone does not tell which. But log pi_v - log mu, where v is the step that sampled the
token, is noise if the record is right, whatever was trained since. The gate judges by it (`gate.py`).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from art.config import CustomLossConfig, DistillConfig, DpoConfig, KlConfig, ScheduleConfig, TrainConfig, TrainSFTConfig
from art.errors import ConfigError, NothingTrainableError, TrajectoryError
from art.storage import checkpoints
from art.trainer.gate import Gate, Noise
from art.trainer.losses import find_function, judge_preferences, kl_estimate
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import (
    MicroBatch,
    MicroBatcher,
    StepProgress,
    count_idle_passes,
    idle_layout,
    run_fitting,
    target_logprobs_in_order,
)
from art.trainer.step.update import Update
from art.trainer.tree import (
    ANCHOR,
    BASE,
    POLICY,
    SAMPLED_BASE,
    SAMPLER,
    TEACHER,
    FloatArray,
    SamplePath,
    group_by_rollout,
    group_samples,
)

_SFT_AUTO_BATCH_SIZE = 2
"""Trajectories per update for `batch_size="auto"`."""


def prepare_paths(
    paths: list[SamplePath],
    config: TrainConfig,
    pairs: Sequence[tuple[str, str]],
    measurer: Measurer,
    gate: Gate | None,
) -> tuple[list[SamplePath], dict[str, float]]:
    """Add to the samples `paths` all that the updates read. Return them, and metrics that are known already.

    `gate` is the gate over all of `paths`. Only `dpo` asks it.
    """
    for term in config.terms:
        if isinstance(term, CustomLossConfig):
            find_function(term)
        if isinstance(term, DistillConfig):  # a missing log-prob would be read as 0, i.e. as probability 1
            for path in paths:
                if path.sample.component == "rl" and TEACHER not in path.streams:
                    raise TrajectoryError(
                        f"sample {path.sample.sample_id!r} has no `teacher_logprobs`, which the loss distill needs"
                    )
    references = {t.reference for t in config.terms if isinstance(t, (KlConfig, DpoConfig, CustomLossConfig))}
    for reference in sorted(references, key=str):
        if reference is not None and reference != "sampler":
            paths = measurer.add_stream(paths, reference, str(reference))
    if config.anchor == "step_start" and config.num_minibatches > 1:
        paths = measurer.add_stream(paths, POLICY, ANCHOR)
    for term in config.terms:
        if isinstance(term, KlConfig) and term.where == "reward":
            return _with_kl_reward(paths, term), {}
        if isinstance(term, DpoConfig):
            # The anchor's stream: the gate will judge by these same numbers during the update.
            paths = measurer.add_stream(paths, POLICY, ANCHOR)
            return _with_preferences(paths, term, pairs, gate)
    return paths, {}


def _with_kl_reward(paths: list[SamplePath], term: KlConfig) -> list[SamplePath]:
    """Subtract the weighted KL of each token from its advantage, after subtracting the mean KL of the step.

    So credit moves from tokens far from the reference to tokens close to it. The mean weighs tokens as the loss does,
    so the sum of the weighted advantages does not change.
    """
    rl = [path for path in paths if path.sample.component == "rl"]
    differences = [torch.from_numpy(path.sampling_logprobs - path.streams[str(term.reference)]) for path in rl]
    kls = [kl_estimate(difference, term.estimator).numpy() for difference in differences]
    pairs = list(zip(rl, kls, strict=True))
    weight = math.fsum(path.sample.weight * len(kl) for path, kl in pairs)
    total = math.fsum(path.sample.weight * kl.sum(dtype=np.float64) for path, kl in pairs)
    mean = total / weight if rl else 0.0
    changed = {id(path): replace(path, advantages=path.advantages - term.weight * (kl - mean)) for path, kl in pairs}
    return [changed.get(id(path), path) for path in paths]


def _with_preferences(
    paths: list[SamplePath], term: DpoConfig, pairs: Sequence[tuple[str, str]], gate: Gate | None
) -> tuple[list[SamplePath], dict[str, float]]:
    """Paths whose advantages are minus the derivative of the pairs' loss (0 without a pair), and metrics."""
    rl = [path for path in paths if path.sample.component == "rl"]
    gains: dict[str, float] = {}
    for path in rl:
        reference = path.sampling_logprobs if term.reference == "sampler" else path.streams[str(term.reference)]
        gain = float((path.streams[ANCHOR].astype(np.float64) - reference).sum())
        gains[path.sample.rollout_id] = gains.get(path.sample.rollout_id, 0.0) + gain
    # Leave out pairs of which the gate will mask one rollout: half a pair would be trained without its counterpart.
    masked: set[str] = set()
    if gate is not None and rl:
        log_ratio = np.concatenate([path.streams[ANCHOR] - path.sampling_logprobs for path in rl])
        is_masked = gate.judge(gate.collect(rl, log_ratio)).masked
        masked = {rollout_id for rollout_id, index in gate.rollouts.items() if is_masked[index]}
    kept = [pair for pair in pairs if (gains.keys() - masked).issuperset(pair)]
    if not kept:
        raise NothingTrainableError(
            f"none of the {len(pairs)} pairs of rollouts can be compared; dpo needs groups whose rewards differ, "
            "sampled by a policy that the trainer reproduces (see `mismatch`)"
        )
    coefficients, metrics = judge_preferences(gains, kept, term)
    # The coefficients are of a mean over pairs already, so the targets are summed: the shares add up to 1.
    prepared = [
        path
        if path.sample.component != "rl"
        else replace(
            path,
            sample=replace(path.sample, weight=1.0, share=1 / len(rl)),
            advantages=np.full_like(path.advantages, -coefficients[path.sample.rollout_id]),
        )
        for path in paths
    ]
    # Counts more than the gate: all branches of a masked rollout, and rollouts that lost their counterpart.
    paired = {rollout_id for pair in kept for rollout_id in pair}
    left_out = sum(len(path.query_positions) for path in rl if path.sample.rollout_id not in paired)
    return prepared, metrics | {"offpolicy/mismatch_masked_tokens": float(left_out)}


def plan_rl(
    paths: list[SamplePath],
    config: TrainConfig,
    pairs: Sequence[tuple[str, str]],
    measurer: Measurer,
    *,
    step: int,
    noise: Noise,
) -> tuple[list[Update], dict[str, float]]:
    """Plan one update per mini-batch of a reinforcement-learning step. First add the log-probs that the losses need.

    Samples of other components are mixed in; no loss of `config` reads them.

    `noise` describes how far engine and trainer may differ, for the gate `mismatch`.

    Returns:
        The updates, in order, and metrics that replace those of the same names that the updates report.

    Raises:
        ConfigError: a custom loss cannot be imported, or the schedule of the learning rate has ended.
        NothingTrainableError: the loss is dpo and no pair can be compared.
        TrajectoryError: the loss is distillation and a sample lacks its teacher's log-probs.
    """
    learning_rate = config.rate_at(step)

    def make_gate(paths: list[SamplePath]) -> Gate | None:
        return None if config.mismatch is None else Gate.over(paths, config.mismatch, noise, step=step)

    rl, metrics = [path for path in paths if path.sample.component == "rl"], dict[str, float]()
    supervised = [path for path in paths if path.sample.component != "rl"]
    if rl:
        rl, metrics = prepare_paths(rl, config, pairs, measurer, make_gate(rl))
        rl = with_sampled_base(rl, measurer, step=step)
    parts = split_minibatches([*rl, *supervised], config.num_minibatches, seed=step)
    if rl and config.mismatch is not None:
        parts[0], measured = with_samplers(parts[0], measurer, step=step)
        metrics |= measured
    # If the sampler is the anchor, later updates differ from it by design, so the gate cannot judge them.
    gates = [make_gate(part) if n == 0 or config.anchor == "step_start" else None for n, part in enumerate(parts)]
    terms = tuple(term for term in config.terms if not (isinstance(term, KlConfig) and term.where == "reward"))
    return [
        Update(paths=part, learning_rate=learning_rate, terms=terms, anchor=config.anchor, mismatch=gate)
        for part, gate in zip(parts, gates, strict=True)
    ], metrics


def plan_sft(paths: list[SamplePath], config: TrainSFTConfig) -> list[Update]:
    """Plan one update per batch of trajectories for a step of supervised fine-tuning.

    Raises:
        ConfigError: the number of learning rates is not the number of batches, or their schedule ends before the last.
        TrajectoryError: a sample is not of component "sft".
    """
    if other := [path.sample for path in paths if path.sample.component != "sft"]:
        raise TrajectoryError(
            f"sample {other[0].sample_id!r} has component {other[0].component!r}; supervised fine-tuning takes 'sft'"
        )
    size = _SFT_AUTO_BATCH_SIZE if config.batch_size == "auto" else config.batch_size
    batches = split_batches(paths, size)
    rates = config.learning_rate
    if isinstance(rates, ScheduleConfig):
        rates = [rates.rate_at(number, total_steps=len(batches)) for number in range(len(batches))]
    elif not isinstance(rates, list):
        rates = [rates] * len(batches)
    elif len(rates) != len(batches):
        raise ConfigError(
            f"`learning_rate` lists {len(rates)} rates, but the trajectories make {len(batches)} batches of "
            f"{size}; give one rate per batch, or a single number",
            param="learning_rate",
        )
    return [Update(paths=batch, learning_rate=rate) for batch, rate in zip(batches, rates, strict=True)]


# -- mini-batches --


def split_minibatches(paths: Sequence[SamplePath], num_minibatches: int, *, seed: int) -> list[list[SamplePath]]:
    """Split `paths` into mini-batches of whole groups. Fewer groups than mini-batches give fewer mini-batches.

    Groups are taken in an order that only `seed` and their number decide, and each goes to the mini-batch with the
    fewest targets (trained tokens) so far. So any two mini-batches differ by at most the targets of the largest group.
    Samples of component "sft" are split on their own, by rollout, so that each mini-batch has its part of both.
    """
    supervised = [path for path in paths if path.sample.component == "sft"]
    groups = group_samples([path for path in paths if path.sample.component != "sft"])
    if not supervised or not groups:
        groups = group_samples(paths)
        return _split_groups(groups, min(num_minibatches, len(groups)), seed)
    parts = _split_groups(groups, min(num_minibatches, len(groups)), seed)
    shares = _split_groups(group_samples(supervised), len(parts), seed)
    return [[*part, *share] for part, share in zip(parts, shares, strict=True)]


def _split_groups(groups: list[list[SamplePath]], num_parts: int, seed: int) -> list[list[SamplePath]]:
    """Split `groups` into `num_parts` parts of about as many targets. If there are fewer groups, parts are empty."""
    order = list(range(len(groups)))
    if num_parts > 1:
        random.Random(seed).shuffle(order)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * len(parts)
    for index in order:
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += sum(len(path.query_positions) for path in groups[index])
    return [[path for index in sorted(part) for path in groups[index]] for part in parts]


def split_batches(paths: Sequence[SamplePath], batch_size: int) -> list[list[SamplePath]]:
    """Split `paths` into batches of `batch_size` rollouts, in order. The last batch may be smaller."""
    rollouts = group_by_rollout(paths)
    starts = range(0, len(rollouts), batch_size)
    return [[path for rollout in rollouts[start : start + batch_size] for path in rollout] for start in starts]


# -- log-probs without a gradient --


@dataclass(frozen=True, slots=True)
class Measurer:
    """Adds log-probs under the policy, base model or other checkpoints to a step's samples, before its first update."""

    policy: Policy
    batcher: MicroBatcher
    progress: StepProgress | None = None
    references: Mapping[int, Path] = field(default_factory=dict)
    """The checkpoints that may be compared with, by step."""

    def add_stream(self, paths: list[SamplePath], source: int | str, name: str) -> list[SamplePath]:
        """Return `paths` with one more stream `name`: the log-probs of all targets under the weights `source`.

        `source` is `POLICY`, `BASE`, or the step of a checkpoint. Where memory runs out, smaller micro-batches are
        used, and the batcher makes smaller ones from then on: what does not fit without a gradient does not fit with
        one.

        Raises:
            ConfigError: the checkpoint is not among the references.
            TrainingError: a single sample does not fit into memory.
        """
        base, team = self.batcher.base, self.batcher.team
        hidden_states = self.policy.base_hidden_states if source == BASE else self.policy.hidden_states
        with contextlib.ExitStack() as stack:
            if isinstance(source, int):
                if source not in self.references:
                    raise ConfigError(
                        f"the loss compares with checkpoint {source}, which was not given to the trainer", param="loss"
                    )
                checkpoints.verify(self.references[source])
                stack.enter_context(self.policy.using(self.references[source] / self.policy.weights_file))
            team.gather(None)  # nobody begins before all processes have read the weights
            micro_batches = self.batcher.split(paths)
            num_idle = count_idle_passes(micro_batches, base, team)

            def measure(micro_batches: Iterator[MicroBatch]) -> dict[int, FloatArray]:
                measured: dict[int, FloatArray] = {}  # by id of the path
                for micro_batch in micro_batches:
                    logprobs = target_logprobs_in_order(micro_batch, base, hidden_states)
                    ends = np.cumsum([len(path.query_positions) for path in micro_batch.paths])
                    measured |= zip(map(id, micro_batch.paths), np.split(logprobs, ends[:-1]), strict=True)
                    if self.progress is not None:
                        self.progress.tick()
                for _ in range(num_idle):
                    hidden_states(idle_layout(base.device))
                return measured

            stack.enter_context(torch.no_grad())
            measured, fitting = run_fitting(micro_batches, measure, base)
            own = {index: measured[id(path)] for index, path in enumerate(paths) if id(path) in measured}
            gathered = team.gather((own, fitting))
        self.batcher.shrink(min((fitting for _, fitting in gathered if fitting is not None), default=None))
        everything = {index: logprobs for share, _ in gathered for index, logprobs in share.items()}
        return [path.with_stream(name, everything[index]) for index, path in enumerate(paths)]


_BUDGET = 1 / 16
"""Share of the step's tokens that may be computed for one pass over other weights."""


def with_sampled_base(paths: list[SamplePath], measurer: Measurer, *, step: int) -> list[SamplePath]:
    """Add the base model's log-probs (stream `SAMPLED_BASE`) to some of the samples, unless all have them (`BASE`)."""
    if all(BASE in path.streams for path in paths):
        return paths
    chosen = choose_paths(paths, step=step)
    if not chosen:
        return paths
    sampled = measurer.add_stream([paths[index] for index in chosen], BASE, SAMPLED_BASE)
    measured = dict(zip(chosen, sampled, strict=True))
    return [
        measured.get(index) or path.with_stream(SAMPLED_BASE, np.full_like(path.sampling_logprobs, np.nan))
        for index, path in enumerate(paths)
    ]


def choose_paths(paths: Sequence[SamplePath], *, step: int) -> list[int]:
    """Choose by index the samples whose KL to the base model is measured. A repeated step chooses the same."""
    order = [index for index, path in enumerate(paths) if path.sample.component == "rl"]
    random.Random(step).shuffle(order)
    budget = _BUDGET * sum(path.num_tokens for path in paths)
    ends = accumulate(paths[index].num_tokens for index in order)
    return sorted([index for index, end in zip(order, ends, strict=True) if end <= budget] or order[:1])


_LEAST_ROLLOUTS = 8
"""Rollouts that are compared even if they are longer than the budget: fewer do not tell how much they differ."""
_MOST_OF_GROUP = 4
"""Most rollouts of one group: they share their prompt, which makes them cheap, but also what they learnt."""


def with_samplers(
    paths: list[SamplePath], measurer: Measurer, *, step: int
) -> tuple[list[SamplePath], dict[str, float]]:
    """Add to some of the stale rollouts the log-probs under the checkpoint that sampled each token (`SAMPLER`).

    They are NaN for tokens that the policy of this `step` sampled. Returns the samples, and metrics.
    """
    chosen = choose_stale(paths, measurer.references.keys(), step=step)
    if not chosen:
        return paths, {}
    streams = [np.full_like(path.sampling_logprobs, np.nan) for path in paths]
    for version in sorted({int(version) for index in chosen for version in paths[index].policy_versions} - {step}):
        own = [index for index in chosen if (paths[index].policy_versions == version).any()]
        for index, path in zip(own, measurer.add_stream([paths[i] for i in own], version, SAMPLER), strict=True):
            np.copyto(streams[index], path.streams[SAMPLER], where=path.policy_versions == version)
    num_rollouts = len({paths[index].sample.rollout_id for index in chosen})
    with_stream = [path.with_stream(SAMPLER, stream) for path, stream in zip(paths, streams, strict=True)]
    return with_stream, {"offpolicy/stale_rollouts_checked": float(num_rollouts)}


def choose_stale(paths: Sequence[SamplePath], checkpoints: Collection[int], *, step: int) -> list[int]:
    """Choose by index the samples of the stale rollouts to compare. A repeated step chooses the same.

    All versions of a rollout must be among `checkpoints`, or be `step` itself.
    """
    index_of = {id(path): index for index, path in enumerate(paths)}
    groups = group_samples([path for path in paths if path.sample.component == "rl"])
    random.Random(step).shuffle(groups)
    left = _BUDGET * sum(path.num_tokens for path in paths)
    chosen: list[int] = []
    num_rollouts = 0
    for rollout in (rollout for group in groups for rollout in group_by_rollout(group)[:_MOST_OF_GROUP]):
        versions = {int(version) for path in rollout for version in path.policy_versions}
        if versions <= {step} or not versions <= {step, *checkpoints}:
            continue
        left -= sum(path.num_tokens for path in rollout)
        if left < 0 and num_rollouts >= _LEAST_ROLLOUTS:
            break
        chosen += [index_of[id(path)] for path in rollout]
        num_rollouts += 1
    return sorted(chosen)
