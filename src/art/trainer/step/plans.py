"""Plan the optimiser updates of a step from checked samples and a configuration. Before the first update of a
reinforcement-learning step, its samples are prepared:

references (KL, DPO)         log-probs of the base model or another checkpoint are added as streams
anchor at the step's start   the policy's own log-probs are added, if several updates follow
KL in the reward             subtracted from the advantages
preference pairs (DPO)       turned into one coefficient per rollout
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from art.config import CustomLossConfig, DistillConfig, DpoConfig, KlConfig, ScheduleConfig, TrainConfig, TrainSFTConfig
from art.errors import ConfigError, NothingTrainableError, TrajectoryError
from art.trainer.gate import Gate, Noise
from art.trainer.losses import find_function, judge_preferences, kl_estimate
from art.trainer.step.measure import Measurer, with_sampled_base, with_samplers
from art.trainer.step.update import Update
from art.trainer.tree import ANCHOR, POLICY, TEACHER, SamplePath, group_by_rollout, group_samples

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
