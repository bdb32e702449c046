"""What an agent asked a real model goes through a training step: every sampled token, at the ratio 1.

The model is tiny and has random weights, so it says nothing that an agent could use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import art
from art.config import EngineConfig, ModelSettings, TrainConfig
from art.testing.tiny_model import build_tiny_model
from art_agents.containers import ContainerEngine
from art_agents.harness import Harness
from art_tasks.harbor import HarborTask
from tests.agents.conftest import BASE
from tests.clients.model import MAX_CONTEXT

pytestmark = pytest.mark.timeout(1800)
TOLERANCE = 1e-4
"""How far an importance ratio may be from 1 while the policy is the one that sampled."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[art.TrainableModel]:
    base = build_tiny_model(tmp_path_factory.mktemp("base") / "model", warm_start_steps=0, context=MAX_CONTEXT)
    settings = ModelSettings(engine=EngineConfig(max_context=MAX_CONTEXT))
    model = art.TrainableModel(name="agent", project="agents", base_model=str(base), settings=settings)
    async with art.LocalBackend(path=tmp_path_factory.mktemp("data"), show_page=False) as backend:
        await model.register(backend)
        yield model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task that no random model does."""
    task = tmp_path / "write"
    for name, text in {
        "task.toml": 'instruction = "Write hello into answer.txt."\n[agent]\ntimeout_sec = 600.0\n'
        f'[environment]\nbuild_timeout_sec = 900.0\ndocker_image = "{BASE}"\n',
        "check.sh": "test -f answer.txt\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


@pytest.mark.asyncio(loop_scope="module")
async def test_rollouts_are_trained(
    containers: ContainerEngine, model: art.TrainableModel, harness: Harness, folder: Path
) -> None:
    task = HarborTask(folder, agent=harness.name, max_turns=3)
    (scenario,) = task.scenarios("train", seed=0, count=1)
    rollouts = [await task.rollout(model, scenario, rollout_index=i) for i in range(2)]
    for i, rollout in enumerate(rollouts):
        rollout.reward = float(i)
        assert rollout.metrics["num_turns"] >= 1
        assert rollout.metrics["duration"] > 0.5, "the agent's time, and not that of reading the record"
    step = await model.get_step()
    result = await model.train([art.TrajectoryGroup(rollouts)], TrainConfig(learning_rate=1e-3))
    assert (result.trained, result.step) == (True, step + 1)
    ratios = {result.metrics[f"offpolicy/ratio_{which}"] for which in ("p01", "p99", "max", "mean")}
    assert all(abs(ratio - 1) < TOLERANCE for ratio in ratios), ratios
    assert result.metrics["ledger/sampled_tokens"] == result.metrics["ledger/trained_tokens"] > 0
