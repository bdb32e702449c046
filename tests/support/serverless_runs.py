"""A backend, model and rollouts against the fake of the serverless service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import art
from art_cloud.serverless_service import Patience
from tests.support.fake_serverless import BASE_MODEL, KEY, FakeServerless

QUICK = Patience(poll_s=0.001, answer_s=20.0, checkpoint_s=0.05, lost_job_s=30.0, job_s=20.0)


def open_backend(
    fake: FakeServerless, folder: Path, patience: Patience = QUICK, **options: Any
) -> art.ServerlessBackend:
    return art.ServerlessBackend(KEY, fake.base_url, path=folder, patience=patience, **options)


def new_model(folder: Path, **fields: Any) -> art.TrainableModel:
    fields = {"name": "agent", "project": "shop", "base_model": BASE_MODEL, "report_metrics": []} | fields
    return art.TrainableModel(base_path=str(folder), **fields)


async def rollout(model: Any, reward: float) -> art.Trajectory:
    messages: Any = [{"role": "user", "content": "yes, no or maybe?"}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages
    )
    return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=reward, metrics={"turns": 1})


async def group(model: Any, *rewards: float) -> art.TrajectoryGroup:
    return art.TrajectoryGroup([await rollout(model, reward) for reward in rewards])
