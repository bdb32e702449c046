"""Asking a teacher for log-probs: what it cannot be asked."""

from __future__ import annotations

from typing import Any

import pytest

from art.credit.references import ask_teacher
from art.engine import EngineInfo
from art.errors import TrajectoryError
from art.gateway.policies import PolicyRef
from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample


class ScoringEngine:
    async def info(self) -> EngineInfo:
        return EngineInfo(vocab_size=9, max_context=8, dtype="float32", device="cpu")

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)


def sample(**changes: Any) -> TrainingSample:
    return TrainingSample(
        sample_id="groups[0]",
        rollout_id="r",
        token_ids=[1, 2, 3],
        loss_mask=[False, True, True],
        sampling_logprobs=[0.0, -1.0, -1.0],
        advantages=[0.0, 1.0, 1.0],
        **changes,
    )


async def ask(asked: TrainingSample) -> list[list[float]]:
    engine: Any = ScoringEngine()
    renderer: Any = None
    teacher = PolicyRef(
        project="p", name="teacher", policy_version=0, adapter=None, engine=engine, renderer=renderer, max_context=8
    )
    return await ask_teacher(teacher, engine, [asked])


async def test_a_teacher_answers_for_every_learnt_token() -> None:
    assert await ask(sample()) == [[-1.0, -1.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7}, "temperature 0.7; distillation compares"),
        (
            {"constraints": [ConstrainedSpan(start=1, num_tokens=2, constraint=Constraint(kept=[[2], [3]]))]},
            r"groups\[0\] has an answer that was drawn from a part of the vocabulary .*without constraints",
        ),
    ],
    ids=["temperature", "constraint"],
)
async def test_other_samples_cannot_be_compared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        await ask(sample(**changes))
