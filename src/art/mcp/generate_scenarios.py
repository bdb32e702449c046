"""Scenarios from the tools of an MCP server, written by a language model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from art.errors import BudgetError, GenerationError, JudgeError
from art.mcp.client import MCPClient
from art.mcp.collection import GeneratedScenarioCollection, words_of
from art.mcp.scenario_prompt import prompt, read_scenarios, response_format
from art.mcp.types import GeneratedScenario, MCPResource, MCPTool
from art.model import Model
from art.rewards.completion import JudgeClient
from art.rewards.settings import JudgeSettings

logger = logging.getLogger(__name__)

OPENROUTER_URL = "https://openrouter.ai/api/v1"
PER_REQUEST = 25
"""Scenarios to ask for at once: with more, models repeat themselves, and answers are cut short."""
MAX_COMPLETION_TOKENS = 8000
"""Of one answer; a scenario has about 60."""
MAX_SIMILARITY = 0.8
"""Two tasks are the same if this share of the words that either has is in both (Jaccard index)."""


async def generate_scenarios(
    tools: Sequence[MCPTool | Mapping[str, Any]] | None = None,
    resources: Sequence[MCPResource | Mapping[str, Any]] = (),
    num_scenarios: int = 24,
    show_preview: bool = True,
    custom_instructions: str | None = None,
    generator_model: str | Model[Any, Any] = "openai/gpt-4.1-mini",
    generator_api_key: str | None = None,
    generator_base_url: str | None = OPENROUTER_URL,
    *,
    server_url: str | Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    settings: JudgeSettings | None = None,
) -> GeneratedScenarioCollection:
    """Exactly `num_scenarios` different scenarios.

    Answers are checked. Duplicates and what cannot be used are dropped, and others asked for in their place.

    Args:
        tools, resources: of a server, if you have them; or else give `server_url`.
        show_preview: write a few of them to standard output.
        custom_instructions: what to write about, in your words.
        generator_model: who writes: an `art.Model`, the name of a model at `generator_base_url`, or, with
            `generator_base_url=None`, a model as litellm names it.
        generator_api_key: by default that of `OPENROUTER_API_KEY`, or of `OPENAI_API_KEY` for other addresses.
        generator_base_url: an OpenAI-compatible address.
        server_url: a running server's address, or a command that starts one: tools and resources are asked for there.
        headers: of requests to `server_url`.
        settings: time-outs, attempts, prices and budget of requests to the generator.

    Raises:
        ValueError: no tools, no key for OpenRouter, or no positive number.
        ToolServerError: the server failed.
        GenerationError: the generator failed, or found no more scenarios that differ from the others.
        BudgetError: the budget of `settings` is spent.
    """
    if num_scenarios < 1:
        raise ValueError(f"num_scenarios must be 1 or more, got {num_scenarios}")
    if (tools is None) == (server_url is None):
        raise ValueError("give either `tools` or `server_url`, which is asked for its tools")
    settings = settings or JudgeSettings()
    client = _generator(generator_model, generator_api_key, generator_base_url, settings)
    if server_url is not None:
        async with MCPClient(server_url, headers=headers) as server:
            tools, resources = await server.list_tools(), [*resources, *await server.list_resources()]
    known_tools = [tool if isinstance(tool, MCPTool) else MCPTool.from_dict(tool) for tool in tools or ()]
    known_resources = [item if isinstance(item, MCPResource) else MCPResource.from_dict(item) for item in resources]
    if not known_tools:
        raise ValueError(f"there are no tools{f' at {server_url}' if server_url else ''}: an agent could do nothing")
    found = await _collect(client, known_tools, known_resources, num_scenarios, custom_instructions, settings)
    scenarios = GeneratedScenarioCollection(found)
    if show_preview:
        preview_scenarios(scenarios)
        scenarios.print_difficulty_distribution()
    return scenarios


def preview_scenarios(scenarios: Sequence[GeneratedScenario], n: int = 5) -> None:
    """Write the first `n` to standard output."""
    GeneratedScenarioCollection(scenarios).preview(n)


def _generator(
    model: str | Model[Any, Any], api_key: str | None, base_url: str | None, settings: JudgeSettings
) -> JudgeClient:
    limit = {"max_completion_tokens": MAX_COMPLETION_TOKENS}
    if isinstance(model, str) and base_url is None:
        return JudgeClient(model, limit | ({"api_key": api_key} if api_key else {}), settings, source="generator")
    if isinstance(model, str):
        at_openrouter = base_url == OPENROUTER_URL
        key = api_key or os.environ.get("OPENROUTER_API_KEY" if at_openrouter else "OPENAI_API_KEY")
        if at_openrouter and not key:
            raise ValueError(
                "OpenRouter wants a key: set OPENROUTER_API_KEY or pass `generator_api_key`; or pass "
                "`generator_base_url` of another OpenAI-compatible server, or None to go through litellm"
            )
        # As a `Model` the name is sent as it is: OpenRouter's names begin with a provider too.
        model = Model(
            name="generator", project="generator", inference_model_name=model,
            inference_base_url=base_url, inference_api_key=key or "none",
        )  # fmt: skip
    return JudgeClient(model, limit, settings, source="generator")


async def _collect(
    client: JudgeClient,
    tools: Sequence[MCPTool],
    resources: Sequence[MCPResource],
    count: int,
    instructions: str | None,
    settings: JudgeSettings,
) -> list[GeneratedScenario]:
    found: list[GeneratedScenario] = []
    in_vain, complaint = 0, None
    while len(found) < count:
        asked = min(count - len(found), PER_REQUEST)
        known = [scenario.task for scenario in found]
        messages = prompt(tools, resources, asked, instructions=instructions, known=known, complaint=complaint)
        try:
            answer = await client.complete(messages, response_format())
        except BudgetError:
            raise
        except JudgeError as error:
            raise GenerationError(f"the generator of scenarios failed: {error.message}") from error
        complaint = None
        try:
            written = read_scenarios(answer.text)
        except GenerationError as error:
            written, complaint = [], error.message
        new = _without_duplicates(found, written)[:asked]
        found += new
        in_vain = 0 if new else in_vain + 1
        if not new and complaint is None:
            complaint = "each of its scenarios existed already, or differed from one by a few words only"
        if in_vain == settings.max_answers:
            raise GenerationError(
                f"the generator wrote {len(found)} of {count} scenarios; then {in_vain} answers brought nothing new: "
                f"{complaint}. Ask for fewer, give it `custom_instructions`, or take a stronger model"
            )
        logger.info("%d of %d scenarios", len(found), count)
    return found


def _without_duplicates(
    known: Sequence[GeneratedScenario], written: Sequence[GeneratedScenario]
) -> list[GeneratedScenario]:
    """Those of `written` that differ from all of `known` and from each other."""
    seen = [words_of(scenario.task) for scenario in known]
    new = []
    for scenario in written:
        words = words_of(scenario.task)
        if all(len(words & other) < MAX_SIMILARITY * len(words | other) for other in seen):
            seen.append(words)
            new.append(scenario)
    return new
