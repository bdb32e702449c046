"""MCP-RL: train an agent for the tools of an MCP server, without labels and without data.

discover the tools --> write scenarios --> train with RULER --> compare before and after on held-out ones --> report
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from art.costs import Ledger
from art.errors import ConfigError
from art.local_backend import LocalBackend
from art.storage.atomic import write_file
from art.trajectory import Trajectory
from art_recipes.judged import (
    JudgedConfig,
    JudgedResult,
    JudgedRun,
    make_report,
    train_and_compare,
    trained_part,
)
from art_recipes.mcp import (
    GeneratedScenario,
    GeneratedScenarioCollection,
    MCPClient,
    MCPResource,
    McpTask,
    MCPTool,
    generate_scenarios,
)
from art_recipes.mcp.rollout import require_fit
from art_recipes.report import Report
from art_recipes.scenarios.written import words_of
from art_recipes.training.progress import OnProgress, Progress, ProgressKind, Remedies, log_progress


class McpRlConfig(JudgedConfig):
    """Settings of `art.recipes.mcp_rl`, which trains an agent for an MCP server."""

    project: str = "mcp-rl"
    """Project of the trained model."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of each HTTP request to the server."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for a server that is a command, beside PATH, HOME and the like."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that the agent may use; by default every tool."""
    max_turns: int = 10
    """Most answers of the model in a rollout."""
    max_completion_tokens: int | None = None
    """Most tokens of one answer; by default what fits the context."""
    max_concurrent: int = Field(default=16, ge=1)
    """Rollouts at once, each with its own connection or process."""
    num_scenarios: int = Field(default=24, ge=1)
    """Scenarios to train on."""
    held_out: int = Field(default=12, ge=1)
    """Held-out scenarios to test with."""
    instructions: str | None = None
    """What the scenarios should be about, in your words."""
    rubric: str | None = None
    """What the judge is told is good, in prose; by default `art.rewards.DEFAULT_RUBRIC`."""


PREVIEW = 5
"""How many of the new scenarios are shown as progress."""


async def mcp_rl(
    server: str,
    model: str | None = None,
    *,
    out: str | Path | None = None,
    config: McpRlConfig | None = None,
    on_progress: OnProgress = log_progress,
    command: str = "",
    **settings: Any,
) -> JudgedResult:
    """Train an agent for an MCP server on scenarios that a language model writes; compare it with the untrained agent.

    A later call with the same arguments continues, with the scenarios as they are in `scenarios.json`.

    Args:
        server: address of the MCP server (streamable HTTP), or the command that starts it (stdio).
        model: base model to train, as in the setting `base_model`.
        out: folder of scenarios and report; `mcp-rl/<name>` by default.
        config: settings as an object.
        on_progress: receives each line of progress.
        command: command that repeats the run, to show in the report.
        settings: fields of `McpRlConfig`, which win over `config`.

    Raises:
        ConfigError: a setting is wrong, the server lacks a tool of `tools`, or the base model cannot be trained here.
        ToolServerError: the MCP server cannot be reached or started.
        GenerationError: the generator wrote nothing that can be used.
        TrainingError: nothing could be learnt in several steps in a row.
        FaultRateError: too many rollouts failed, or the judge scored too few groups.
    """
    config = McpRlConfig.complete(config, model, settings).named(name=name_after(server))
    return await _McpRl(server, config, _folder(out, config), on_progress, command).run()


def _folder(out: str | Path | None, config: McpRlConfig) -> Path:
    return Path(out or Path("mcp-rl") / str(config.name)).resolve()


