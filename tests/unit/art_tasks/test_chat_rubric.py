"""The task `chat_rubric`: prompts from files, the messages that a policy is shown, the built-in requests, the judge."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from art.cli.main import main
from art.errors import ConfigError
from art.task import get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory
from art_recipes.training.comparison import CheckpointComparison, ComparedScenario
from art_recipes.training.task_training import train
from art_tasks.chat_rubric import ChatRubric, read_prompts


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_of_every_kind_of_file(tmp_path: Path) -> None:
    lines = write(tmp_path, "a.txt", "Hello", "", "  Good night ", "Hello")
    assert [prompt.prompt for prompt in read_prompts(lines)] == ["Hello", "Good night"]
    rows = [{"prompt": "Hello", "id": 3}, {"prompt": "Bye", "split": "test"}]
    hello, bye = read_prompts(write(tmp_path, "b.jsonl", *map(json.dumps, rows)))
    assert (hello.prompt, hello.split, bye.prompt, bye.split) == ("Hello", None, "Bye", "test")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("a.csv", "Hello", "expected a file that ends in .txt or .jsonl"),
        ("a.txt", "  ", "there is no prompt in it"),
        ("a.jsonl", "Hello", "a.jsonl:1: this is not JSON"),
        ("a.jsonl", '"Hello"', "a.jsonl:1: "),
        ("a.jsonl", '{"text": "Hello"}', "prompt: Field required"),
        ("a.jsonl", '{"prompt": 3}', "prompt"),
        ("a.jsonl", '{"prompt": "Hello", "split": "dev"}', "split"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path, name: str, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatRubric(prompts=str(write(tmp_path, name, line)))
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatRubric(prompts=str(tmp_path / "missing.txt"))


def test_no_prompt_is_in_two_splits(tmp_path: Path) -> None:
    task = ChatRubric(prompts=str(write(tmp_path, "a.txt", *(f"How far is it to town {i}?" for i in range(300)))))
    train_, val, test = (
        {scenario.inputs["input"] for scenario in task.scenarios(split, seed=0, count=count)}  # type: ignore[arg-type]
        for split, count in (("train", 2000), ("val", 400), ("test", 400))
    )
    assert not train_ & (val | test)
    assert not val & test
    assert len(train_ | val | test) == 300
    assert all(s.id.startswith(task.label) for s in task.scenarios("val", seed=0, count=2))


def test_what_the_policy_is_shown(tmp_path: Path) -> None:
    path = str(write(tmp_path, "a.jsonl", '{"prompt": "Hello", "split": "train"}', '{"prompt": "Hi", "split": "val"}'))
    task = ChatRubric(prompts=path, system_prompt="Be brief.")
    (scenario,) = task.scenarios("train", seed=0, count=1)
    hello = {"role": "user", "content": "Hello"}
    assert task.opening(scenario) == [{"role": "system", "content": "Be brief."}, hello]
    assert ChatRubric(prompts=path).opening(scenario) == [hello]
    assert task.opening(task.prompt_scenario("And now?"))[1:] == [{"role": "user", "content": "And now?"}]


class Thankful(ChatRubric):
    """The task with a player for its built-in requests."""

    def player(self, scenario: Any, *, rollout_index: int = 0) -> Any:
        return lambda messages, tools: {"content": "Dear Ada, many thanks for the lamp."}


async def test_a_rollout_leaves_the_reward_to_the_judge() -> None:
    task = Thankful(prompts="sample")
    scenario = task.prompt_scenario("Thank Ada for the lamp.")
    trajectory = await ScriptedModel(task).play(scenario)
    assert trajectory.reward == 0.0
    assert trajectory.metadata["scenario_id"] == scenario.id
    assert task.score_messages(trajectory.messages()) == (1.0, "It lacks nothing.")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Dear Ada, many thanks for the lamp.", 1.0),
        ("Ada, thanks for the lamp.", 0.7),
        ("Dear Hugo, thanks for the drum.", 0.1),
        ("Dear Hugo, many thanks for the drum.", 0.4),
        ("Thanks!", 0.0),
        ("", 0.0),
    ],
)
def test_scores_of_built_in_requests(answer: str, score: float) -> None:
    messages = [{"role": "user", "content": "Thank Ada for the lamp."}, {"role": "assistant", "content": answer}]
    assert ChatRubric(prompts="sample").score_messages(messages)[0] == pytest.approx(score)


def test_play_is_as_good_as_its_skill() -> None:
    task: Any = get_task("chat_rubric", is_tiny=True)
    rng = random.Random(0)
    for skill, low, high in ((0.0, 0.1, 0.3), (1.0, 1.0, 1.0)):
        scores = [task.score_messages(task.play(rng, skill).messages)[0] for _ in range(50)]
        assert low <= sum(scores) / 50 <= high


def test_a_task_of_ones_own_prompts_has_no_play_and_no_scores(tmp_path: Path) -> None:
    task = ChatRubric(prompts=str(write(tmp_path, "a.txt", "Hello", "Bye")))
    with pytest.raises(ConfigError, match="pretrained model by --base-model"):
        task.play(random.Random(0), 0.5)
    with pytest.raises(ConfigError, match="with --score"):
        task.score_messages([])
    with pytest.raises(ConfigError, match="-o prompts=FILE"):
        ChatRubric().scenarios("train", seed=0, count=1)


async def test_without_a_judge_there_is_nothing_to_train_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'chat_rubric' has no reward of its own: say who judges by --judge MODEL"):
        await train("chat_rubric", "./tiny")


@pytest.mark.parametrize("command", ["train chat_rubric", "demo --task chat_rubric"])
def test_commands_ask_for_a_judge_before_a_tiny_model_is_made(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) != 0
    output = capsys.readouterr()
    assert "say who judges by --judge" in " ".join((output.out + output.err).split())
    assert not list(tmp_path.rglob("*.safetensors"))


def test_scores_of_two_checkpoints_become_evaluations() -> None:
    def scored(*rewards: float) -> list[Trajectory]:
        return [Trajectory(messages_and_choices=[], reward=reward) for reward in rewards]

    scenarios = ChatRubric(prompts="sample").scenarios("test", seed=0, count=2)
    pairs = [(scored(0.1, 0.3), scored(0.5, 0.7)), (scored(0.4), scored(0.6))]
    compared = [ComparedScenario(scenario=s, before=b, after=a) for s, (b, a) in zip(scenarios, pairs, strict=True)]
    comparison = CheckpointComparison(compared=compared, num_left_out=0, num_failed_rollouts=0)
    before, after = comparison.evaluations()
    assert (before.mean, after.mean) == pytest.approx((0.3, 0.6))
    assert (len(before.trajectories), len(after.trajectories)) == (3, 3)
    assert comparison.change().mean == pytest.approx(0.3)
