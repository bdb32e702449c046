"""An environment of the real verifiers against the real application: its rewards, our record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError, ToolServerError
from art.messages import is_choice
from art_tasks.verifiers import VerifiersTask
from tests.support.gateway import make_tokenizer
from tests.support.served_app import ServedApp, serve_app

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")

ENVIRONMENTS = Path(__file__).parents[2] / "support" / "environments"
CONFIG = {"taskset": {"id": "look_up_env"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifiers import the environments of these tests by name."""
    monkeypatch.syspath_prepend(ENVIRONMENTS)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    async with serve_app(tmp_path, tokenizer_dir) as opened:
        yield opened


def call(key: str) -> str:
    return f'<tool_call>\n{{"name": "look_up", "arguments": {{"key": "{key}"}}}}\n</tool_call>'


def answer_by_prompt(served: ServedApp) -> None:
    """Let the engine ask the tool and say what that said, whatever the key."""
    renderer = served.app.bench.renderer
    tokenizer = renderer.tokenizer

    def script(request: Any) -> list[int]:
        text = tokenizer.text(request.prompt_token_ids)
        key = text.split("what is ")[1].split("?")[0]
        said = f"it is name of {key}" if f"name of {key}" in text else call(key)
        return [*tokenizer.encode(said, add_special_tokens=False), renderer.stop_token_ids[0]]

    served.app.bench.engine.script = script


async def test_rollouts_at_once(served: ServedApp) -> None:
    answer_by_prompt(served)
    task = VerifiersTask(CONFIG, sampling={"max_tokens": 100})
    scenarios = task.scenarios("train", seed=0, count=3)
    group = await art.TrajectoryGroup(task.rollout(served.policy, scenario) for scenario in scenarios)
    for trajectory in group:
        roles = [message["role"] for message in trajectory.messages()]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert (trajectory.reward, trajectory.metrics["reward/named"], trajectory.metrics["num_turns"]) == (2.0, 2.0, 2)
        assert trajectory.metrics["length"] == len(trajectory.messages()[-1]["content"])
        assert trajectory.tools is not None
        assert trajectory.tools[0]["function"]["name"] == "look_up"
        assert all(item.exchange_id for item in trajectory.messages_and_choices if is_choice(item))
        assert trajectory.metadata["outcome"] == "ok"
    assert {request.temperature for request in served.app.bench.engine.requests} == {1.0}
    assert {request.max_tokens for request in served.app.bench.engine.requests} == {100}


def test_each_task_has_one_split() -> None:
    task = VerifiersTask(CONFIG)
    keys = {
        split: {scenario.inputs["key"] for scenario in task.scenarios(split, seed=0, count=400)}
        for split in ("train", "val", "test")
    }
    assert sum(map(len, keys.values())) == len(set().union(*keys.values())) == 40
    assert task.scenarios("test", seed=3, count=5) == VerifiersTask(CONFIG).scenarios("test", seed=3, count=5)


async def test_a_failure_is_no_reward_of_0(served: ServedApp) -> None:
    task = VerifiersTask(CONFIG)
    (scenario,) = task.scenarios("test", seed=0, count=1)
    served.app.bench.answers("break the judge")
    with pytest.raises(ToolServerError, match="no more disk"):
        await task.rollout(served.policy, scenario)
    with pytest.raises(ConfigError, match="not trainable"):
        await task.rollout(served.outside, scenario)


async def test_a_full_context_is_the_policys_fault(served: ServedApp) -> None:
    task = VerifiersTask(CONFIG)
    (scenario,) = task.scenarios("test", seed=0, count=1)
    served.app.bench.answers(call("x" * 2500))
    trajectory = await task.rollout(served.policy, scenario)
    assert (trajectory.reward, trajectory.metadata["outcome"]) == (0.0, "policy_fault")
    assert is_choice(trajectory.messages_and_choices[1])
