"""The report of `art auto`: from what a run left behind to a page."""

from __future__ import annotations

from dataclasses import asdict

from art.cli.judged_run import JudgedRun
from art.cli.run_report import (
    REWARD_NOTE,
    cost_table,
    course_of,
    curve_of,
    faults_of,
    headline_of,
    results_of,
    scenario_table,
    settings_of,
    telling_comparisons,
    validation_curve,
)
from art.cli.verdict import Remedies, reach_verdict
from art.report import Report, Section, Table
from art.scenarios import Dataset
from art.scenarios.written import SPLITS
from art.task import Scenario
from art.tasks.dataset import DatasetTask
from art.trajectory import Trajectory

REMEDIES = Remedies(
    endings={"cut_short": "Answers were cut short: raise `max_completion_tokens` in task.toml, or ask for less there"},
    no_spread=(
        "Edit the prompt in task.toml or the inputs in scenarios.jsonl towards what the policy solves now and then, "
        "give an input more --rollouts, and measure the judge with `art judge check`"
    ),
    unclear="Train on with a higher --steps, or measure on more inputs of the split `test` and with more --evaluate",
    faults="Take a base model that follows instructions better",
)


def describe_run(run: JudgedRun, dataset: Dataset) -> Report:
    args = run.args
    headline = headline_of(run.comparison, args.evaluate)
    course = course_of(run, DatasetTask.defaults, headline, REMEDIES.endings)
    return Report(
        title=dataset.task.description,
        summary=(
            f"{args.base_model} after {run.step} steps of reinforcement learning on {len(dataset.split('train'))} "
            f"inputs. {args.generator or args.judge} wrote inputs and system prompt, {args.judge} judged the answers "
            "(RULER); there were no labels. Both can be edited."
        ),
        verdict=reach_verdict(course, REMEDIES),
        headline=headline,
        curves=[
            validation_curve(run),
            curve_of(run, "train/reward", "judged score of training rollouts", REWARD_NOTE, (0, 1)),
            curve_of(run, "train/cut_short", "share of answers that were cut", "Longer than max_completion_tokens."),
        ],
        scenarios=results_of(run.comparison, _text),
        comparisons=telling_comparisons(run.comparison, _text, _note),
        seconds=run.clock.seconds,
        costs=cost_table(run),
        faults=[*dataset.warnings(), *faults_of(run, course)],
        command=run.command,
        settings=settings_of(args, DatasetTask.defaults),
        sections=_sections(dataset),
    )


def _text(scenario: Scenario) -> str:
    return str(scenario.inputs["input"])


def _note(trajectory: Trajectory) -> str:
    return "cut short" if trajectory.metrics.get("cut_short") else ""


def _sections(dataset: Dataset) -> list[Section]:
    diversity = dataset.diversity()
    numbers = [] if diversity is None else [(name, f"{value:.2f}") for name, value in asdict(diversity).items()]
    sections = [
        Section(title="what the agent is told", text=dataset.task.system_prompt),
        Section(title="what the judge was told is good", text=dataset.task.rubric),
        Section(title="how different the scenarios are (each from 0 to 1)", table=Table(rows=numbers)),
    ]
    for split in SPLITS:
        rows = [(line.input, line.difficulty) for line in dataset.split(split)]
        sections.append(Section(title=f"{len(rows)} scenarios: {split}", table=scenario_table(rows)))
    return sections
