"""From one sentence to a data set: inputs, a system prompt and a rubric, written by a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art.model import Model
from art.rewards.settings import JudgeSettings
from art.scenarios.dataset import Dataset
from art.scenarios.questions import INPUTS_FORMAT, TASK_FORMAT, ask_for_inputs, ask_for_task, read_inputs, read_task
from art.scenarios.writer import Messages, Writer
from art.scenarios.written import TaskText, WrittenScenario, with_splits

DEFAULT_GENERATOR = "openai/gpt-4.1-mini"
DEFAULT_NUM = 64


async def generate_inputs(
    description: str,
    num: int = DEFAULT_NUM,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    generator_base_url: str | None = None,
    generator_api_key: str | None = None,
    instructions: str | None = None,
    known: Sequence[str] = (),
    settings: JudgeSettings | None = None,
) -> list[WrittenScenario]:
    """Have a language model write exactly `num` inputs for an agent that does what `description` says.

    Answers are checked. Duplicates and invalid inputs are dropped and replaced.

    Args:
        generator: the model, as litellm names it; or an `art.Model`, the name of a model at `generator_base_url`, or a
            `Writer`, which has address and settings already.
        generator_base_url: an OpenAI-compatible address.
        generator_api_key: by default litellm's key for the provider, or `OPENAI_API_KEY` for an address.
        instructions: what to write about, in your words.
        known: inputs that exist already and are not written again.
        settings: time-outs, attempts, prices and budget of requests to the generator.

    Raises:
        ValueError: the description is empty, or `num` is below 1.
        GenerationError: the generator failed, or wrote no more inputs that differ from the others.
        BudgetError: the budget of `settings` is spent.
    """
    description = _checked(description)
    if num < 1:
        raise ValueError(f"num must be 1 or more, got {num}")
    writer = _writer(generator, generator_base_url, generator_api_key, settings)

    def ask(count: int, *, known: Sequence[str], complaint: str | None) -> Messages:
        return ask_for_inputs(description, count, instructions=instructions, known=known, complaint=complaint)

    return await writer.write_many(num, ask, read_inputs, lambda scenario: scenario.input, INPUTS_FORMAT, known)


async def write_task_text(
    description: str,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    generator_base_url: str | None = None,
    generator_api_key: str | None = None,
    instructions: str | None = None,
    settings: JudgeSettings | None = None,
) -> TaskText:
    """Have a language model write a system prompt, and a rubric for the judge.

    For arguments and errors see `generate_inputs`.
    """
    description = _checked(description)
    writer = _writer(generator, generator_base_url, generator_api_key, settings)
    return await writer.write(
        lambda complaint: ask_for_task(description, instructions=instructions, complaint=complaint),
        lambda text: read_task(text, description),
        TASK_FORMAT,
    )


async def generate_dataset(
    description: str,
    num: int = DEFAULT_NUM,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    generator_base_url: str | None = None,
    generator_api_key: str | None = None,
    instructions: str | None = None,
    settings: JudgeSettings | None = None,
) -> Dataset:
    """Have a language model write inputs in their splits, a system prompt and a rubric.

    For arguments and errors see `generate_inputs`.
    """
    writer = _writer(generator, generator_base_url, generator_api_key, settings)
    task = await write_task_text(description, writer, instructions=instructions)
    inputs = await generate_inputs(description, num, writer, instructions=instructions)
    return Dataset(task=task, scenarios=with_splits(inputs))


def _checked(description: str) -> str:
    if not description.strip():
        raise ValueError("the description is empty: say in a sentence what the agent should do")
    return " ".join(description.split())


def _writer(
    generator: str | Model[Any, Any] | Writer, base_url: str | None, api_key: str | None, settings: JudgeSettings | None
) -> Writer:
    if isinstance(generator, Writer):
        if base_url or api_key or settings:
            raise ValueError("a `Writer` has its own address, key and settings; pass them to `Writer(...)` instead")
        return generator
    return Writer(generator, base_url=base_url, api_key=api_key, settings=settings)
