"""Policies that a loss compares the trained one with: checkpoints of the same model, and a teacher."""

from __future__ import annotations

import asyncio
from pathlib import Path

from art.config import DistillConfig, TrainConfig
from art.engine import Engine
from art.errors import ConfigError, TrajectoryError
from art.gateway.policies import PolicyRef
from art.protocol.samples import TrainingSample
from art.storage import checkpoints
from art.storage.layout import ModelPaths


def reference_checkpoints(config: TrainConfig, paths: ModelPaths) -> dict[int, Path]:
    """Find the checkpoints that the loss compares with. Returns their paths by step.

    Raises:
        ConfigError: a checkpoint does not exist.
    """
    references = {}
    for step in {getattr(term, "reference", None) for term in config.terms}:
        if not isinstance(step, int):
            continue
        path = paths.checkpoint(step)
        if not path.exists():
            steps = ", ".join(map(str, checkpoints.list_steps(paths.checkpoints)))
            raise ConfigError(
                f"the loss compares with checkpoint {step}, which does not exist; there are {steps}", param="loss"
            )
        references[step] = path
    return references


def teacher_name(config: TrainConfig) -> str | None:
    """Return the model name of the teacher that the loss `distill` learns from; `None` without that loss."""
    return next((term.teacher for term in config.terms if isinstance(term, DistillConfig)), None)


async def ask_teacher(teacher: PolicyRef, own: Engine, samples: list[TrainingSample]) -> list[list[float]]:
    """Ask the teacher for the log-prob of every learnt token of each sample. Each list has one per such token.

    Args:
        own: the engine that sampled the samples.

    Raises:
        ConfigError: teacher and policy have vocabularies of different sizes.
        TrajectoryError: a sample was not sampled at temperature 1 and from the whole vocabulary, as teachers are asked.
    """
    name = f"{teacher.project}/{teacher.name}@{teacher.policy_version}"
    own_size, teacher_size = (await own.info()).vocab_size, (await teacher.engine.info()).vocab_size
    if own_size != teacher_size:
        raise ConfigError(
            f"teacher {name} has a vocabulary of {teacher_size} tokens and the policy one of {own_size}; distillation "
            "token by token needs the same tokenizer",
            param="loss",
        )
    if warm := [sample for sample in samples if sample.temperature != 1]:
        raise TrajectoryError(
            f"{warm[0].sample_id} was sampled at temperature {warm[0].temperature}; distillation compares with the "
            "teacher at temperature 1"
        )
    if narrow := [sample for sample in samples if sample.constraints]:
        raise TrajectoryError(
            f"{narrow[0].sample_id} has an answer that was drawn from a part of the vocabulary (by a grammar, top_k, "
            "top_p or min_p); distillation compares with the teacher over the whole vocabulary. Sample rollouts for "
            "distillation without constraints"
        )

    async def ask(sample: TrainingSample) -> list[float]:
        scores = [0.0, *await teacher.engine.score(list(sample.token_ids), teacher.adapter)]
        return [score for score, is_learnt in zip(scores, sample.loss_mask, strict=True) if is_learnt]

    return list(await asyncio.gather(*map(ask, samples)))
