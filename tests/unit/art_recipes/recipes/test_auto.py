"""`art auto` without a server: folders, kept options, what is refused before anything is paid; and the task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import art
from art.cli.main import main
from art.errors import ArtError, BudgetError, ConfigError, JudgeError, TrainingError
from art.recipes import Progress
from art.rewards import Ruler, judge_client
from art.testing.scripted_server import Reply, ScriptedServer
from art.testing.scripted_server import completion as completed
from art_recipes import judged as judged_run
from art_recipes.autorl import AutoConfig, folder_of, slug
from art_recipes.dataset_task import DatasetTask
from art_recipes.judged import JudgedRun, faults_of
from art_recipes.report import Report
from art_recipes.scenarios import Dataset, TaskText, WrittenScenario
from art_recipes.scripted_generator import ScriptedGenerator
from art_recipes.training.progress import Course

SENTENCE = "Answer the questions of guests"
INPUTS = [f"{word} the {thing}?" for word in ("where is", "who made", "I want") for thing in "abcdefghij"]


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedGenerator]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judge_client, "_has_litellm", lambda: False)  # importing it takes seconds
    with ScriptedGenerator(inputs=INPUTS) as started:
        yield started


def write(generator: ScriptedGenerator, *options: str, what: str = SENTENCE) -> int:
    arguments = ["--generator", "openai/g", "--generator-url", generator.base_url, "--write-only", "--out", "guests"]
    return main(["auto", what, *arguments, *options])


# -- writing --


def test_files_are_written_shown_and_never_written_anew(
    generator: ScriptedGenerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(generator, "--num-scenarios", "20", "--instructions", "Be odd.") == 0
    shown = capsys.readouterr().out
    assert "where is the a?" in shown
    assert "20 scenarios: " in shown
    assert all("Be odd." in str(request["messages"]) for request in generator.requests)
    asked = len(generator.requests)
    path = tmp_path / "guests" / "scenarios.jsonl"
    path.write_text(path.read_text() + '{"input": "mine", "split": "test"}\n')
    assert write(generator, "--num-scenarios", "30") == 0
    assert main(["auto", "guests", "--write-only"]) == 0
    assert len(generator.requests) == asked
    assert "21 scenarios" in capsys.readouterr().out


def test_a_rubric_of_ones_own(generator: ScriptedGenerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rubric.md").write_text("Short is good.\n")
    write(generator, "--num-scenarios", "8", "--judge-rubric", "rubric.md")
    assert Dataset.load(tmp_path / "guests").task.rubric == "Short is good."
    assert write(generator, "--judge-rubric", "rubric.md") == 0
    (tmp_path / "rubric.md").write_text("Long is good.\n")
    assert write(generator, "--judge-rubric", "rubric.md") == 1
    assert "task.toml by now: edit it there" in capsys.readouterr().err


def test_a_failed_generator_leaves_no_half_of_a_task(
    generator: ScriptedGenerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator.always = "not_json"
    assert write(generator) == 1
    assert "Here are some ideas" in capsys.readouterr().err
    generator.always = None
    assert write(generator, "--num-scenarios", "8") == 0
    assert len(Dataset.load(tmp_path / "guests").scenarios) == 8


# -- what is refused --


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["auto", "gests"], "'gests' is no folder, and too short to describe a task"),
        (["auto", SENTENCE], "say what to train by `--model`"),
        (
            ["auto", SENTENCE, "--write-only", "--num-scenarios", "1"],
            "`--num-scenarios` must be greater than or equal to 2",
        ),
        (["auto", "empty"], "the folder empty has no task.toml"),
        (
            ["auto", "x", "--held-out-rollouts", "-1"],
            "`--held-out-rollouts` must be greater than or equal to 0, got -1",
        ),
    ],
)
def test_wrong_calls(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_folder_holds_one_task(generator: ScriptedGenerator, capsys: pytest.CaptureFixture[str]) -> None:
    write(generator, "--num-scenarios", "8")
    assert write(generator, what="Answer the questions of staff") == 1
    assert f"holds another task: '{SENTENCE}'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="`--out x` has no meaning"):
        folder_of("guests", Path("x"))


def test_mistakes_in_the_files_are_found_before_training(
    generator: ScriptedGenerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(generator, "--num-scenarios", "8")
    path = tmp_path / "guests" / "scenarios.jsonl"
    path.write_text(path.read_text().replace('"test"', '"train"'))
    assert main(["auto", "guests", "--model", "m"]) == 1
    assert "no scenario is in split 'test'" in capsys.readouterr().err


def test_slugs() -> None:
    assert (
        slug("Answer questions about our café's opening hours, politely") == "answer-questions-about-our-cafes-opening"
    )
    assert slug("日本語 だけ です") == "task"
    assert folder_of("one two three", None) == (Path("auto") / "one-two-three").resolve()


# -- how a run ends --


def run_of(task: DatasetTask, folder: Path, said: list[Progress], *, step: int = 0, **settings: Any) -> JudgedRun:
    config = AutoConfig(name="m", project="p", base_model="b", data_dir=folder, held_out_rollouts=1, **settings)
    return JudgedRun(
        config=config, model=config.make_model(), task=task, judge=Ruler("openai/j"), out=folder, step=step,
        on_progress=said.append,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "compares", "over_budget"),
    [
        (TrainingError("solved, or collapsed"), True, False),
        (JudgeError("down"), False, False),
        (BudgetError("0"), False, True),
    ],
)
async def test_a_run_that_ends_early_is_reported(
    error: ArtError, compares: bool, over_budget: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    task = task_of(WrittenScenario(input="a"))

    async def train(run: JudgedRun, *_: object) -> None:
        run.step = 4
        raise error

    async def compare(*_: object, **__: object) -> None:
        done.append("compared")

    async def book(*_: object) -> None:
        done.append("booked")

    for name, stand_in in (("train", train), ("compare", compare), ("book_last", book)):
        monkeypatch.setattr(judged_run, name, stand_in)
    run = run_of(task, tmp_path, [])
    ending = judged_run.train_and_compare(
        run, held_out=[], describe=lambda: Report(title="t", summary="s", faults=[run.stopped])
    )
    if over_budget:
        assert (await ending).is_over_budget
    else:
        with pytest.raises(type(error)):
            await ending
    assert done == ["compared"] * compares + ["booked"]
    assert str(error) in (tmp_path / "report.html").read_text()


async def test_nothing_is_compared_with_a_step_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def train(run: JudgedRun) -> None:
        run.step = 4

    async def nothing(*_: object) -> None: ...

    for name, stand_in in (("train", train), ("book_last", nothing), ("compare", None)):
        monkeypatch.setattr(judged_run, name, stand_in)
    task = task_of(WrittenScenario(input="a"))
    said: list[Progress] = []
    run = run_of(task, tmp_path, said, full_finetuning=True, engine="vllm")
    result = await judged_run.train_and_compare(
        run, held_out=[],
        describe=lambda: Report(title="t", summary="s", faults=faults_of(run, Course(step=4, num_steps=4, reports=[]))),
    )  # fmt: skip
    assert (result.is_untrained, result.headline) == (False, None)
    assert ("no comparison with the untrained policy" in said[0].text, said[0].kind) == (True, "warning")
    assert "one step at a time" in (tmp_path / "report.html").read_text()


# -- the task --


def task_of(*lines: WrittenScenario) -> DatasetTask:
    text = TaskText(description="d", system_prompt="Be brief.", max_completion_tokens=7, temperature=0.5)
    return DatasetTask(Dataset(task=text, scenarios=list(lines)))


def test_scenarios_of_a_data_set() -> None:
    lines = [WrittenScenario(input=f"q {i}", split="train", difficulty=1 + i % 5) for i in range(6)]
    task = task_of(*lines, WrittenScenario(input="t 0", split="test"), WrittenScenario(input="t 1", split="test"))
    first = task.scenarios("train", seed=1, count=4)
    assert first == task.scenarios("train", seed=1, count=4)
    assert first != task.scenarios("train", seed=2, count=4)
    assert len({scenario.id for scenario in first}) == 4
    many = task.scenarios("train", seed=1, count=9)
    assert len({scenario.id for scenario in many}) == 6
    assert len({scenario.seed for scenario in many}) == 9, "one that comes twice draws other numbers"
    held_out = task.scenarios("test", seed=1, count=9)
    assert [scenario.inputs for scenario in held_out] == [{"input": "t 0"}, {"input": "t 1"}]
    assert not {scenario.id for scenario in many} & {scenario.id for scenario in held_out}
    with pytest.raises(ConfigError, match="no scenario is in split 'val'"):
        task.scenarios("val", seed=1, count=1)


async def test_a_rollout_of_a_data_set() -> None:
    bodies = []

    def reply(body: dict[str, object]) -> Reply:
        bodies.append(body)
        status, answer = completed(body, {"content": "yes"})
        answer["choices"][0]["finish_reason"] = "stop" if len(bodies) == 1 else "length"
        return status, answer

    task = task_of(WrittenScenario(input="is it?"))
    scenario = task.prompt_scenario("is it?")
    with ScriptedServer(reply) as server:
        model = art.Model[None](name="m", project="p", inference_base_url=server.base_url, inference_api_key="none")
        done, cut = [await task.rollout(model, scenario, rollout_index=i) for i in range(2)]
    assert [message["content"] for message in done.messages()] == ["Be brief.", "is it?", "yes"]
    assert (bodies[0]["max_completion_tokens"], bodies[0]["temperature"]) == (7, 0.5)
    assert bodies[0]["seed"] != bodies[1]["seed"]
    assert (done.metrics["cut_short"], done.metadata["outcome"], done.reward) == (0.0, "ok", 0.0)
    assert (cut.metrics["cut_short"], cut.metadata["outcome"]) == (1.0, "policy_fault")
    assert json.dumps(done.for_logging())
