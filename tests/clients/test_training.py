"""Rollouts of the same programs with a real model: sampled by the engine, recorded by the gateway, trained by the trainer.

The model is tiny and has random weights, so the form of its answers is the grammar's work alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

import art
from art.config import ModelSettings, RenderConfig, TrainConfig
from art.testing.tiny_model import build_tiny_model
from tests.clients.clients import CLIENTS
from tests.clients.model import PLACE
from tests.clients.program import each_client, run

pytestmark = pytest.mark.timeout(900)
MAX_CONTEXT = 16_384
TOLERANCE = 1e-4
"""How far an importance ratio may be from 1 while the policy is the one that sampled."""

SAYS_MORE = {"smolagents"}
"""Clients whose typed answer has code in it, which this model cannot write: they fail, and what they sampled is trained."""
TOO_LONG = {"claude-code", "codex"}
"""Clients whose prompts are longer than `MAX_CONTEXT`."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[art.TrainableModel]:
    """A tiny model on a server of its own, with room for the long prompts that some libraries write."""
    base = Path(build_tiny_model(tmp_path_factory.mktemp("base") / "model", task="yes_no_maybe", warm_start_steps=0))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_CONTEXT}))
    settings = ModelSettings(render=RenderConfig(chat_template_kwargs={"enable_thinking": False}))
    model = art.TrainableModel(name="agent", project="clients", base_model=str(base), settings=settings)
    async with art.LocalBackend(path=tmp_path_factory.mktemp("data")) as backend:
        await model.register(backend)
        yield model


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("task", ["trained"])
@pytest.mark.parametrize("name", each_client())
async def test_rollouts_are_trained(
    model: art.TrainableModel, name: str, task: str, record_property: Callable[[str, object], None]
) -> None:
    if name in SAYS_MORE:
        record_property(
            "note", "the typed answer holds code, which the small model cannot write: the program ends there"
        )
    if name in TOO_LONG:
        pytest.skip("its prompt is too long for the small model of this test")
    connection = await model.backend()._connection()
    step, group_id = await model.get_step(), f"{name}-{task}"
    for i in range(2):
        rollout_id = f"{group_id}-{i}"
        with pytest.raises(AssertionError) if name in SAYS_MORE else contextlib.nullcontext():
            said = await run(
                CLIENTS[name], "structured", url=f"{connection.base_url}/rollouts/{rollout_id}",
                key=connection.api_key or "", model=model.get_inference_name(),
            )  # fmt: skip
            assert said["answer"].keys() == PLACE.keys()
        await model.put_rollout(rollout_id, group_id=group_id, reward=float(i))
    groups = await model.collect_trajectory_groups(1, 2, timeout_s=60, pbar_desc=None)
    result = await model.train(groups, TrainConfig(learning_rate=1e-3))
    assert (result.trained, result.step) == (True, step + 1)
    ratios = {result.metrics[f"offpolicy/ratio_{which}"] for which in ("p01", "p99", "max", "mean")}
    assert all(abs(ratio - 1) < TOLERANCE for ratio in ratios), ratios
    assert result.metrics["ledger/sampled_tokens"] == result.metrics["ledger/trained_tokens"] > 0
