"""`art mcp-rl SERVER --model M`: train an agent for the tools of an MCP server, without labels and without data.

discover the tools --> write scenarios --> train with RULER --> judge held-out ones before and after --> report

RULER is a language model that compares the rollouts of one scenario. Everything is kept in the folder of `--out`. The
same command continues from the newest checkpoint, with the scenarios that scenarios.json then has.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from art.cli.output import run_coroutine
from art.errors import ConfigError
from art.model.run_settings import command_line
from art_recipes.arguments import add_recipe_options, add_settings, config_of
from art_recipes.mcp import McpTask
from art_recipes.mcprl import McpRlConfig, mcp_rl
from art_recipes.screen import ProgressPrinter, Screen, exit_code, print_page_line


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", help="address (streamable HTTP), or in quotes the command that starts it (stdio)")
    parser.add_argument(
        "--model", "--base-model", dest="base_model", required=True, metavar="M",
        help="what to train: hub id or local path of a model",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="scenarios and report (default: mcp-rl/<name>)")
    judged = "a language model scores the rollouts of each scenario"
    add_settings(parser, McpRlConfig, "held_out_rollouts")
    add_recipe_options(parser, McpRlConfig, judged, McpTask.defaults)
    server = parser.add_argument_group("server", "how to reach it, and what the agent may do there")
    server.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'",
        help="header of each HTTP request; $VARIABLES of the environment are filled in",
    )  # fmt: skip
    server.add_argument(
        "--server-env", action="append", default=[], metavar="NAME[=VALUE]",
        help="environment variable for the command; it gets no others but PATH, HOME and the like",
    )  # fmt: skip
    server.add_argument(
        "--tools",
        type=lambda text: [*filter(None, map(str.strip, text.split(",")))],
        metavar="A,B",
        help="what the agent may use (default: every tool)",
    )
    add_settings(server, McpRlConfig, "max_turns", "max_completion_tokens", "max_concurrent")
    group = parser.add_argument_group("scenarios", "written once, into scenarios.json, which may be edited")
    add_settings(group, McpRlConfig, "num_scenarios", "held_out", "generator", "generator_url", "instructions")


def run(args: argparse.Namespace) -> int:
    console, config = Screen(), config_of(McpRlConfig, args)
    headers, env, command = read_headers(args.header), read_env(args.server_env), command_line(["art", *args.argv])
    try:
        with ProgressPrinter(console) as printer:
            training = mcp_rl(
                args.server, out=args.out, config=config, on_progress=printer, command=command, headers=headers, env=env
            )
            result = run_coroutine(training)
        print_page_line(console, Path(result.model.base_path))
        return exit_code(result)
    except KeyboardInterrupt:
        console.print("Stopped. Scenarios and every finished step are kept; the same command continues")
        return 130


def read_headers(options: Sequence[str]) -> dict[str, str]:
    """Read options of the form "NAME: VALUE" as headers by name, with $VARIABLES of the environment filled in.

    Raises:
        ConfigError: an option has no colon, or names a variable that is not set.
    """
    headers = {}
    for text in options:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError("--header takes 'NAME: VALUE', e.g. 'Authorization: Bearer $TOKEN'; it has no colon")
        headers[name.strip()] = _filled(value.strip())
    return headers


def read_env(options: Sequence[str]) -> dict[str, str]:
    """Read options of the form NAME=VALUE as environment variables. NAME alone takes its value from this process.

    Raises:
        ConfigError: a variable without a value is not set here.
    """
    env = {}
    for text in options:
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
