"""What a step's loss compares the policy with, beside the sampler: checkpoints of the same model, and a teacher."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from art.config import DistillConfig, TrainConfig
from art.engine import Engine
from art.errors import ConfigError, TrajectoryError
from art.gateway.policies import PolicyRef
from art.storage import checkpoints
from art.storage.layout import ModelPaths
from art.trainer.contract import TrainingSample


def reference_checkpoints(config: TrainConfig, paths: ModelPaths) -> dict[str, str]:
    """The checkpoints that the loss names, by step.

    Raises:
        ConfigError: one does not exist.
    """
    found = {}
    for step in {getattr(term, "reference", None) for term in config.terms}:
        if not isinstance(step, int):
            continue
        path = paths.checkpoint(step)
        if not path.exists():
            there = ", ".join(map(str, checkpoints.list_steps(paths.checkpoints)))
            raise ConfigError(
                f"the loss compares with checkpoint {step}, which does not exist; there are {there}", param="loss"
            )
        found[str(step)] = str(path)
    return found


def teacher_name(config: TrainConfig) -> str | None:
    return next((term.teacher for term in config.terms if isinstance(term, DistillConfig)), None)


async def ask_teacher(teacher: PolicyRef, own: Engine, samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with the teacher's log-probs of their tokens; `own` is the engine that sampled them.

    Raises:
        ConfigError: the teacher's vocabulary is another one.
        TrajectoryError: a sample was not sampled at temperature 1, at which teachers are asked.
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

    async def ask(sample: TrainingSample) -> TrainingSample:
        logprobs = await teacher.engine.score(sample.token_ids, teacher.adapter)
        return replace(sample, teacher_logprobs=[0.0, *logprobs])

    return list(await asyncio.gather(*map(ask, samples)))
