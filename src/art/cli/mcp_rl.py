"""`art mcp-rl SERVER --model M`: train an agent for the tools of an MCP server, without labels and without data.

discover the tools --> write scenarios --> train with RULER --> judge held-out ones, before beside after --> report

Everything is kept in the folder of `--out`. The same command goes on where the last one stopped: with the scenarios as
they stand in scenarios.json by then, from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from art.backends.local import LocalBackend
from art.cli.judged_run import Clock, train_and_compare
from art.cli.mcp_rl_files import Plan, load_plan, save_plan
from art.cli.mcp_rl_report import Run, describe_run
from art.cli.options.cost_options import add_cost_options, judge_settings, prices_of
from art.cli.options.judged_options import add_evaluation_options, add_generator_options, add_place_options
from art.cli.options.train_options import (
    add_judge_options,
    add_loop_options,
    add_model_options,
    make_judge,
    model_settings,
)
from art.cli.terminal.event_loop import run_coroutine
from art.cli.terminal.screen import Screen
from art.costs import Ledger
from art.errors import ConfigError
from art.mcp import GeneratedScenarioCollection, MCPClient, MCPResource, McpTask, MCPTool, generate_scenarios
from art.mcp.rollout import require_fit
from art.model import TrainableModel
from art.rewards import JudgeSettings
from art.rewards.ruler import DEFAULT_JUDGE

PREVIEW = 5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "mcp-rl", help="train an agent for the tools of an MCP server, without labels", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("server", help="address (streamable HTTP), or in quotes the command that starts it (stdio)")
    parser.add_argument(
        "--model", "--base-model", dest="base_model", required=True, metavar="M",
        help="what to train: hub id or local path of a model",
    )  # fmt: skip
    parser.add_argument("--name", help="of the trained model (default: after the server)")
    add_place_options(parser, project="mcp-rl")
    parser.add_argument("--out", type=Path, metavar="DIR", help="scenarios and report (default: mcp-rl/<name>)")
    add_loop_options(parser, whose=", ".join(f"{k} {v}" for k, v in _loop_defaults()))
    add_model_options(parser)
    _add_server_options(parser)
    _add_scenario_options(parser)
    add_judge_options(parser, "a language model scores the rollouts of each scenario", default=DEFAULT_JUDGE)
    add_cost_options(parser)
    add_evaluation_options(parser, "rollouts of each held-out scenario")
    parser.set_defaults(run=run)


def _loop_defaults() -> list[tuple[str, object]]:
    defaults = McpTask.defaults
    return [
        ("steps", defaults.num_steps), ("groups", defaults.groups_per_step), ("rollouts", defaults.rollouts_per_group),
    ]  # fmt: skip


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "how to reach it, and what the agent may do there")
    group.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'",
        help="of each HTTP request; $VARIABLES of the environment are filled in",
    )  # fmt: skip
    group.add_argument(
        "--server-env", action="append", default=[], metavar="NAME[=VALUE]",
        help="environment variable for the command; it gets no others but PATH, HOME and the like",
    )  # fmt: skip
    group.add_argument("--tools", type=_names, metavar="A,B", help="what the agent may use (default: every tool)")
    group.add_argument("--max-turns", type=int, default=10, help="answers of the model in a rollout (default: 10)")
    group.add_argument(
        "--max-completion-tokens", type=int, metavar="N", help="of one answer (default: what fits the context)"
    )
    group.add_argument(
        "--max-concurrent", type=int, default=16, metavar="N",
        help="rollouts at once, each with its own connection or process (default: 16)",
    )  # fmt: skip


def _add_scenario_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scenarios", "written once, into scenarios.json, which may be edited")
    group.add_argument("--num-scenarios", type=int, default=24, metavar="N", help="to train on (default: 24)")
    group.add_argument("--held-out", type=int, default=12, metavar="N", help="to test with (default: 12)")
    add_generator_options(group)


def run(args: argparse.Namespace) -> int:
    console = Screen()
    args.name = args.name or name_after(args.server)
    out: Path = (args.out or Path("mcp-rl") / args.name).resolve()
    for option in ("num_scenarios", "held_out"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} must be 1 or more, got {getattr(args, option)}")
    try:
        return run_coroutine(_McpRl(console, args, out, args.data_dir.resolve()).run())
    except KeyboardInterrupt:
        console.print("Stopped. Scenarios and every finished step are kept; the same command continues")
        return 130


@dataclass(slots=True)
class _McpRl:
    """One call of the command."""

    console: Console
    args: argparse.Namespace
    out: Path
    data_dir: Path

    async def run(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        args, clock = self.args, Clock.load(self.out)
        headers, env = read_headers(args.header), read_env(args.server_env)
        model: TrainableModel[Any, Any] = TrainableModel(
            name=args.name, project=args.project, base_model=args.base_model, base_path=str(self.data_dir),
            settings=model_settings(args), prices=prices_of(args), budget_usd=args.budget,
        )  # fmt: skip
        judge = make_judge(args, self.data_dir, model.costs)
        with clock.measure("discovering tools"):
            tools, resources = await self._discover(headers, env)
        request = {} if args.max_completion_tokens is None else {"max_completion_tokens": args.max_completion_tokens}
        async with LocalBackend(path=self.data_dir) as backend:
            # Before scenarios are paid for: a base model that is missing, or that cannot be trained here, ends it now.
            with clock.measure("starting"), self.console.status("Starting server, engine and trainer ..."):
                await model.register(backend)
                await require_fit(model, tools)
            with clock.measure("writing scenarios"):
                plan = await self._plan(tools, resources, model.costs)
            task = McpTask(
                args.server, train=plan.train, held_out=plan.held_out, tools=tools, headers=headers, env=env,
                max_turns=args.max_turns, max_concurrent=args.max_concurrent, request=request,
            )  # fmt: skip
            run = Run(
                args=args, command=command_of(sys.argv[1:]), plan=plan, tools=tools, model=model, clock=clock,
                step=await model.get_step(),
            )  # fmt: skip
            held_out = task.scenarios("test", seed=args.seed, count=len(plan.held_out))
            return await train_and_compare(
                run, task, judge, self.console, out=self.out, describe=lambda: describe_run(run),
                held_out=held_out, validation=held_out,
            )  # fmt: skip

    async def _discover(
        self, headers: dict[str, str], env: dict[str, str]
    ) -> tuple[Sequence[MCPTool], Sequence[MCPResource]]:
        async with MCPClient(self.args.server, headers=headers, env=env) as client:
            tools, resources = await client.list_tools(), await client.list_resources()
        names = [tool.name for tool in tools]
        if not tools:
            raise ConfigError(f"the MCP server {self.args.server} has no tools: an agent could do nothing there")
        wanted = self.args.tools or names
        if unknown := [name for name in wanted if name not in names]:
            raise ConfigError(f"--tools: the server has no {', '.join(unknown)}; it has {', '.join(names)}")
        self.console.print(f"{len(wanted)} tools: {', '.join(wanted)}", highlight=False)
        return [tool for tool in tools if tool.name in wanted], resources

    async def _plan(self, tools: Sequence[MCPTool], resources: Sequence[MCPResource], costs: Ledger) -> Plan:
        args = self.args
        names = [tool.name for tool in tools]
        plan = load_plan(self.out)
        if plan is not None:
            self.console.print(
                f"{len(plan.train)} scenarios to train on and {len(plan.held_out)} held out, of {plan.path}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
            if set(plan.tools) != set(names):
                self.console.print(
                    f"They were written for other tools ({', '.join(plan.tools)}). Delete the file to have new ones "
                    "written", style="yellow",
                )  # fmt: skip
            return plan
        generator, url = args.generator or args.judge, args.generator_url
        if args.generator is None and url is None:
            url = args.judge_url
        if url is not None:  # its server knows the model without the provider that litellm wants in front
            generator = generator.removeprefix("openai/").removeprefix("hosted_vllm/")
        # A price that was given is the judge's: of another model litellm has to know it.
        settings = JudgeSettings(budget=costs) if args.generator else judge_settings(args, JudgeSettings(), costs)
        with self.console.status(f"{generator} writes {args.num_scenarios + args.held_out} scenarios ..."):
            written = await generate_scenarios(
                tools=tools, resources=resources, num_scenarios=args.num_scenarios + args.held_out,
                show_preview=False, custom_instructions=args.instructions, generator_model=generator,
                generator_base_url=url, settings=settings,
            )  # fmt: skip
        train, held_out = written.shuffle(args.seed).interleave_difficulties().split(args.num_scenarios)
        plan = save_plan(self.out, args.server, names, generator, train, held_out)
        for scenario in GeneratedScenarioCollection(train)[:PREVIEW]:
            self.console.print(f"  {scenario.preview()}", highlight=False)
        self.console.print(
            f"{len(train)} scenarios to train on and {len(held_out)} held out are in {plan.path}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return plan


def name_after(server: str) -> str:
    """A model name after the server.

    Example: "python examples/inventory/server.py --db x" gives "inventory-server", "https://mcp.example.org/v1/mcp"
    gives "mcp-example-org".
    """
    if server.startswith(("http://", "https://")):
        words = [server.split("/")[2]]
    else:
        command = shlex.split(server)
        # What is run says more than what runs it: the first word with a path, else the last that is no option.
        paths = [word for word in command[1:] if "/" in word or "." in word]
        named = [word for word in command if not word.startswith("-")]
        words = [
            part for part in Path((paths or named[-1:] or ["server"])[0]).with_suffix("").parts[-2:] if part != "/"
        ]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
    return name[:48] or "server"


def read_headers(given: Sequence[str]) -> dict[str, str]:
    """
    Raises:
        ConfigError: no colon, or a variable that is not set.
    """
    headers = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError("--header takes 'NAME: VALUE', e.g. 'Authorization: Bearer $TOKEN'; it has no colon")
        headers[name.strip()] = _filled(value.strip())
    return headers


def read_env(given: Sequence[str]) -> dict[str, str]:
    """
    Raises:
        ConfigError: a variable without a value is not set here.
    """
    env = {}
    for text in given:
        name, equals, value = text.partition("=")
        env[name] = value if equals else _filled(f"${{{name}}}")
    return env


def _filled(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(f"the environment variable {name} is not set; export it before the command")
        return os.environ[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)


def command_of(argv: Sequence[str]) -> str:
    """The command for the report: what was typed, without keys in it."""
    shown, hide = [], ""
    for word in argv:
        option, equals, value = word.partition("=")
        if hide or (equals and option in ("--header", "--server-env")):
            kept = _without_value(value if not hide else word, ":" if (hide or option) == "--header" else "=")
            shown.append(kept if hide else f"{option}={kept}")
            hide = ""
            continue
        hide = word if word in ("--header", "--server-env") else ""
        shown.append(word)
    return shlex.join(["art", *shown])


def _without_value(text: str, separator: str) -> str:
    """A value that stands in the environment may be shown by its name; another is left out."""
    name, found, value = text.partition(separator)
    return text if not found or "$" in value else f"{name}{separator} ..."


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
