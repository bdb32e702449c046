"""The report of `art mcp-rl`: from what a run left behind to a page."""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art
from art.cli.mcp_rl_files import Clock, Plan
from art.cli.train_options import judge_rubric, loop_defaults
from art.comparison import CheckpointComparison, ComparedScenario
from art.mcp import GeneratedScenario, McpTask, MCPTool
from art.model import TrainableModel
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
    estimate_change,
)
from art.report.page import duration
from art.storage.history import means_by_step
from art.storage.layout import DataDir
from art.trajectory import Trajectory

NOTE = (
    "The judge saw the rollouts of a scenario from before and after together, in an order drawn at random, and was not "
    "told which is which: one question, one scale. Its scores of one question say nothing about those of another. "
    "Pairs are means over the rollouts of a scenario."
)
_EXPLANATION = "RULER explanation: "


@dataclass(slots=True, kw_only=True)
class Run:
    """What is known of a run."""

    args: argparse.Namespace
    command: str
    plan: Plan
    tools: Sequence[MCPTool]
    model: TrainableModel[Any, Any]
    clock: Clock
    step: int = 0
    """The newest checkpoint."""
    comparison: CheckpointComparison | None = None
    groups_without_scores: int = 0
    stopped: str = ""
    """Why it ended before its end."""


def describe_run(run: Run) -> Report:
    args, plan = run.args, run.plan
    trained = "all weights" if args.full_finetuning else f"an adapter of rank {args.lora_rank}"
    return Report(
        title=f"{run.model.name}: an agent for {len(run.tools)} tools",
        summary=(
            f"{Path(args.base_model).name} ({trained}) after {run.step} steps of reinforcement learning with the tools "
            f"of {args.server}. {plan.generator} wrote the scenarios, and {args.judge} judged the rollouts (RULER); "
            "there were no labels."
        ),
        headline=_headline(run.comparison, args.evaluate),
        curves=_curves(run),
        scenarios=[_result(item) for item in (run.comparison.compared if run.comparison else ())],
        comparisons=_telling(run.comparison.compared) if run.comparison else (),
        seconds=run.clock.seconds,
        costs=_costs(run),
        faults=_faults(run),
        command=run.command,
        settings=_settings(args),
        sections=_sections(run),
    )


def _headline(comparison: CheckpointComparison | None, rollouts: int) -> Headline | None:
    if comparison is None or not comparison.compared:
        return None
    before = [item.before_score for item in comparison.compared]
    after = [item.after_score for item in comparison.compared]
    return Headline(
        measure=f"judged score on {len(before)} held-out scenarios, {rollouts} rollouts of each before and after",
        before=estimate(before), after=estimate(after), change=estimate_change(before, after), note=NOTE,
    )  # fmt: skip


def _curves(run: Run) -> list[Curve]:
    def curve(metric: str, title: str, note: str, bounds: tuple[float, float] | None = None) -> Curve:
        return Curve(title=title, note=note, bounds=bounds, points=sorted(_history(run, metric).items()))

    return [
        curve("train/reward", "judged score of training rollouts",
              "Beside the other rollouts of the same step. It rises only as far as the judge also looks at what the "
              "task wants; the result above is the fair comparison.", (0, 1)),
        curve("train/completed", "share of rollouts that say they are done", "By calling complete_task.", (0, 1)),
        curve("train/num_tool_errors", "tool calls per rollout that failed", "Wrong arguments, or tools that refuse."),
        curve("train/num_turns", "turns per rollout", "Answers of the model, calls among them."),
    ]  # fmt: skip


def _history(run: Run, metric: str) -> dict[int, float]:
    path = DataDir(run.args.data_dir.resolve()).model(run.args.project, run.args.name).history
    return means_by_step(path, metric)[0]


def _result(item: ComparedScenario) -> ScenarioResult:
    return ScenarioResult(
        scenario=item.scenario.inputs["task"], label=f"difficulty {item.scenario.inputs['difficulty']}",
        before=item.before_score, after=item.after_score,
    )  # fmt: skip


def _telling(compared: Sequence[ComparedScenario]) -> list[Comparison]:
    """The largest gain, a typical scenario, and the largest loss if there is one."""
    ranked = sorted(compared, key=lambda item: item.before_score - item.after_score)
    if not ranked:
        return []
    median = statistics.median_low([item.after_score - item.before_score for item in ranked])
    typical = next(item for item in ranked if item.after_score - item.before_score == median)
    chosen = [("largest gain", ranked[0]), ("typical", typical)]
    if ranked[-1].after_score < ranked[-1].before_score:
        chosen.append(("largest loss", ranked[-1]))
    seen: list[ComparedScenario] = []
    comparisons = []
    for kind, item in chosen:
        if not any(item is other for other in seen):
            comparisons.append(_compare(kind, item))
        seen.append(item)
    return comparisons


