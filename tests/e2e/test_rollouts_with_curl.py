"""The example with curl: a shell script makes the rollouts, a few lines train on them, and the policy gets better."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import art
from art.protocol.rollouts import RolloutQuery

EXAMPLE = Path(__file__).parents[2] / "examples/rollouts_with_curl"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_shell_script_is_trained(
    shared_backend: art.LocalBackend, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await shared_backend.open()
    training = asyncio.create_task(
        load(EXAMPLE / "train.py").train(shared_backend, str(tiny_model), num_steps=2, num_groups=2, rollouts=6)
    )
    script = await asyncio.create_subprocess_exec(
        "sh", str(EXAMPLE / "rollouts.sh"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {
            "ART_SERVER_URL": client.base_url, "ART_API_KEY": client.api_key or "", "STEPS": "2",
            "GROUPS_PER_STEP": "2", "ROLLOUTS": "6",
        },
    )  # fmt: skip
    (out, err), _ = await asyncio.wait_for(asyncio.gather(script.communicate(), training), 200)
    assert script.returncode == 0, err.decode()
    made = re.findall(r"step (\d+): mean reward ([\d.]+)", out.decode())
    trained = re.findall(r"step (\d+): trained on mean reward ([\d.]+)", capsys.readouterr().out)
    assert [step for step, _ in made] == ["0", "1"]
    rollouts = (await client.list_rollouts(RolloutQuery(project="shell", trained=True))).rollouts
    assert len(rollouts) == 24
    assert {rollout.first_policy_version for rollout in rollouts} == {0, 1}
    assert len({rollout.trained_by for rollout in rollouts}) == 2
    assert [(int(step) - 1, reward) for step, reward in trained] == [(int(step), reward) for step, reward in made]
