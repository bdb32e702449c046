"""Batches to train on: groups of eight rollouts, of one turn or of six."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from art.trainer.types import TrainingSample

Samples = list[TrainingSample]

Rollout = Sequence[tuple[list[int], list[int]]]
"""Turns: what the context gains before an answer, and the answer."""


def make_workloads(vocab_size: int) -> dict[str, Samples]:
    """By name. Sampling log-probs are zero: they depend on the model."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    workloads = {}
    for prompt_length, length in ((512, 64), (64, 256)):
        prompt = tokens(prompt_length)
        turns = [[(prompt, tokens(length))] for _ in range(8)]
        workloads[f"prompt {prompt_length} + 8 x {length}"] = list(_by_turn(turns, rng))
    prompt = tokens(400)
    rollouts = [[(prompt if turn == 0 else tokens(36), tokens(72)) for turn in range(6)] for _ in range(8)]
    state = rng.getstate()
    workloads["8 rollouts x 6 turns, by turn"] = list(_by_turn(rollouts, rng))
    rng.setstate(state)
    workloads["8 rollouts x 6 turns, by rollout"] = list(_by_rollout(rollouts, rng))
    return workloads


def _by_turn(rollouts: Sequence[Rollout], rng: random.Random) -> Iterator[TrainingSample]:
    """The last answer of each prefix of each rollout."""
    for number, rollout in enumerate(rollouts):
        advantage = rng.gauss(0, 1)
        for count in range(1, len(rollout) + 1):
            yield _sample(f"{number}-{count}", rollout[:count], advantage, first_learnt=count - 1)


def _by_rollout(rollouts: Sequence[Rollout], rng: random.Random) -> Iterator[TrainingSample]:
    for number, rollout in enumerate(rollouts):
        yield _sample(str(number), rollout, rng.gauss(0, 1), first_learnt=0)


def _sample(name: str, turns: Rollout, advantage: float, *, first_learnt: int) -> TrainingSample:
    token_ids, mask = [], []
    for number, (context, answer) in enumerate(turns):
        token_ids += context + answer
        mask += [False] * len(context) + [number >= first_learnt] * len(answer)
    return TrainingSample(
        sample_id=name,
        rollout_id=name.partition("-")[0],
        token_ids=token_ids,
        loss_mask=mask,
        sampling_logprobs=[0.0] * len(mask),
        advantages=[advantage if learnt else 0.0 for learnt in mask],
    )
