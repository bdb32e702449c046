"""Makes the report of MCP-RL (training for the tools of an MCP server) from the results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art.mcp import GeneratedScenario, MCPTool
from art.recipes.judged.judged_run import JudgedRun
from art.recipes.judged.report_parts import ReportWords, curve_of, make_report, scenario_table, trained_part
from art.recipes.mcprl.mcp_rl_config import McpRlConfig
from art.recipes.mcprl.scenario_file import ScenarioFile
from art.recipes.verdict import Remedies
from art.report import Curve, Report, Section, Table
from art.rewards import DEFAULT_RUBRIC
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
class McpRlRun(JudgedRun):
    """The state of one call of MCP-RL: a judged run with its server, scenarios and tools."""

    config: McpRlConfig
    server: str
    scenarios: ScenarioFile
    tools: Sequence[MCPTool]


def describe_run(run: McpRlRun) -> Report:
    config = run.config
    summary = (
        f"{Path(str(config.base_model)).name} ({trained_part(config)}) after {run.step} steps of reinforcement "
        f"learning with the tools of {run.server}. {run.scenarios.generator} wrote the scenarios, and {config.judge} "
        "judged the rollouts (RULER); there were no labels."
    )
    words = ReportWords(
        title=f"{run.model.name}: an agent for {len(run.tools)} tools", summary=summary, remedies=REMEDIES,
        text_of=lambda scenario: str(scenario.inputs["task"]), note_of=_note, curves=_curves(run),
        sections=_sections(run), settings={"turns at most": str(config.max_turns)},
    )  # fmt: skip
    return make_report(run, words)


def _curves(run: McpRlRun) -> list[Curve]:
    done, failed = "share of rollouts that say they are done", "tool calls per rollout that failed"
    return [
        curve_of(run, "train/completed", done, "By calling complete_task.", (0, 1)),
        curve_of(run, "train/num_tool_errors", failed, "Wrong arguments, or tools that refuse."),
        curve_of(run, "train/num_turns", "turns per rollout", "Answers of the model, calls among them."),
    ]


def _note(trajectory: Trajectory) -> str:
    errors = int(trajectory.metrics.get("num_tool_errors", 0))
    words = str(trajectory.metadata.get("ending", "")).replace("_", " ")
    return f"{words}, {errors} failed calls" if errors else words


def _sections(run: McpRlRun) -> list[Section]:
    def listed(scenarios: Sequence[GeneratedScenario]) -> Table:
        return scenario_table([(scenario.task, scenario.difficulty) for scenario in scenarios])

    tools = Table(columns=["tool", "what it does"], rows=[[tool.name, tool.description] for tool in run.tools])
    scenarios = run.scenarios
    return [
        Section(title=f"{len(run.tools)} tools", table=tools),
        Section(title=f"{len(scenarios.train)} scenarios to train on", table=listed(scenarios.train)),
        Section(title=f"{len(scenarios.held_out)} held-out scenarios", table=listed(scenarios.held_out)),
        Section(title="what the judge was told is good", text=run.config.rubric or DEFAULT_RUBRIC),
    ]
