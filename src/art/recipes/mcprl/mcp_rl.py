"""MCP-RL: train an agent for the tools of an MCP server, without labels and without data.

discover the tools --> write scenarios --> train with RULER --> compare before and after on held-out ones --> report
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.backends.local import LocalBackend
from art.costs import Ledger
from art.errors import ConfigError
from art.mcp import GeneratedScenarioCollection, MCPClient, MCPResource, McpTask, MCPTool, generate_scenarios
from art.mcp.rollout import require_fit
from art.recipes.judged.clock import Clock
from art.recipes.judged.judged_run import JudgedResult, train_and_compare
from art.recipes.mcprl.mcp_rl_config import McpRlConfig
from art.recipes.mcprl.mcp_rl_report import McpRlRun, describe_run
from art.recipes.mcprl.scenario_file import ScenarioFile, load_scenarios, scenario_path
from art.recipes.progress import OnProgress, Progress, ProgressKind, log_progress

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
        clock, model = Clock.load(self.out), config.make_model()
        judge = config.make_judge(model.costs, rubric=config.rubric)
        with clock.measure("discovering tools"):
            tools, resources = await self._discover()
        async with LocalBackend(path=config.data_dir) as backend:
            # Before scenarios are paid for: a base model that is missing, or that cannot be trained here, ends it now.
            self._say("Starting server, engine and trainer ...", "busy")
            with clock.measure("starting"):
                await model.register(backend)
                await model.record_settings(config.to_record())
                await require_fit(model, tools)
            with clock.measure("writing scenarios"):
                scenarios = self._load_scenarios(tools)
                scenarios = scenarios or await self._write_scenarios(tools, resources, model.costs)
            task = McpTask(
                self.server, train=scenarios.train, held_out=scenarios.held_out, tools=tools, headers=config.headers,
                env=config.env, max_turns=config.max_turns, max_concurrent=config.max_concurrent,
                request={} if limit is None else {"max_completion_tokens": limit},
            )  # fmt: skip
            run = McpRlRun(
                config=config, model=model, task=task, judge=judge, out=self.out, clock=clock, command=self.command,
                on_progress=self.on_progress, step=await model.get_step(), server=self.server, scenarios=scenarios,
                tools=tools,
            )  # fmt: skip
            held_out = task.scenarios("test", seed=config.seed, count=len(scenarios.held_out))
            return await train_and_compare(
                run, held_out=held_out, validation=held_out, describe=lambda: describe_run(run)
            )

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
        train, held_out = written.shuffle(config.seed).interleave_difficulties().split(config.num_scenarios)
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

    Example: "python examples/inventory/server.py --db x" gives "inventory-server", "https://mcp.example.org/v1/mcp"
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
