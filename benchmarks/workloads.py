"""Batches to train on: groups that share a prompt, agents of many turns, and rows that share nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from art.protocol.samples import TrainingSample

Samples = list[TrainingSample]


@dataclass(frozen=True, slots=True)
class AgentShape:
    """Token counts of one agent's rollout."""

    prompt: int
    observation: int
    answer: int
    kept: int
    """The last tokens of an answer that later turns see: all of it, or what the template leaves of it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    shared: tuple[tuple[int, int, int], ...]
    """(prompt tokens, completions, tokens of each)."""
    extending: AgentShape
    rewriting: AgentShape
    unshared: tuple[int, int]
    """(rows, tokens of each)."""


SIZES = {
    "quick": Sizes(
        shared=((64, 4, 16),),
        extending=AgentShape(prompt=32, observation=4, answer=8, kept=8),
        rewriting=AgentShape(prompt=32, observation=4, answer=8, kept=2),
        unshared=(4, 32),
    ),
    "cpu": Sizes(
        shared=((512, 8, 64), (64, 8, 256)),
        extending=AgentShape(prompt=200, observation=16, answer=32, kept=32),
        rewriting=AgentShape(prompt=200, observation=16, answer=32, kept=8),
        unshared=(8, 128),
    ),
    # Trees of about 16k tokens.
    "cuda": Sizes(
        shared=((4096, 8, 1536), (2048, 8, 1792)),
        extending=AgentShape(prompt=4096, observation=512, answer=512, kept=512),
        rewriting=AgentShape(prompt=4096, observation=512, answer=450, kept=62),
        unshared=(8, 2048),
    ),
}
NUM_TURNS = 12


def make_workloads(vocab_size: int, sizes: Sizes) -> dict[str, Samples]:
    """By name. Sampling log-probs are zero: they depend on the model."""
    rng = random.Random(0)
    workloads = {}
    for prompt, count, length in sizes.shared:
        workloads[f"prompt {prompt} + {count} x {length}"] = group(rng, vocab_size, prompt, count, length)
    workloads[f"{NUM_TURNS} turns, extended"] = agent(rng, vocab_size, sizes.extending, NUM_TURNS)
    workloads[f"{NUM_TURNS} turns, rewritten"] = agent(rng, vocab_size, sizes.rewriting, NUM_TURNS)
    rows, length = sizes.unshared
    workloads[f"nothing shared, {rows} x {length}"] = [
        _sample(str(row), [_draw(rng, vocab_size, length // 2)], _draw(rng, vocab_size, length // 2), rng.gauss(0, 1))
        for row in range(rows)
    ]
    return workloads


def group(rng: random.Random, vocab_size: int, prompt_tokens: int, count: int, length: int) -> Samples:
    """`count` completions of `length` tokens behind one prompt."""
    prompt = _draw(rng, vocab_size, prompt_tokens)
    return [_sample(str(i), [prompt], _draw(rng, vocab_size, length), rng.gauss(0, 1)) for i in range(count)]


def agent(rng: random.Random, vocab_size: int, shape: AgentShape, num_turns: int) -> Samples:
    """One rollout, a sample for each of its requests: the history so far, and the answer, which is learnt."""
    history = [_draw(rng, vocab_size, shape.prompt)]
    advantage = rng.gauss(0, 1)
    samples = []
    for turn in range(num_turns):
        history.append(_draw(rng, vocab_size, shape.observation))
        answer = _draw(rng, vocab_size, shape.answer)
        samples.append(_sample(f"0-{turn}", history, answer, advantage))
        history.append(answer[-shape.kept :])
    return samples


def without_sharing(samples: Samples, vocab_size: int) -> Samples:
    """The same with another first token in each, so that no prefix is shared: packing without a tree."""
    return [
        replace(sample, token_ids=[(sample.token_ids[0] + number) % vocab_size, *sample.token_ids[1:]])
        for number, sample in enumerate(samples)
    ]


def plain_row(num_tokens: int, num_targets: int, vocab_size: int) -> TrainingSample:
    """One sequence of which `num_tokens` are computed: what the arithmetic of a tree of as many tokens would cost."""
    rng = random.Random(0)
    context = _draw(rng, vocab_size, num_tokens + 1 - num_targets)
    return _sample("row", [context], _draw(rng, vocab_size, num_targets), 1.0)


def _draw(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _sample(name: str, context: Sequence[list[int]], answer: list[int], advantage: float) -> TrainingSample:
    before = [token for part in context for token in part]
    mask = [False] * len(before) + [True] * len(answer)
    return TrainingSample(
        sample_id=name,
        rollout_id=name.partition("-")[0],
        token_ids=before + answer,
        loss_mask=mask,
        sampling_logprobs=[0.0] * len(mask),
        advantages=[advantage if learnt else 0.0 for learnt in mask],
    )


def learnt(samples: Samples, values: str) -> Iterator[Any]:
    """A field of the tokens that are learnt, sample after sample."""
    for sample in samples:
        yield from (value for value, wanted in zip(getattr(sample, values), sample.loss_mask, strict=True) if wanted)
