"""The names of older articles, over a server that is faked behind its HTTP interface."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_art_server import FakeArtServer

import art
import openpipe_art
from art.errors import ConfigError
from art.protocol.training import ModelStatus
from art.task import Scenario, Split, Task, TaskDefaults, get_task
from openpipe_art import ArtClient, AsyncArtClient


class Guess(Task):
    """Says what it is asked; every second rollout is right."""

    name = "guess"
    description = "guess"
    defaults = TaskDefaults(learning_rate=1e-3, num_steps=3, groups_per_step=2, rollouts_per_group=2)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, i, {"prompt": f"{split} {i}"}) for i in range(count)]

    def prompt_scenario(self, prompt: str) -> Scenario:
        return Scenario(id="guess/prompt", seed=0, inputs={"prompt": prompt})

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        said = f"{model.get_inference_name(step)}: {scenario.inputs['prompt']}"
        items: Any = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": said}]
        return art.Trajectory(messages_and_choices=items, reward=float(rollout_index % 2))


@pytest.fixture
def server() -> FakeArtServer:
    server = FakeArtServer()
    server.models["shop/agent"] = ModelStatus(
        project="shop", name="agent", base_model="hub/base", step=4, inference_name="shop/agent"
    )
    return server


@pytest.fixture
def client(server: FakeArtServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ArtClient:
    monkeypatch.chdir(tmp_path)
    return connect(server)


def connect(server: FakeArtServer, **further: Any) -> ArtClient:
    client = ArtClient("http://art.test", "key", **further)
    client._client._backend._client = server.client()
    return client


def test_an_agent_runs_on_the_servers_only_model(client: ArtClient, server: FakeArtServer) -> None:
    trajectory = client.run_agent(Guess(), "which one?")
    assert trajectory.messages()[-1]["content"] == "shop/agent: which one?"
    assert client.run_agent(Guess(), index=3, step=2).messages()[-1]["content"] == "shop/agent@2: val 3"
    assert server.settings == {}  # what the model was registered with stays


def test_training_goes_on_from_where_the_model_stands(client: ArtClient, server: FakeArtServer) -> None:
    with pytest.raises(ConfigError, match="pass `task=`"):
        client.train(2)
    seen: list[int] = []
    reports = client.train(
        2, task=Guess(), learning_rate=3e-3, rollouts=4, on_step=lambda report: seen.append(report.step)
    )
    assert [report.step for report in reports] == seen == [5, 6]
    assert [report.reward for report in reports] == [0.5, 0.5]
    bodies = [body for method, path, body in server.requests if path.endswith("/train")]
    assert [body["config"]["learning_rate"] for body in bodies] == [3e-3, 3e-3]
    assert [[len(group["trajectories"]) for group in body["groups"]] for body in bodies] == [[4, 4]] * 2
    client.run_agent(Guess())
    client.train(1)
    assert server.models["shop/agent"].step == 7


async def test_the_same_in_an_event_loop(server: FakeArtServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = AsyncArtClient("http://art.test", "key")
    client._backend._client = server.client()
    assert (await client.run_agent(Guess(), "now?")).messages()[-1]["content"].endswith("now?")
    assert len(await client.train(1)) == 1
    await client.close()
    # Code that has no loop of its own, called from one that runs: a notebook.
    assert connect(server).run_agent(Guess(), "here?").messages()[-1]["content"].endswith("here?")


def test_which_model_must_be_clear(client: ArtClient, server: FakeArtServer) -> None:
    other = server.models["shop/other"] = server.models["shop/agent"].model_copy(
        update={"name": "other", "inference_name": "shop/other"}
    )
    with pytest.raises(ConfigError, match=r"several models \(shop/agent, shop/other\)"):
        client.run_agent(Guess())
    assert "shop/other" in connect(server, model="shop/other").run_agent(Guess()).messages()[-1]["content"]
    new = connect(server, model="new/one", base_model=other.base_model)
    assert "new/one" in new.run_agent(Guess()).messages()[-1]["content"]
    assert server.models["new/one"].base_model == "hub/base"
    with pytest.raises(ConfigError, match="written project/name"):
        connect(server, model="one")
    server.models.clear()
    with pytest.raises(ConfigError, match="pass `base_model=`"):
        connect(server).run_agent(Guess())


def test_tasks_without_a_user_take_no_prompt(client: ArtClient) -> None:
    with pytest.raises(ConfigError, match="takes no prompt"):
        client.run_agent("tic_tac_toe", "hello")
    with pytest.raises(ConfigError, match="no task is named"):
        client.run_agent("chess")


def test_prompts_of_the_ready_tasks() -> None:
    assert get_task("yes_no_maybe").prompt_scenario("yes?").inputs == {"prompt": "yes?"}
    assert get_task("search_emails").prompt_scenario("who?").inputs["prompt"] == "who?"


def test_a_list_of_trajectories_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def judge(group: art.TrajectoryGroup, judge_model: Any, **further: Any) -> art.TrajectoryGroup:
        asked.append((judge_model, further))
        scored = [t.model_copy(update={"reward": 1.0 - t.reward}) for t in group]
        return art.TrajectoryGroup(scored)

    monkeypatch.setattr("openpipe_art.judging.score_group", judge)
    given = [art.Trajectory(reward=random.Random(i).random()) for i in range(3)]
    scored = openpipe_art.ruler_score_group(given, model="openai/o3", debug=True)
    assert [t.reward for t in scored] == [1.0 - t.reward for t in given]
    assert asked == [("openai/o3", {"debug": True, "swallow_exceptions": False})]
