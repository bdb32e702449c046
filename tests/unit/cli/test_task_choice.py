"""Which task a command is about: options on the command line, and the smaller form for tiny models."""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
from art.cli.arguments import add_task_options
from art.cli.main import main
from art.errors import ConfigError
from art.rewards import DEFAULT_RUBRIC, GroupScorer
from art.task.names import TinyForm
from art.testing.judge import ScriptedJudge
from art_recipes import judge_command as judge
from art_recipes.arguments import task_for
from art_recipes.screen import Screen
from art_recipes.tiny_model_command import default_folder
from art_recipes.training.task_training import TaskTrainingConfig
from tests.support.board_task import BoardTask

BOARD = "tests.support.board_task:BoardTask"
Choose = Callable[..., tuple[Any, str]]


@pytest.fixture
def choose() -> Choose:
    def choose(*options: str, task: str = BOARD, base_model: str | None = None) -> tuple[Any, str]:
        parser = argparse.ArgumentParser()
        add_task_options(parser)
        args = parser.parse_args([word for option in options for word in ("-o", option)])
        args.task, screen = task, io.StringIO()
        task_object = task_for(Screen(file=screen, width=60), args, base_model)
        return task_object.options.model_dump(exclude_defaults=True), screen.getvalue()

    return choose


def tiny_folder(path: Path, task: Any) -> str:
    path.mkdir()
    (path / "tiny_model.json").write_text(json.dumps({"seed": 0, "task": task}))
    return str(path)


def test_without_a_base_model_the_task_is_the_one_for_tiny_models(choose: Choose) -> None:
    options, said = choose("chance=0.5")
    assert options == {"size": 3, "form": "tool", "chance": 0.5}
    assert said == "board in the form for tiny models: -o size=3 -o form=tool. Other base models get the full form\n"
    assert choose("size=5", "form=xml") == ({"size": 5}, ""), "the user's own options win"
    assert choose(task="tic_tac_toe") == ({}, "")


def test_a_base_model_from_elsewhere_gets_the_full_form(choose: Choose) -> None:
    assert choose("chance=0.5", base_model="Qwen/Qwen3-0.6B") == ({"chance": 0.5}, "")


def test_a_tiny_model_gets_the_form_that_it_was_made_for(choose: Choose, tmp_path: Path) -> None:
    made_for = TinyForm.of_task(BoardTask(size=5, shows_history=False)).model_dump()
    base_model = tiny_folder(tmp_path / "tiny", made_for)
    options, said = choose(base_model=base_model)
    assert options == {"size": 5, "shows_history": False}
    assert said.startswith("board in the form for tiny models: -o size=5 -o shows_history=false. ")
    options, said = choose("size=6", base_model=base_model)
    assert options == {"size": 6, "shows_history": False}
    assert f"{base_model} is a tiny model made for board-size-5-shows_history-false, not for board-size-6-" in said
    older = {**made_for, "options": {**made_for["options"], "gone": 3}}
    assert choose(base_model=tiny_folder(tmp_path / "older", older))[0] == {"size": 5, "shows_history": False}


def test_a_tiny_model_of_another_task_is_warned_of(choose: Choose, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", TinyForm(name="maze", label="maze").model_dump())
    options, said = choose(base_model=other)
    assert options == {"size": 3, "form": "tool"}
    assert f"{other} is a tiny model made for maze, not for board-size-3-form-tool" in said
    without_task = tiny_folder(tmp_path / "unknown", None)
    assert "made for" not in choose(base_model=without_task)[1]
    (Path(other) / "tiny_model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tiny_model\.json is not what `art tiny-model` writes"):
        choose(base_model=other)


def test_what_is_wrong_with_an_option_is_said(choose: Choose, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"-o size=.* is given more than once"):
        choose("size=3", "size=4")
    with pytest.raises(SystemExit):
        choose("size")
    assert "expected KEY=VALUE, e.g. size=3, got 'size'" in capsys.readouterr().err
    assert main(["train", BOARD, "-o", "sise=3"]) == 1
    assert "has no option 'sise'; did you mean 'size'? Its options:\n  size=4  Cells" in capsys.readouterr().err
    assert main(["doctor", "model", "-o", "size=3"]) == 1
    assert "say which by --task" in capsys.readouterr().err


def test_folders_of_tiny_models_have_the_label() -> None:
    assert default_folder(Path("x"), BoardTask(), seed=1, head_dim=16).name.startswith("board-seed1-")
    assert default_folder(Path("x"), BoardTask(size=3), seed=1, head_dim=16).name.startswith("board-size-3-seed1-")


def test_tasks_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("tic_tac_toe", "mail_search", "verifiers:NAME", "harbor:DIR"))
    assert main(["tasks", BOARD, "-o", "size=6"]) == 0
    shown = capsys.readouterr().out
    assert "project      board-size-6\nchosen       size=6\ntiny models  size=3 form=tool\n" in shown
    assert "\n  form=xml  How a move is written. (xml, tool)\n" in shown
    assert "a judge is told:\nA full board is best.\n" in shown
    assert main(["train", "tic_tac_to"]) == 1
    assert "did you mean 'tic_tac_toe'?" in (said := capsys.readouterr().err)
    assert re.search(r"\n  tic_tac_toe +tic-tac-toe against an opponent that plays at random\n", said)


@pytest.mark.parametrize(
    ("options", "score"),
    [([], 1.0), (["-o", "size=6"], 0.5), (["--base-model", "Qwen/Qwen3-0.6B"], 0.75)],
)
def test_a_scripted_judge_scores_the_form_that_is_trained(options: list[str], score: float) -> None:
    actions = argparse.ArgumentParser().add_subparsers()
    judge.add_serve_parser(actions)
    args = actions.choices["serve"].parse_args(["--task", BOARD, *options])
    assert judge._grade(args)({"messages": [{"role": "assistant", "content": "xxx"}]}) == score
    with pytest.raises(ConfigError, match="say which by --task"):
        judge._grade(actions.choices["serve"].parse_args(["-o", "size=3"]))


async def test_a_judge_is_told_the_task_s_rubric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(task: art.Task, **settings: Any) -> str:
        with ScriptedJudge(lambda trajectory: 0.5) as scripted:
            config = TaskTrainingConfig(
                judge="openai/j", judge_url=scripted.base_url, base_model="m", name="n", project="p", data_dir=tmp_path,
                **settings,
            )  # fmt: skip
            rubric = config.rubric or task.rubric
            scorer = GroupScorer(config.make_judge(config.make_model().costs, rubric=rubric))
            answers: list[Any] = [{"role": "assistant", "content": answer} for answer in "xy"]
            await scorer(art.TrajectoryGroup([art.Trajectory(messages_and_choices=[m], reward=0.0) for m in answers]))
        return json.dumps(scripted.requests)

    assert "A full board is best." in await told(BoardTask())
    asked = await told(BoardTask(), rubric="The shorter the better.")
    assert "The shorter the better." in asked
    assert "A full board" not in asked
    monkeypatch.setattr(BoardTask, "rubric", None)
    assert json.dumps(DEFAULT_RUBRIC.splitlines()[0])[1:-1] in await told(BoardTask())


def test_a_judge_is_checked_with_the_task_s_rubric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none.jsonl").touch()
    told: list[str] = []
    monkeypatch.setattr(judge, "Ruler", lambda *_, rubric, **__: told.append(rubric))
    command = ["judge", "check", str(tmp_path / "none.jsonl"), "--judge", "openai/j"]
    assert [main([*command, "--task", BOARD]), main(command)] == [1, 1], "there is nothing to judge"
    assert told == ["A full board is best.", DEFAULT_RUBRIC]
