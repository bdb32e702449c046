"""What a report and a command say first: what happened, why, and what to do."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import pytest

import art
import art.cli.main
from art.errors import ArtError, BudgetError, ConfigError, FaultRateError, TrainingError
from art.metrics.scores import Estimate
from art.metrics.verdicts import HeldOutChange, RunEnd
from art.recipes import JudgedConfig, JudgedResult
from art.rewards import Ruler
from art.storage.history import append_row, read_state
from art.storage.layout import DataDir
from art.task import Scenario, Split, Task
from art_recipes import autorl, mcprl
from art_recipes import judged as judged_run
from art_recipes.dataset_task import DatasetTask
from art_recipes.judged import JudgedRun
from art_recipes.mcprl import REMEDIES
from art_recipes.report import Report, render_report
from art_recipes.screen import EXIT_BUDGET, EXIT_UNTRAINED, ProgressPrinter, Screen, exit_code
from art_recipes.training import task_training
from art_recipes.training.progress import Course, Remedies, reach_verdict, report_verdict
from art_recipes.training.training_loop import StepReport
from tests.unit.art_recipes.recipes.test_mcp_rl_files import compared, report_of


def step(number: int, *, trained: bool, faults: float = 0.0) -> StepReport:
    metrics = {"data/policy_fault_rate": faults} if faults else {}
    return StepReport(
        step=number, reward=0.5, headline=0.5, tokens_per_s=1.0, trained=trained, metrics=metrics,
    )  # fmt: skip


def change(low: float, high: float) -> HeldOutChange:
    difference = Estimate(mean=(low + high) / 2, low=low, high=high, count=9)
    return HeldOutChange(measure="win", before=0.55, after=0.55 + difference.mean, difference=difference)


TRAINED = [step(i, trained=True) for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("changed", "kind", "what", "to_do"),
    [
        (change(0.1, 0.3), "good", "It learnt: win 0.55 to 0.75, +0.20 (+0.10 to +0.30)", []),
        (change(-0.3, -0.1), "bad", "It got worse: win 0.55 to 0.35, -0.20", ["Lower --learning-rate"]),
        (change(-0.1, 0.2), "soft", "No clear change: win 0.55 to 0.60, +0.05", [Remedies().unclear]),
        (None, "soft", "3 steps were trained, up to step 3 of 3; no comparison", []),
    ],
)
def test_what_a_comparison_shows(changed: HeldOutChange | None, kind: str, what: str, to_do: list[str]) -> None:
    course = Course(step=3, num_steps=3, reports=TRAINED, change=changed)
    verdict = reach_verdict(course, Remedies())
    assert (verdict.kind, verdict.why, verdict.to_do) == (kind, [], to_do)
    assert verdict.what.startswith(what)


def test_nothing_was_trained_because_the_policy_spoils_its_rollouts() -> None:
    reports = [step(1, trained=False, faults=share) for share in (0.69, 0.81)]
    course = Course(step=0, num_steps=20, reports=reports, endings={"out_of_turns": 0.6, "cut_short": 0.05})
    verdict = reach_verdict(course, REMEDIES)
    assert verdict.kind == "bad"
    assert verdict.what == "Nothing was trained in 2 steps: all rewards of each group were equal"
    (why,) = verdict.why
    assert why == "75% of the rollouts were faults of the policy itself (60% out of turns, 5% cut short)"
    assert verdict.to_do == [REMEDIES.endings["out_of_turns"], REMEDIES.faults, REMEDIES.no_spread]


def test_steps_without_spread_and_an_end_before_the_end() -> None:
    reports = [*TRAINED[:1], *(step(2, trained=False) for _ in range(3))]
    course = Course(step=1, num_steps=20, reports=reports, ending="failed", stopped="the judge is down")
    verdict = reach_verdict(course, Remedies())
    assert (verdict.kind, verdict.what) == ("bad", "It failed at step 1 of 20")
    assert verdict.why == [
        "The run ended early, at step 1 of 20: the judge is down",
        "3 of 4 steps were not trained: all rewards of each group were equal in 3",
    ]
    assert verdict.to_do == [Remedies().no_spread, "The same command continues, from the newest checkpoint"]


# -- the report, the console and the exit code --


def test_the_report_of_a_run_that_trained_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = DataDir(tmp_path / "data").model("mcp-rl", "shop").history
    history.parent.mkdir(parents=True, exist_ok=True)
    append_row(history, {"train/out_of_turns": 0.7}, step=0)
    reports = [step(0, trained=False, faults=0.7)] * 5
    report = report_of(tmp_path, None, reports=reports)
    assert report.verdict.what.startswith("Nothing was trained in 5 steps")
    assert report.faults == [
        "5 of 5 steps were not trained: all rewards of each group were equal in 5",
        "70% of the rollouts were faults of the policy itself (70% out of turns)",
    ]
    html = render_report(report)
    assert html.index("Nothing was trained") < html.index("Learning curve")
    assert "raise --max-turns" in html
    report_verdict(ProgressPrinter(Screen()), report.verdict)
    assert "why: 70% of the rollouts" in capsys.readouterr().out


def test_the_report_of_a_run_that_learnt(tmp_path: Path) -> None:
    report = report_of(tmp_path, compared((0.1, 0.9), (0.2, 0.9)), reports=TRAINED)
    assert report.verdict.what.startswith("It learnt: judged score on held-out scenarios 0.15 to 0.90, +0.75")
    assert report.faults[0].startswith("Nothing")


@pytest.mark.parametrize(
    ("trained", "over_budget", "code"),
    [
        ([False, False], False, EXIT_UNTRAINED),
        ([False, True], False, 0),
        ([], False, 0),
        ([False], True, EXIT_BUDGET),
    ],
)
async def test_the_exit_code_tells_whether_anything_was_trained(
    trained: list[bool], over_budget: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(run: JudgedRun, *_: object) -> None:
        run.reports += [step(i, trained=each) for i, each in enumerate(trained)]
        if over_budget:
            raise BudgetError("0")

    async def nothing(*_: object) -> None: ...

    for name, stand_in in (("train", train), ("book_last", nothing)):
        monkeypatch.setattr(judged_run, name, stand_in)
    config = JudgedConfig(name="m", project="p", base_model="b", data_dir=tmp_path, held_out_rollouts=0)
    run = JudgedRun(
        config=config, model=config.make_model(), task=DatasetTask.__new__(DatasetTask), judge=Ruler("openai/j"),
        out=tmp_path,
    )  # fmt: skip
    result = await judged_run.train_and_compare(run, held_out=[], describe=lambda: Report(title="t", summary="s"))
    assert isinstance(result, JudgedResult)
    assert result.report_path == tmp_path / "report.html"
    assert exit_code(result) == code


@pytest.mark.parametrize("trained", [True, False])
def test_art_train_says_what_came_of_it(
    trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def train_task(*_: object, on_step: Any, **__: object) -> None:
        on_step(step(1, trained=trained, faults=0.8))

    train_by(monkeypatch, train_task)
    command = ["train", "yes_no_maybe", "--base-model", "b", "--data-dir", str(tmp_path), "--steps", "1"]
    assert art.cli.main.main(command) == (0 if trained else EXIT_UNTRAINED)
    shown = capsys.readouterr().out
    if trained:
        assert "1 step was trained, up to step 1 of 1; no comparison with the untrained policy was made." in shown
    else:
        assert "Nothing was trained in 1 steps: all rewards of each group were equal." in shown
    assert "why: 80% of the rollouts were faults of the policy itself" in shown


class Coin(Task):
    """Scenarios of which the first `num_wins` are won."""

    name: ClassVar[str] = "coin"
    description: ClassVar[str] = "toss a coin"
    num_wins = 0

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {"number": index}) for index in range(count)]

    async def rollout(
        self, model: art.Model, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        won = scenario.inputs["number"] < self.num_wins
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": "toss"}], reward=float(won))


@pytest.mark.parametrize(("num_wins", "kind"), [(1, "soft"), (20, "good")])
async def test_one_win_more_is_not_learning(
    num_wins: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Coin()

    async def train_task(*_: object, on_step: Any, **__: object) -> list[StepReport]:
        task.num_wins = num_wins
        on_step(step(1, trained=True))
        return []

    train_by(monkeypatch, train_task)
    result = await art.recipes.train(task, "b", data_dir=tmp_path, steps=1, held_out=200)
    assert result.verdict is not None
    assert result.verdict.kind == kind
    assert result.change is not None
    assert (result.change.mean, result.change.count) == (num_wins / 200, 200)


@pytest.mark.parametrize(
    ("error", "ending", "what"),
    [
        (FaultRateError("9 of 10 rollouts failed"), "failed", "It failed at step 1 of 4"),
        (TrainingError("no spread in 3 steps"), "stopped", "It was stopped at step 1 of 4"),
        (BudgetError("1 of 1 USD spent"), "stopped", "It was stopped at step 1 of 4"),
    ],
)
async def test_the_end_of_a_training_is_kept_for_the_page(
    error: ArtError, ending: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train_task(*_: object, on_step: Any, **__: object) -> None:
        on_step(step(1, trained=True))
        raise error

    train_by(monkeypatch, train_task)
    lines: list[str] = []
    with contextlib.nullcontext() if isinstance(error, BudgetError) else pytest.raises(type(error)):
        await art.recipes.train(
            Coin(), "b", data_dir=tmp_path, steps=4, on_progress=lambda line: lines.append(line.text)
        )
    kept = read_state(DataDir(tmp_path).model("coin", "coin-seed0").state) or {}
    end = RunEnd.model_validate(kept["end"])
    assert (end.ending, end.step, end.what) == (ending, 1, what)
    assert f"{what}." in lines, "the terminal says the same"
    assert end.why[0].endswith(str(error))


# -- a base model that cannot be used --


@pytest.mark.parametrize(
    ("recipe", "generator", "command"),
    [
        (mcprl, "generate_scenarios", ["mcp-rl", "http://a/mcp"]),
        (autorl, "generate_dataset", ["auto", "answer the questions of guests"]),
    ],
)
def test_the_base_model_is_looked_at_before_scenarios_are_paid_for(
    recipe: Any, generator: str, command: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    use_backend(monkeypatch, recipe, refuse)

    async def discover(*_: object) -> tuple[list[object], list[object]]:
        return [], []

    async def generate(*_: object, **__: object) -> None:
        raise AssertionError("paid for scenarios of a model that does not exist")

    monkeypatch.setattr(recipe, generator, generate)
    monkeypatch.setattr(mcprl._McpRl, "_discover", discover)
    monkeypatch.chdir(tmp_path)
    command = [*command, "--model", "./nope", "--judge", "j", "--judge-url", "http://127.0.0.1:9/v1"]
    assert art.cli.main.main(command) == 1
    assert "there is no model ./nope" in capsys.readouterr().err
    assert not list(tmp_path.rglob("scenarios.json*"))


async def refuse(*_: object) -> None:
    raise ConfigError("there is no model ./nope")


def use_backend(monkeypatch: pytest.MonkeyPatch, command: Any, register: Any) -> None:
    """Give a command a backend without processes."""

    class Backend:
        def __init__(self, **_: object) -> None: ...

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr(command, "LocalBackend", Backend)
    monkeypatch.setattr(art.TrainableModel, "register", register)


def train_by(monkeypatch: pytest.MonkeyPatch, train_task: Any) -> None:
    """Let `art train` call a function of the test."""

    async def nothing(*_: object, **__: object) -> int:
        return 0

    use_backend(monkeypatch, task_training, nothing)
    monkeypatch.setattr(task_training, "train_task", train_task)
    monkeypatch.setattr(task_training, "book_last", nothing)
    for name in ("get_step", "log"):
        monkeypatch.setattr(art.TrainableModel, name, nothing)
