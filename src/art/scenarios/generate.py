"""Makes a data set from one sentence: a language model writes inputs, a system prompt and a rubric."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from art.model import Model
from art.scenarios.dataset import Dataset
from art.scenarios.questions import INPUTS_FORMAT, TASK_FORMAT, ask_for_inputs, ask_for_task, read_inputs, read_task
from art.scenarios.writer import Writer
from art.scenarios.written import TaskText, WrittenScenario, with_splits

DEFAULT_GENERATOR = "openai/gpt-4.1-mini"
DEFAULT_NUM = 64


async def generate_inputs(
    description: str,
    num: int = DEFAULT_NUM,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    instructions: str | None = None,
    known: Sequence[str] = (),
) -> list[WrittenScenario]:
    """Have a language model write exactly `num` inputs for an agent that does what `description` says.

    Answers are checked. Duplicates and invalid inputs are dropped and replaced.

    Args:
        generator: the model, as litellm names it; or an `art.Model`; or a `Writer`, which can have an address, a key,
            time-outs, attempts, prices and a budget.
        instructions: what to write about, in your words.
        known: inputs that exist already and are not written again.

    Raises:
        ValueError: the description is empty, or `num` is below 1.
        GenerationError: the generator failed, or wrote no more inputs that differ from the others.
        BudgetError: the budget of the writer is spent.
    """
    description = _checked(description)
    if num < 1:
        raise ValueError(f"num must be 1 or more, got {num}")
    writer, ask = _writer(generator), partial(ask_for_inputs, description, instructions)
    return await writer.write_many(num, ask, read_inputs, lambda scenario: scenario.input, INPUTS_FORMAT, known)


async def write_task_text(
    description: str,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    instructions: str | None = None,
) -> TaskText:
    """Have a language model write the texts of a task: a system prompt, and a rubric for the judge.

    For arguments and errors see `generate_inputs`.
    """
    description = _checked(description)
    return await _writer(generator).write(
        lambda complaint: ask_for_task(description, instructions=instructions, complaint=complaint),
        lambda text: read_task(text, description),
        TASK_FORMAT,
    )


async def generate_dataset(
    description: str,
    num: int = DEFAULT_NUM,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    instructions: str | None = None,
) -> Dataset:
    """Have a language model write a whole data set: inputs in three splits, a system prompt and a rubric.

    For arguments and errors see `generate_inputs`.
    """
    writer = _writer(generator)
    task = await write_task_text(description, writer, instructions=instructions)
    inputs = await generate_inputs(description, num, writer, instructions=instructions)
    return Dataset(task=task, scenarios=with_splits(inputs))


def _checked(description: str) -> str:
    if not description.strip():
        raise ValueError("the description is empty: say in a sentence what the agent should do")
    return " ".join(description.split())


def _writer(generator: str | Model[Any, Any] | Writer) -> Writer:
    return generator if isinstance(generator, Writer) else Writer(generator)