def _compare(kind: str, item: ComparedScenario) -> Comparison:
    """One pair of rollouts with the same random numbers: the one that shows best what the scenario is shown for."""
    change = item.after_score - item.before_score
    wanted = {"largest gain": 1.0, "largest loss": -1.0}.get(kind, change)
    pairs = list(zip(item.before, item.after, strict=False))
    before, after = min(pairs, key=lambda pair: abs(pair[1].reward - pair[0].reward - wanted))
    return Comparison(
        scenario=f"{item.scenario.inputs['task']} ({kind})", before=_transcript(before), after=_transcript(after)
    )


def _transcript(trajectory: Trajectory) -> Transcript:
    messages: list[Any] = list(trajectory.messages())
    errors = int(trajectory.metrics.get("num_tool_errors", 0))
    words = str(trajectory.metadata.get("ending", "")).replace("_", " ")
    said = [log.removeprefix(_EXPLANATION) for log in trajectory.logs if log.startswith(_EXPLANATION)]
    return Transcript(
        messages=messages, score=trajectory.reward, explanation=said[-1] if said else "",
        note=f"{words}, {errors} failed calls" if errors else words,
    )  # fmt: skip


def _costs(run: Run) -> Table:
    """What the ledger of the model has, over all calls."""
    rows = []
    for source, amount in run.model.costs.totals().items():
        usd = f"{amount.usd:.4f}" if amount.priced else "not known" if amount.unpriced else ""
        seconds = duration(amount.seconds) if amount.seconds else ""
        requests = f"{count:,}" if (count := amount.priced + amount.unpriced) and not amount.seconds else ""
        tokens = [f"{count:,}" if count else "" for count in (amount.prompt_tokens, amount.completion_tokens)]
        rows.append([source, requests, *tokens, seconds, usd])
    return Table(columns=["for what", "requests", "prompt tokens", "completion tokens", "time", "USD"], rows=rows)


def _faults(run: Run) -> list[str]:
    faults = []
    if run.stopped:
        faults.append(f"The run ended before its end: {run.stopped}")
    if run.groups_without_scores:
        faults.append(
            f"{run.groups_without_scores} groups of the last call got no scores from the judge and were left out."
        )
    comparison = run.comparison
    if comparison and comparison.num_left_out:
        faults.append(
            f"{comparison.num_left_out} held-out scenarios are missing: no scores, or no rollout on one of the sides."
        )
    if comparison and comparison.num_failed_rollouts:
        faults.append(f"{comparison.num_failed_rollouts} held-out rollouts failed (tool server or model server).")
    return faults or ["Nothing: every group was judged, and no rollout failed in the last call."]


def _settings(args: argparse.Namespace) -> dict[str, str]:
    defaults = loop_defaults(McpTask.defaults, args)
    return {
        "base model": str(args.base_model),
        "steps": str(defaults.num_steps),
        "scenarios per step": str(defaults.groups_per_step),
        "rollouts per scenario": str(defaults.rollouts_per_group),
        "learning rate": f"{defaults.learning_rate:g}",
        "judge": f"{args.judge}{f' at {args.judge_url}' if args.judge_url else ''}, passes {args.judge_passes}",
        "turns at most": str(args.max_turns),
        "engine": args.engine,
        "seed": str(args.seed),
        "art": f"{art.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    }


def _sections(run: Run) -> list[Section]:
    def listed(scenarios: Sequence[GeneratedScenario]) -> Table:
        return Table(columns=["scenario", "difficulty"], rows=[[s.task, str(s.difficulty)] for s in scenarios])

    tools = Table(columns=["tool", "what it does"], rows=[[tool.name, tool.description] for tool in run.tools])
    plan = run.plan
    return [
        Section(title=f"{len(run.tools)} tools", table=tools),
        Section(title=f"{len(plan.train)} scenarios to train on", table=listed(plan.train)),
        Section(title=f"{len(plan.held_out)} held-out scenarios", table=listed(plan.held_out)),
        Section(title="what the judge was told is good", text=judge_rubric(run.args)),
    ]
