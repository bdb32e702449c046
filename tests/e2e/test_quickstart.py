"""The README's script, as printed, and the same loop in the older style of training call: both learn."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import art

ROOT = Path(__file__).parents[2]
PROMPTS = ["respond with yes or no", "say yes, no or maybe", "answer maybe, no or yes", "yes or maybe?"]
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


def test_readme_script_learns(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(tiny_model)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart/quickstart.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rewards = [float(value) for value in re.findall(r"reward \+([\d.]+)", done.stdout)]
    assert rewards[0] < 0.85
    assert rewards[-1] > 0.95
    history = tmp_path / ".art/yes-no-maybe/models/agent-001/history.jsonl"
    assert len(history.read_text().splitlines()) >= 2


async def rollout(model: art.TrainableModel, prompt: str) -> art.Trajectory:
    messages = [{"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=8
    )
    trajectory = art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=0.0)
    trajectory.reward = REWARDS.get(trajectory.messages()[-1]["content"], 0.0)
    return trajectory


@pytest.mark.slow
def test_the_2025_style_learns_too(tiny_model: Path, tmp_path: Path) -> None:
    async def run() -> list[float]:
        rewards = []
        async with art.LocalBackend(path=tmp_path) as backend:
            model = art.TrainableModel(name="older", project="yes-no-maybe", base_model=str(tiny_model))
            model._internal_config = art.dev.InternalModelConfig(init_args={"max_seq_length": 256})
            await model.register(backend)
            for _ in range(await model.get_step(), 8):
                groups = await art.gather_trajectory_groups(
                    (art.TrajectoryGroup(rollout(model, prompt) for _ in range(16)) for prompt in PROMPTS),
                    pbar_desc=None,
                )
                rewards.append(sum(t.reward for group in groups for t in group) / (16 * len(PROMPTS)))
                await model.train(groups, config=art.TrainConfig(learning_rate=5e-3))
            await model.delete_checkpoints()
        return rewards

    rewards = asyncio.run(run())
    assert rewards[-1] > rewards[0] + 0.1
