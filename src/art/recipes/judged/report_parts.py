"""Makes the parts of a report that the recipes AutoRL and MCP-RL share."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art.recipes.comparison import CheckpointComparison, ComparedScenario
from art.recipes.judged.judged_run import JUDGED_CHANGE, ONE_STEP, JudgedRun
from art.recipes.recipe_config import RecipeConfig
from art.recipes.verdict import Course, Remedies, describe_faults, describe_untrained, reach_verdict
from art.report import (
    Comparison,
    Curve,
    Headline,
    Report,
    ScenarioResult,
    Section,
    Table,
    Transcript,
    estimate,
)
from art.report.page import duration
from art.storage.history import means_by_step
from art.storage.layout import DataDir
from art.task import Scenario
from art.trajectory import Trajectory

NOTE = (
    "The judge saw the rollouts of a scenario from before and after together, in an order drawn at random, and was not "
    "told which is which: one question, one scale. Its scores of one question say nothing about those of another. "
    "Pairs are means over the rollouts of a scenario."
)
REWARD_NOTE = (
    "Relative to the other rollouts of the same step, so it can stay level while the policy improves; the result above "
    "is the fair comparison."
)
_EXPLANATION = "RULER explanation: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportWords:
    """The texts, curves and sections that one recipe adds to the parts of a report that recipes share."""

    title: str
    summary: str
    remedies: Remedies
    text_of: Callable[[Scenario], str]
    """Returns a scenario as text for people."""
    note_of: Callable[[Trajectory], str]
    """Returns a few words about how a rollout ended."""
    curves: Sequence[Curve] = ()
    """Curves after those of validation and reward."""
    sections: Sequence[Section] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that only this recipe has."""
    warnings: Sequence[str] = ()
    """Problems of the scenarios, one sentence each."""


def make_report(run: JudgedRun, words: ReportWords) -> Report:
    """Make the report of a run from its results so far."""
    headline = headline_of(run.comparison, run.config.evaluate)
    course = course_of(run, headline, words.remedies.endings)
    rewards = curve_of(run, "train/reward", "judged score of training rollouts", REWARD_NOTE, (0, 1))
    return Report(
        title=words.title, summary=words.summary, headline=headline, verdict=reach_verdict(course, words.remedies),
        curves=[validation_curve(run), rewards, *words.curves],
        scenarios=results_of(run.comparison, words.text_of), comparisons=telling_comparisons(run.comparison, words),
        seconds=run.clock.seconds, costs=cost_table(run), faults=[*words.warnings, *faults_of(run, course)],
        command=run.command, settings={**settings_of(run), **words.settings}, sections=words.sections,
    )  # fmt: skip


def headline_of(comparison: CheckpointComparison | None, rollouts: int) -> Headline | None:
    """The judged score on held-out scenarios before and after training; `None` if nothing was compared."""
    if comparison is None or not comparison.compared:
        return None
    before = [item.before_score for item in comparison.compared]
    after = [item.after_score for item in comparison.compared]
    return Headline(
        measure=f"judged score on {len(before)} held-out scenarios, {rollouts} rollouts of each before and after",
        before=estimate(before), after=estimate(after), change=comparison.change(), note=NOTE,
    )  # fmt: skip


def curve_of(run: JudgedRun, metric: str, title: str, note: str, bounds: tuple[float, float] | None = None) -> Curve:
    """A curve for the report: the mean of a metric at each step of the run's history."""
    return Curve(title=title, note=note, bounds=bounds, points=history_of(run, metric))


def validation_curve(run: JudgedRun) -> Curve:
    points = history_of(run, f"val/{JUDGED_CHANGE}")
    return Curve(
        title="judged score on scenarios that are not trained on, less that of the untrained policy",
        note="One rollout of each policy on each, judged together. Nothing was chosen by it.",
        points=[(0, 0.0), *points] if points else [],
    )


def history_of(run: JudgedRun, metric: str) -> list[tuple[int, float]]:
    """Pairs of a step and a metric's mean at that step, over all calls that trained the model."""
    folder = DataDir(run.config.data_dir).model(run.model.project, run.model.name)
    return sorted(means_by_step(folder.history, metric)[0].items())


def results_of(comparison: CheckpointComparison | None, text_of: Callable[[Scenario], str]) -> list[ScenarioResult]:
    return [
        ScenarioResult(
            scenario=text_of(item.scenario), before=item.before_score, after=item.after_score,
            label=f"difficulty {item.scenario.inputs['difficulty']}" if "difficulty" in item.scenario.inputs else "",
        )
        for item in (comparison.compared if comparison else ())
    ]  # fmt: skip


def telling_comparisons(comparison: CheckpointComparison | None, words: ReportWords) -> list[Comparison]:
    """Choose rollouts to show side by side: largest gain, typical scenario, and largest loss if there is one."""
    ranked = sorted(comparison.compared if comparison else (), key=lambda item: -item.change)
    if not ranked:
        return []
    changes = [item.change for item in ranked]
    kinds = {0: "largest gain"}
    kinds.setdefault(changes.index(statistics.median_low(changes)), "typical")
    if changes[-1] < 0:
        kinds.setdefault(len(ranked) - 1, "largest loss")
    return [_side_by_side(ranked[index], kind, words) for index, kind in kinds.items()]


