"""Samples whose tokens were drawn from a part of the vocabulary."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from art.engines.torch.sampler import Cut
from art.engines.torch.sampler import sample as draw_tokens
from art.kernels.grammar import Vocabulary, allowed_bits
from art.protocol.compact import read_samples
from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample
from art.trainer.step.replay import Replayer
from art.trainer.tree import SamplePath, check_sample
from tests.support.trainer_samples import VOCAB_SIZE


def with_kept(samples: Sequence[TrainingSample], seed: int = 0) -> list[TrainingSample]:
    """Most of `samples` with kept tokens on one or two runs of tokens: few, many, one alone, or all (an empty list)."""
    rng = random.Random(seed)

    def kept(token_id: int) -> list[int]:
        size = rng.choice([0, 1, 2, 3, 9, 40, VOCAB_SIZE - 1])
        return sorted({token_id, *rng.sample(range(VOCAB_SIZE), size - 1)}) if size else []

    def span(sample: TrainingSample, start: int, end: int) -> ConstrainedSpan:
        return ConstrainedSpan(
            start=start,
            num_tokens=end - start,
            constraint=Constraint(kept=[kept(token_id) for token_id in sample.token_ids[start:end]]),
        )

    constrained = []
    for sample in samples:
        length = len(sample.token_ids)
        middle = rng.randrange(1, length)
        borders = [(1, length)] if rng.random() < 0.5 else [(1, middle), (middle, length)]
        spans = [span(sample, start, end) for start, end in borders if end > start and rng.random() < 0.8]
        constrained.append(replace(sample, constraints=spans))
    return constrained


def replayed(samples: Sequence[TrainingSample], base_model: str = "", vocab_size: int = VOCAB_SIZE) -> list[SamplePath]:
    """What the trainer makes of `samples`."""
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size))]
    return [path for path in Replayer(base_model, vocab_size).replay(paths)[0] if not path.refusal]


def mask_digests(paths: Sequence[SamplePath]) -> list[str]:
    """A hash of all masks of each sample, bit by bit."""
    digests = []
    for path in paths:
        numbers = [] if path.masks is None else path.masks.tolist()
        masks = [None if number < 0 else path.mask_table[number] for number in numbers]
        digests.append(hashlib.sha256(repr(masks).encode()).hexdigest())
    return digests


def print_masks(wire: str) -> None:
    """Replay samples in a process of its own: `wire` is the JSON of their file, the base model and its vocabulary."""
    path, base_model, vocab_size = json.loads(wire)
    print(*mask_digests(replayed(read_samples(Path(path)), base_model, vocab_size)))


@dataclass(frozen=True)
class Drawn:
    token_ids: list[int]
    logprobs: list[float]
    constraint: Constraint | None


@dataclass(frozen=True)
class Sampler:
    """Draws answers from a transformers model with the engine's own sampler."""

    model: Any
    vocabulary: Vocabulary
    stop_token_ids: list[int]

    @torch.no_grad()
    def draw(
        self, prompt: list[int], *, grammar: str | None = None, top_k: int = 0, seed: int = 0, max_tokens: int = 24
    ) -> Drawn:
        rng = np.random.default_rng(seed)
        matcher = None if grammar is None else self.vocabulary.matcher(grammar, self.stop_token_ids)
        mask = np.zeros(self.vocabulary.num_words, dtype=np.uint32)
        token_ids: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] = []
        while len(token_ids) < max_tokens and not set(token_ids[-1:]) & set(self.stop_token_ids):
            ids = torch.tensor([prompt + token_ids])
            logits = self.model(input_ids=ids, use_cache=False).logits[:, -1].float()
            if matcher is not None:
                matcher.fill(mask)
                logits[:, ~allowed_bits(mask, logits.shape[1])] = float("-inf")
            drawn = draw_tokens(logits, rng.random(1), [1.0], [Cut(top_k=top_k) if top_k else None], [0])
            kept.append(drawn.kept.get(0, []))
            token_ids += drawn.token_ids
            logprobs += drawn.logprobs
            if matcher is not None:
                assert matcher.advance(drawn.token_ids[0])
        constraint = Constraint(grammar=grammar, stop_token_ids=self.stop_token_ids, kept=kept if top_k else None)
        return Drawn(token_ids, logprobs, constraint if grammar is not None or top_k else None)


def training_sample(prompt: list[int], drawn: Drawn, name: str, advantage: float = 1.0) -> TrainingSample:
    num_tokens = len(drawn.token_ids)
    before = [0.0] * len(prompt)
    spans = [] if drawn.constraint is None else [(len(prompt), num_tokens, drawn.constraint)]
    return TrainingSample(
        sample_id=name,
        rollout_id=name,
        token_ids=prompt + drawn.token_ids,
        loss_mask=[False] * len(prompt) + [True] * num_tokens,
        sampling_logprobs=before + drawn.logprobs,
        advantages=before + [advantage] * num_tokens,
        constraints=[
            ConstrainedSpan(start=start, num_tokens=n, constraint=constraint) for start, n, constraint in spans
        ],
    )