@dataclass(slots=True)
class _McpRl:
    """One call of `mcp_rl`."""

    server: str
    config: McpRlConfig
    out: Path
    on_progress: OnProgress
    command: str

    async def run(self) -> JudgedResult:
        config, limit = self.config, self.config.max_completion_tokens
        self.out.mkdir(parents=True, exist_ok=True)
        model = config.make_model()
        judge = config.make_judge(model.costs, rubric=config.rubric)
        tools, resources = await self._discover()
        async with LocalBackend(path=config.data_dir, server_config=config.server_config) as backend:
            # Before scenarios are paid for: a base model that is missing, or that cannot be trained here, ends it now.
            self._say("Starting server, engine and trainer ...", "busy")
            await model.register(backend)
            await config.record(model)
            await require_fit(model, tools)
            scenarios = self._load_scenarios(tools) or await self._write_scenarios(tools, resources, model.costs)
            task = McpTask(
                self.server, train=scenarios.train, held_out=scenarios.held_out, tools=tools, headers=config.headers,
                env=config.env, max_turns=config.max_turns, max_concurrent=config.max_concurrent,
                request={} if limit is None else {"max_completion_tokens": limit},
            )  # fmt: skip
            run = JudgedRun(
                config=config, model=model, task=task, judge=judge, out=self.out, command=self.command,
                on_progress=self.on_progress, step=await model.get_step(),
            )  # fmt: skip
            held_out = task.scenarios("test", seed=config.seed, count=len(scenarios.held_out))
            return await train_and_compare(run, held_out=held_out, describe=lambda: describe_run(run, scenarios))

    def _say(self, text: str, kind: ProgressKind = "note") -> None:
        self.on_progress(Progress(text, kind))

    async def _discover(self) -> tuple[Sequence[MCPTool], Sequence[MCPResource]]:
        """The tools that the agent may use, and the server's resources."""
        async with MCPClient(self.server, headers=self.config.headers, env=self.config.env) as client:
            tools, resources = await client.list_tools(), await client.list_resources()
        names = [tool.name for tool in tools]
        if not tools:
            raise ConfigError(f"the MCP server {self.server} has no tools: an agent could do nothing there")
        allowed = self.config.tools or names
        if unknown := [name for name in allowed if name not in names]:
            raise ConfigError(f"--tools: the server has no {', '.join(unknown)}; it has {', '.join(names)}")
        self._say(f"{len(allowed)} tools: {', '.join(allowed)}")
        return [tool for tool in tools if tool.name in allowed], resources

    def _load_scenarios(self, tools: Sequence[MCPTool]) -> ScenarioFile | None:
        scenarios = load_scenarios(self.out)
        if scenarios is None:
            return None
        counts = f"{len(scenarios.train)} scenarios to train on and {len(scenarios.held_out)} held out"
        self._say(f"{counts}, of {scenarios.path}")
        if set(scenarios.tools) != {tool.name for tool in tools}:
            self._say(
                f"They were written for other tools ({', '.join(scenarios.tools)}). Delete the file to have new ones "
                "written", "warning",
            )  # fmt: skip
        return scenarios

    async def _write_scenarios(
        self, tools: Sequence[MCPTool], resources: Sequence[MCPResource], costs: Ledger
    ) -> ScenarioFile:
        config = self.config
        generator, url = config.writer
        if url is not None:  # a server knows its model without the provider that litellm expects before the name
            generator = generator.removeprefix("openai/").removeprefix("hosted_vllm/")
        count = config.num_scenarios + config.held_out
        self._say(f"{generator} writes {count} scenarios ...", "busy")
        written = await generate_scenarios(
            tools=tools, resources=resources, num_scenarios=count, show_preview=False,
            custom_instructions=config.instructions, generator_model=generator, generator_base_url=url,
            settings=config.writer_settings(costs),
        )  # fmt: skip
        train, held_out = written.shuffle(config.seed).split(config.num_scenarios)
        scenarios = ScenarioFile(
            path=scenario_path(self.out), server=self.server, tools=[tool.name for tool in tools],
            generator=generator, train=train, held_out=held_out,
        )  # fmt: skip
        scenarios.save()
        for scenario in GeneratedScenarioCollection(train)[:PREVIEW]:
            self._say(f"  {scenario.preview()}")
        self._say(f"{len(train)} scenarios to train on and {len(held_out)} held out are in {scenarios.path}")
        return scenarios