def _side_by_side(item: ComparedScenario, kind: str, words: ReportWords) -> Comparison:
    """The two rollouts with equal random numbers whose change is closest to the change of the scenario."""
    pairs = list(zip(item.before, item.after, strict=False))
    before, after = min(pairs, key=lambda pair: abs(pair[1].reward - pair[0].reward - item.change))
    return Comparison(
        scenario=f"{words.text_of(item.scenario)} ({kind})",
        before=_transcript(before, words.note_of), after=_transcript(after, words.note_of),
    )  # fmt: skip


def _transcript(trajectory: Trajectory, note_of: Callable[[Trajectory], str]) -> Transcript:
    messages: list[Any] = list(trajectory.messages())
    explanation = next((log for log in reversed(trajectory.logs) if log.startswith(_EXPLANATION)), "")
    return Transcript(
        messages=messages, score=trajectory.reward, note=note_of(trajectory),
        explanation=explanation.removeprefix(_EXPLANATION),
    )  # fmt: skip


def cost_table(run: JudgedRun) -> Table:
    """Make a table of the model's costs over all calls, by source."""
    rows = []
    for source, amount in run.model.costs.totals().items():
        usd = f"{amount.usd:.4f}" if amount.priced else "no price" if amount.unpriced else ""
        seconds = duration(amount.seconds) if amount.seconds else ""
        requests = f"{count:,}" if (count := amount.priced + amount.unpriced) and not amount.seconds else ""
        tokens = [f"{count:,}" if count else "" for count in (amount.prompt_tokens, amount.completion_tokens)]
        rows.append([source, requests, *tokens, seconds, usd])
    return Table(columns=["for what", "requests", "prompt tokens", "completion tokens", "time", "USD"], rows=rows)


def course_of(run: JudgedRun, headline: Headline | None, endings: Iterable[str]) -> Course:
    """Collect the facts about a training from which its verdict is made.

    Args:
        headline: result of the comparison, if one was made.
        endings: metrics that are 1 for a rollout that the policy spoilt in this way.
    """
    first = run.reports[0].step if run.reports else 0
    shares = {}
    for name in endings:
        values = [share for step, share in history_of(run, f"train/{name}") if step >= first]
        shares[name] = statistics.fmean(values) if values else 0.0
    return Course(
        step=run.step, num_steps=run.config.loop_defaults(run.task.defaults).num_steps, reports=run.reports,
        stopped=run.stopped, measure="the judged score on held-out scenarios",
        change=headline.change if headline else None, endings=shares,
    )  # fmt: skip


def faults_of(run: JudgedRun, course: Course) -> list[str]:
    """What went wrong in a run, one sentence each; if nothing did, one sentence that says so."""
    faults = [f"The run ended early: {run.stopped}"] if run.stopped else []
    faults += [text for text in (describe_untrained(course), describe_faults(course)) if text]
    if run.config.serves_one_step:
        faults.append(ONE_STEP)
    missing, failed = (run.comparison.num_left_out, run.comparison.num_failed_rollouts) if run.comparison else (0, 0)
    counts = {
        "groups of the last call got no scores from the judge and were left out.": run.groups_without_scores,
        "held-out scenarios are missing: they got no scores, or one side has no rollout.": missing,
        "held-out rollouts failed, through no fault of the policy.": failed,
    }
    faults += [f"{count} {text}" for text, count in counts.items() if count]
    return faults or ["Nothing: every group was judged and every step trained, and no rollout failed in the last call."]


def settings_of(run: JudgedRun) -> dict[str, str]:
    """The settings and versions that somebody needs to repeat the run, by name."""
    config, defaults = run.config, run.config.loop_defaults(run.task.defaults)
    # Importing `art` here would be a circle: it names this package for type checkers.
    version = sys.modules["art"].__version__
    return {
        "base model": str(config.base_model),
        "trained": trained_part(config),
        "steps": str(defaults.num_steps),
        "scenarios per step": str(defaults.groups_per_step),
        "rollouts per scenario": str(defaults.rollouts_per_group),
        "learning rate": f"{defaults.learning_rate:g}",
        "judge": f"{config.judge}{f' at {config.judge_url}' if config.judge_url else ''}, passes {config.judge_passes}",
        "engine": config.engine,
        "seed": str(config.seed),
        "art": f"{version}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    }


def trained_part(config: RecipeConfig) -> str:
    return "all weights" if config.full_finetuning else f"an adapter of rank {config.lora_rank}"


def scenario_table(rows: Sequence[tuple[str, int | None]]) -> Table:
    """Make a table of scenarios and their difficulties."""
    return Table(columns=["scenario", "difficulty"], rows=[[text, "" if d is None else str(d)] for text, d in rows])
