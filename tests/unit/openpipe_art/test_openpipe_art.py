"""The names of older articles, over a server that is faked behind its HTTP interface."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import art
import openpipe_art
from art.errors import ConfigError, JudgeError
from art.protocol.training import ModelStatus
from art.rewards import Ruler
from art.task import Scenario, Split, Task, TaskDefaults
from openpipe_art import ArtClient, AsyncArtClient
from openpipe_art.client import _scorer
from tests.support.fake_art_server import FakeArtServer


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


class Lottery(Guess):
    """Every fifth rollout fails; of the others each second one is right."""

    name = "lottery"

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        index = int(scenario.inputs["prompt"].split()[-1])
        if index % 5 == 4:
            raise OSError("the drum is stuck")
        trajectory = await super().rollout(model, scenario, rollout_index=index // 5 + index % 5, step=step)
        trajectory.metrics["draw"] = 1.0
        return trajectory


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
    with pytest.raises(ConfigError, match="does not take a prompt"):
        client.run_agent("tic_tac_toe", "hello")
    with pytest.raises(ConfigError, match="no task is named"):
        client.run_agent("chess")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a judge is asked that gives 1 less the reward so far, and fails for `model="broken"`."""
    asked: list[Any] = []
    meeting = threading.Barrier(2)

    async def judge(group: art.TrajectoryGroup, judge_model: Any, **further: Any) -> art.TrajectoryGroup:
        asked.append((judge_model, further))
        if judge_model == "meets another":
            await asyncio.to_thread(meeting.wait, 60)
        if judge_model == "broken":
            await asyncio.sleep(0.1)  # so that the failure comes after the call returned, whatever thread runs first
            raise JudgeError("no usable scores")
        scored = [t.model_copy(update={"reward": 1.0 - t.reward, "logs": ["why"]}) for t in group]
        return art.TrajectoryGroup(scored)

    monkeypatch.setattr("openpipe_art.client.score_group", judge)
    return asked


def test_a_list_of_trajectories_is_judged(asked: list[Any]) -> None:
    given = [art.Trajectory(reward=reward) for reward in (0.25, 0.5, 1.0)]
    scored = openpipe_art.ruler_score_group(given, model="openai/o3", debug=True)
    assert [t.reward for t in scored] == [t.reward for t in given] == [0.75, 0.5, 0.0]
    assert (len(scored), scored[0], list(scored), scored[1:]) == (3, given[0], given, given[1:])
    assert scored == given
    assert given[0].logs == ["why"]
    assert asked == [("openai/o3", {"debug": True, "swallow_exceptions": False})]
    with pytest.raises(JudgeError, match="no usable scores"):
        openpipe_art.ruler_score_group(given, model="broken")
    assert [t.reward for t in given] == [0.75, 0.5, 0.0]


async def test_it_may_be_awaited_and_need_not_be(asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = ([art.Trajectory(reward=0.25)] for _ in range(3))
    one, two = await asyncio.gather(
        *(openpipe_art.ruler_score_group(t, model="meets another") for t in (first, second))
    )
    assert [t.reward for t in [*one, *two]] == [0.75, 0.75]
    assert [t.reward for t in openpipe_art.ruler_score_group(third, model="openai/o3")] == [0.75]
    with pytest.raises(JudgeError, match="no usable scores"):
        await openpipe_art.ruler_score_group(first, model="broken")
    assert "trajectories keep their rewards, because scoring them failed: no usable scores" in caplog.text


def test_rewards_that_were_set_are_trained_on(client: ArtClient, server: FakeArtServer) -> None:
    runs = [client.run_agent(Guess(), "which one?") for _ in range(3)]
    assert [t.reward for t in runs] == [0.0, 1.0, 0.0], "each is another rollout"
    for run, reward in zip(runs, [0.5, 0.25, 0.125], strict=True):
        run.reward = reward
    client.run_agent(Guess(), index=2)  # keeps the reward of the task
    reports = client.train(2)
    bodies = [body for method, path, body in server.requests if path.endswith("/train")]
    rewards = [[[t["reward"] for t in group["trajectories"]] for group in body["groups"]] for body in bodies]
    assert rewards == [[[0.5, 0.25, 0.125]], [[0.0, 1.0], [0.0, 1.0]]]
    assert [report.step for report in reports] == [5, 6]
    client.train(1)
    last = [body for _, path, body in server.requests if path.endswith("/train")][-1]
    assert len(last["groups"]) == 2, "they are trained on once"


async def test_training_waits_for_scores_that_are_under_way(
    asked: list[Any], server: FakeArtServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client = AsyncArtClient("http://art.test", "key")
    client._backend._client = server.client()
    runs = [await client.run_agent(Guess(), "which one?") for _ in range(2)]
    openpipe_art.ruler_score_group(runs, model="openai/o3")
    await client.train(1)
    (body,) = [body for method, path, body in server.requests if path.endswith("/train")]
    assert [t["reward"] for t in body["groups"][0]["trajectories"]] == [1.0, 0.0]
    await client.close()


def test_a_judge_gives_the_rewards_of_training(client: ArtClient, server: FakeArtServer) -> None:
    client.train(1, task=Guess(), judge=lambda trajectory: 10.0 - trajectory.reward)
    (body,) = [body for method, path, body in server.requests if path.endswith("/train")]
    assert [t["reward"] for t in body["groups"][0]["trajectories"]] == [10.0, 9.0]
    scorer = _scorer("openai/o3")
    assert scorer is not None
    assert isinstance(scorer._judge, Ruler)
    with pytest.raises(ConfigError):
        client.train(1, judge=object())


def test_an_evaluation_has_mean_interval_and_number(client: ArtClient) -> None:
    with pytest.raises(ConfigError, match="`evaluate` does not know the task yet"):
        client.evaluate()
    found = client.evaluate(Lottery(), count=50)
    assert (found.task, found.n, found.num_failed) == ("lottery", 40, 10)
    assert found.mean_reward == pytest.approx(0.5)
    low, high = found.interval
    assert 0.3 < low < 0.5 < high < 0.7
    assert found.metrics == {"draw": 1.0}
    assert found.trajectories[0].messages()[-1]["content"].startswith("shop/agent: test")
    assert "trajectories" not in repr(found)
    assert client.evaluate(count=5).task == "lottery"