def name_after(server: str) -> str:
    """A name for a model that learns to use `server`.

    Example: "python examples/inventory/server.py" gives "inventory-server", "https://mcp.example.org/v1/mcp"
    gives "mcp-example-org".
    """
    if server.startswith(("http://", "https://")):
        words = [server.split("/")[2]]
    else:
        command = shlex.split(server)
        # The program says more than its interpreter: take the first word with a path, else the last that is no option.
        paths = [word for word in command[1:] if "/" in word or "." in word]
        named = [word for word in command if not word.startswith("-")]
        words = [*Path((paths or named[-1:] or ["server"])[0]).with_suffix("").parts[-2:]]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
    return name[:48] or "server"


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
    unclear="Train on with a higher --steps, or measure on more held-out scenarios and more --held-out-rollouts",
    faults="Take a base model that calls tools better, or fewer tools with --tools",
)


def describe_run(run: JudgedRun, scenarios: ScenarioFile) -> Report:
    config = run.config
    summary = (
        f"{Path(str(config.base_model)).name} ({trained_part(config)}) after {run.step} steps of reinforcement "
        f"learning with the tools of {scenarios.server}. {scenarios.generator} wrote the scenarios, and {config.judge} "
        "judged the rollouts (RULER); there were no labels."
    )
    return make_report(
        run, title=f"{run.model.name}: an agent for {len(scenarios.tools)} tools", summary=summary, remedies=REMEDIES,
        text_of=lambda scenario: str(scenario.inputs["task"]), note_of=_note,
    )  # fmt: skip


def _note(trajectory: Trajectory) -> str:
    errors = int(trajectory.metrics.get("num_tool_errors", 0))
    words = str(trajectory.metadata.get("ending", "")).replace("_", " ")
    return f"{words}, {errors} failed calls" if errors else words


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFile:
    """The content of `scenarios.json`: the scenarios that MCP-RL trains on and tests with."""

    path: Path
    server: str
    tools: Sequence[str]
    """Names of the tools that the scenarios were written for."""
    generator: str
    train: Sequence[GeneratedScenario]
    held_out: Sequence[GeneratedScenario]

    def save(self) -> None:
        sides = {"train": [s.to_dict() for s in self.train], "held_out": [s.to_dict() for s in self.held_out]}
        content = {"server": self.server, "tools": list(self.tools), "generator": self.generator, **sides}
        write_file(self.path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def scenario_path(out: Path) -> Path:
    return out / "scenarios.json"


def load_scenarios(out: Path) -> ScenarioFile | None:
    """The scenarios in the folder `out`; `None` if none are written yet.

    Raises:
        ConfigError: the file was edited and cannot be used; the message says what is wrong with it.
    """
    path = scenario_path(out)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sides = {side: [GeneratedScenario.from_dict(row) for row in content[side]] for side in ("train", "held_out")}
        scenarios = ScenarioFile(
            path=path, server=content.get("server", ""), tools=content.get("tools", []),
            generator=content.get("generator", ""), train=sides["train"], held_out=sides["held_out"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} should hold {{"train": [{{"task": "...", "difficulty": 1}}, ...], "held_out": [...]}}: '
            f"{type(error).__name__} {error}. Mend it, or delete it to have new scenarios written"
        ) from None
    for side, rows in sides.items():
        if not rows:
            raise ConfigError(f"{path} has no scenarios in {side!r}")
    trained = {words_of(scenario.task) for scenario in scenarios.train}
    if both := [scenario.task for scenario in scenarios.held_out if words_of(scenario.task) in trained]:
        raise ConfigError(f"{path}: {both[0]!r} is trained on, so it cannot be held out too")
    return scenarios
