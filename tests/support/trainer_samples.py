"""Random samples whose paths branch, merge, repeat and split."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.config import MismatchConfig
from art.protocol.calls import SampleFile
from art.protocol.compact import write_samples
from art.protocol.samples import TrainingSample
from art.trainer.gate import Gate, Noise
from art.trainer.tree import SamplePath, check_sample

VOCAB_SIZE = 61


def paths_of(samples: Sequence[TrainingSample], vocab_size: int = VOCAB_SIZE) -> list[SamplePath]:
    """The samples that have something to learn, as the trainer takes them."""
    return [path for sample in samples if (path := check_sample(sample, vocab_size=vocab_size)) is not None]


def make_gate(paths: Sequence[SamplePath], config: MismatchConfig | None) -> Gate | None:
    """The gate of an update of `paths`, in float32 and with no stale sample."""
    return None if config is None else Gate.over(paths, config, Noise(), step=0)


def make_sample(name: str, token_ids: list[int], rng: random.Random, **fields: Any) -> TrainingSample:
    """A sample that learns a random half of its tokens."""
    mask = [i > 0 and rng.random() < 0.5 for i in range(len(token_ids))]
    if not any(mask):
        mask[-1] = True
    return TrainingSample(
        sample_id=name,
        rollout_id=fields.pop("rollout_id", name),
        token_ids=token_ids,
        loss_mask=mask,
        sampling_logprobs=[-rng.uniform(0.5, 6.0) if m else 0.0 for m in mask],
        advantages=[rng.gauss(0, 1) if m else 0.0 for m in mask],
        **fields,
    )


def random_samples(seed: int, count: int = 8) -> list[TrainingSample]:
    """Samples that start anew, branch off an earlier one, extend it, repeat it or are a prefix of it."""
    rng = random.Random(seed)
    paths: list[list[int]] = []
    for _ in range(count):
        length = rng.randrange(2, 14)
        new = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        kind = rng.choice(["root", "branch", "branch", "extend", "repeat", "prefix"]) if paths else "root"
        old = rng.choice(paths) if paths else []
        cut = rng.randrange(1, len(old)) if len(old) > 2 else len(old)
        paths.append(
            {
                "root": new,
                "branch": old[:cut] + new,
                "extend": old + new,
                "repeat": list(old),
                "prefix": old[: max(cut, 2)],
            }[kind]
        )
    return [
        make_sample(f"s{i}", path, rng, temperature=rng.choice([1.0, 1.0, 0.7]), weight=rng.choice([1.0, 0.5]))
        for i, path in enumerate(paths)
    ]


def sample_file(directory: Path, samples: Sequence[TrainingSample]) -> SampleFile:
    """The samples in a new file, as a call to a trainer process brings them."""
    path = directory / f"{uuid.uuid4().hex}.safetensors"
    write_samples(path, samples)
    return SampleFile(path)
