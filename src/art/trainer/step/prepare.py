"""Prepare the samples of a reinforcement-learning step before its first update.

references (KL, DPO)         log-probs of the base model or another checkpoint are added as streams
anchor at the step's start   the policy's own log-probs are added, if several updates follow
KL in the reward             subtracted from the advantages
preference pairs (DPO)       turned into one coefficient per rollout
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from art.config import DistillConfig, DpoConfig, KlConfig, TrainConfig
from art.errors import NothingTrainableError, TrajectoryError
from art.trainer.gate.gate import Gate
from art.trainer.losses.dpo import judge_preferences
from art.trainer.losses.kl import kl_estimate
from art.trainer.step.measure import Measurer
from art.trainer.streams import ANCHOR, POLICY, TEACHER
from art.trainer.tree.tree import SamplePath


def prepare_paths(
    paths: list[SamplePath],
    config: TrainConfig,
    pairs: Sequence[tuple[str, str]],
    measurer: Measurer,
    gate: Gate | None,
) -> tuple[list[SamplePath], dict[str, float]]:
    """Add to the samples `paths` all that the updates read. Return them, and metrics that are known already.

    `gate` is the gate over all of `paths`. Only `dpo` asks it.

    Raises:
        NothingTrainableError: the loss is dpo and no pair can be compared.
        TrajectoryError: the loss is distillation and a sample lacks its teacher's log-probs.
    """
    if any(isinstance(term, DistillConfig) for term in config.terms):
        for path in paths:  # a missing log-prob would be read as 0, i.e. as probability 1
            if path.sample.component == "rl" and TEACHER not in path.streams:
                raise TrajectoryError(
                    f"sample {path.sample.sample_id!r} has no `teacher_logprobs`, which the loss distill needs"
                )
    for term in config.terms:
        if isinstance(term, (KlConfig, DpoConfig)) and term.reference != "sampler":
            paths = measurer.add_stream(paths, term.reference, str(term.reference))
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
    weight = math.fsum(path.sample.weight * len(kl) for path, kl in zip(rl, kls, strict=True))
    total = math.fsum(path.sample.weight * kl.sum(dtype=np.float64) for path, kl in zip(rl, kls, strict=True))
    mean = total / weight if rl else 0.0
    penalties = {id(path): term.weight * (kl - mean) for path, kl in zip(rl, kls, strict=True)}
    return [
        replace(path, advantages=path.advantages - penalties[id(path)]) if id(path) in penalties else path
        for path in paths
    ]


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
    usable = gains.keys() - (_mismatched_rollouts(rl, gate) if gate is not None and rl else set())
    kept = [pair for pair in pairs if usable.issuperset(pair)]
    if not kept:
        raise NothingTrainableError(
            f"none of the {len(pairs)} pairs of rollouts can be compared; dpo needs groups whose rewards differ, "
            "sampled by a policy that the trainer reproduces (see `mismatch`)"
        )
    preferences = judge_preferences(gains, kept, term)

    def prepared(path: SamplePath) -> SamplePath:
        if path.sample.component != "rl":
            return path
        # The coefficients are of a mean over pairs already, so the targets are summed: the shares add up to 1.
        return replace(
            path,
            sample=replace(path.sample, weight=1.0, share=1 / len(rl)),
            advantages=np.full_like(path.advantages, -preferences.coefficients[path.sample.rollout_id]),
        )

    paired = {rollout_id for pair in kept for rollout_id in pair}
    left_out = sum(len(path.query_positions) for path in rl if path.sample.rollout_id not in paired)
    return [prepared(path) for path in paths], {
        # Counts more than the gate: all branches of a masked rollout, and rollouts that lost their counterpart.
        "offpolicy/mismatch_masked_tokens": float(left_out),
        "loss/train": term.weight * preferences.loss,
        "loss/preference_accuracy": preferences.accuracy,
        "loss/preference_margin": preferences.margin,
    }


def _mismatched_rollouts(paths: list[SamplePath], gate: Gate) -> set[str]:
    """Ids of the rollouts that `gate` masks."""
    log_ratio = np.concatenate([path.streams[ANCHOR] - path.sampling_logprobs for path in paths])
    masked = gate.judge(gate.collect(paths, log_ratio)).masked
    return {rollout_id for rollout_id, index in gate.rollouts.items() if masked[index]}
