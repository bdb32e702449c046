"""Makes the report of AutoRL (training from one sentence) from the results of a run."""

from __future__ import annotations

from dataclasses import asdict

from art.recipes.judged.judged_run import JudgedRun
from art.recipes.judged.report_parts import ReportWords, curve_of, make_report, scenario_table
from art.recipes.verdict import Remedies
from art.report import Report, Section, Table
from art.scenarios import Dataset
from art.scenarios.written import SPLITS

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
    config = run.config
    summary = (
        f"{config.base_model} after {run.step} steps of reinforcement learning on {len(dataset.split('train'))} "
        f"inputs. {config.generator or config.judge} wrote inputs and system prompt, {config.judge} judged the answers "
        "(RULER); there were no labels. Both can be edited."
    )
    cut = curve_of(run, "train/cut_short", "share of answers that were cut", "Longer than max_completion_tokens.")
    words = ReportWords(
        title=dataset.task.description, summary=summary, remedies=REMEDIES, curves=[cut],
        text_of=lambda scenario: str(scenario.inputs["input"]),
        note_of=lambda trajectory: "cut short" if trajectory.metrics.get("cut_short") else "",
        sections=_sections(dataset), warnings=dataset.warnings(),
    )  # fmt: skip
    return make_report(run, words)


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
