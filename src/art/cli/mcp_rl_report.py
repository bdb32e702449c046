"""The report of `art mcp-rl`: from what a run left behind to a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art.cli.judged_run import JudgedRun
from art.cli.mcp_rl_files import Plan
from art.cli.options.train_options import judge_rubric
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
    trained_part,
    validation_curve,
)
from art.cli.verdict import Remedies, reach_verdict
from art.mcp import GeneratedScenario, McpTask, MCPTool
from art.report import Curve, Report, Section, Table
from art.task import Scenario
from art.trajectory import Trajectory

REMEDIES = Remedies(
    endings={
        "out_of_turns": "Rollouts ran out of turns: raise --max-turns, or write easier scenarios",
        "cut_short": "Answers were cut short: raise --max-completion-tokens, or --max-context where nothing was said",
        "context_full": "The context was full: offer fewer tools by --tools, or raise --max-context",
    },
    no_spread=(
        "Edit scenarios.json towards what the policy solves now and then, give a scenario more --rollouts, and measure "
        "the judge with `art judge check`"
    ),
    unclear="Train on with a higher --steps, or measure on more held-out scenarios and with more --evaluate",
    faults="Take a base model that calls tools better, or fewer tools with --tools",
)


@dataclass(slots=True, kw_only=True)
class Run(JudgedRun):
    """What is known of a run."""

    plan: Plan
    tools: Sequence[MCPTool]


def describe_run(run: Run) -> Report:
    args, plan = run.args, run.plan
    headline = headline_of(run.comparison, args.evaluate)
    course = course_of(run, McpTask.defaults, headline, REMEDIES.endings)
    return Report(
        title=f"{run.model.name}: an agent for {len(run.tools)} tools",
        summary=(
            f"{Path(args.base_model).name} ({trained_part(args)}) after {run.step} steps of reinforcement learning "
            f"with the tools of {args.server}. {plan.generator} wrote the scenarios, and {args.judge} judged the "
            "rollouts (RULER); there were no labels."
        ),
        verdict=reach_verdict(course, REMEDIES),
        headline=headline,
        curves=_curves(run),
        scenarios=results_of(run.comparison, _text),
        comparisons=telling_comparisons(run.comparison, _text, _note),
        seconds=run.clock.seconds,
        costs=cost_table(run),
        faults=faults_of(run, course),
        command=run.command,
        settings=settings_of(args, McpTask.defaults) | {"turns at most": str(args.max_turns)},
        sections=_sections(run),
    )


def _curves(run: Run) -> list[Curve]:
    return [
        validation_curve(run),
        curve_of(run, "train/reward", "judged score of training rollouts", REWARD_NOTE, (0, 1)),
        curve_of(
            run, "train/completed", "share of rollouts that say they are done", "By calling complete_task.", (0, 1)
        ),
        curve_of(
            run, "train/num_tool_errors", "tool calls per rollout that failed", "Wrong arguments, or tools that refuse."
        ),
        curve_of(run, "train/num_turns", "turns per rollout", "Answers of the model, calls among them."),
    ]


def _text(scenario: Scenario) -> str:
    return str(scenario.inputs["task"])


def _note(trajectory: Trajectory) -> str:
    errors = int(trajectory.metrics.get("num_tool_errors", 0))
    words = str(trajectory.metadata.get("ending", "")).replace("_", " ")
    return f"{words}, {errors} failed calls" if errors else words


def _sections(run: Run) -> list[Section]:
    def listed(scenarios: Sequence[GeneratedScenario]) -> Table:
        return scenario_table([(scenario.task, scenario.difficulty) for scenario in scenarios])

    tools = Table(columns=["tool", "what it does"], rows=[[tool.name, tool.description] for tool in run.tools])
    plan = run.plan
    return [
        Section(title=f"{len(run.tools)} tools", table=tools),
        Section(title=f"{len(plan.train)} scenarios to train on", table=listed(plan.train)),
        Section(title=f"{len(plan.held_out)} held-out scenarios", table=listed(plan.held_out)),
        Section(title="what the judge was told is good", text=judge_rubric(run.args)),
    ]
