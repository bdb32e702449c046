"""Makes a data set from one sentence: a language model writes inputs, a system prompt and a rubric."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from art.errors import GenerationError
from art.model import Model
from art.rewards.grader import objects_in
from art.rewards.ruler import DEFAULT_RUBRIC
from art_recipes.scenarios.dataset import Dataset
from art_recipes.scenarios.writer import Writer
from art_recipes.scenarios.written import MAX_DIFFICULTY, MIN_DIFFICULTY, TaskText, WrittenScenario, with_splits

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

    def ask(count: int, existing: Sequence[str], complaint: str | None) -> list[dict[str, Any]]:
        parts = [f"The job: {description}", f"Write exactly {count} inputs."]
        return conversation(_WRITE_INPUTS, [*parts, *further_parts(instructions, existing, complaint)])

    def read(text: str) -> list[WrittenScenario]:
        return [WrittenScenario(input=words, difficulty=difficulty) for words, difficulty in read_rows(text, "input")]

    writer = _writer(generator)
    return await writer.write_many(num, ask, read, lambda scenario: scenario.input, rows_format("input"), known)


async def write_task_text(
    description: str,
    generator: str | Model[Any, Any] | Writer = DEFAULT_GENERATOR,
    *,
    instructions: str | None = None,
) -> TaskText:
    """Have a language model write the texts of a task: a system prompt, and a rubric for the judge.

    For arguments and errors see `generate_inputs`.
    """
    job = _checked(description)

    def ask(complaint: str | None) -> list[dict[str, Any]]:
        return conversation(_WRITE_TASK, [f"The job: {job}", *further_parts(instructions, (), complaint)])

    return await _writer(generator).write(ask, lambda text: read_task(text, job), TASK_FORMAT)


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


_WRITE_INPUTS = f"""You write inputs for an assistant that is to be trained for one job. You are told what the job is.

- An input is what a user of the assistant would send: complete, with the text or data that the job needs, and \
without the answer.
- Its difficulty is a whole number from {MIN_DIFFICULTY} to {MAX_DIFFICULTY}: {MIN_DIFFICULTY} is routine, \
{MAX_DIFFICULTY} takes care, or is ambiguous or at the edge of the job. Use all of them about equally often.
- Inputs differ in subject, length, tone and in what makes them hard, not only in names and numbers. Real users are \
brief or long-winded, make mistakes, and leave things out.
- Each can be understood alone: none refers to another.

Answer with JSON only: {{"scenarios": [{{"input": "...", "difficulty": 3}}, ...]}}"""

_WRITE_TASK = """An assistant is to be trained for one job. You are told what the job is. Write

- `system_prompt`: what the assistant is told before each input, addressed to it. It says what to do, in which form, \
and what to do when an input does not fit the job. At most 200 words; no examples.
- `standards`: 3 to 6 sentences by which somebody who compares two answers to one input tells which is better. Each \
can be checked by reading input and answer, and they say nothing about style where style does not matter.

Answer with JSON only: {"system_prompt": "...", "standards": ["...", ...]}"""


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Make the JSON schema of an object with exactly these properties, as OpenAI's strict mode wants it."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def rows_format(field: str) -> dict[str, Any]:
    """Make OpenAI's `response_format` for a list `scenarios` of objects with a text `field` and a difficulty."""
    # Several providers support no minimum and maximum in strict schemas, but all support an enumeration.
    difficulty = {"type": "integer", "enum": list(range(MIN_DIFFICULTY, MAX_DIFFICULTY + 1))}
    item = object_schema({field: {"type": "string"}, "difficulty": difficulty})
    return json_format("scenarios", {"scenarios": {"type": "array", "items": item}})


def json_format(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = object_schema(properties)
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


TASK_FORMAT = json_format(
    "task", {"system_prompt": {"type": "string"}, "standards": {"type": "array", "items": {"type": "string"}}}
)


def read_task(text: str, description: str) -> TaskText:
    """Read the texts of a task in a generator's answer. The rubric is RULER's own, followed by the answer's standards.

    Raises:
        GenerationError: one of them is missing. The message tells the generator so.
    """
    for value in candidates_in(text):
        if not isinstance(value, dict):
            continue
        system_prompt, standards = value.get("system_prompt"), value.get("standards")
        standards = [standards] if isinstance(standards, str) else standards
        if not isinstance(system_prompt, str) or not system_prompt.strip() or not isinstance(standards, list):
            continue
        lines = [clean(line).lstrip("-*• ") for line in standards if isinstance(line, str) and line.strip()]
        if lines:
            rubric = "\n".join([DEFAULT_RUBRIC, "", "In this job:", *(f"- {line}" for line in lines)])
            return TaskText(description=description, system_prompt=clean(system_prompt), rubric=rubric)
    raise GenerationError(
        "it is not a JSON object with a text `system_prompt` and a list of texts `standards`, or it was cut short"
    )


MAX_SHOWN = 200
"""Number of the newest texts that a generator is shown, so that it does not write them again."""


def further_parts(instructions: str | None, known: Sequence[str], complaint: str | None) -> list[str]:
    """Write the end of a request: instructions, texts that exist already, and what was wrong with the last answer."""
    parts = [instructions] if instructions else []
    if known:
        parts.append("These exist already; write other ones:\n" + "\n".join(f"- {text}" for text in known[-MAX_SHOWN:]))
    if complaint:
        parts.append(f"Your last answer was of no use: {complaint}.")
    return parts


def candidates_in(text: str) -> list[Any]:
    """JSON values in a model's answer: only the whole answer if that is JSON, else all values in it, the last first."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return objects_in(text)[::-1]  # models think aloud first


def conversation(system: str, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Make the messages of a request: a system message, and the parts as one user message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(parts)}]


def read_rows(text: str, field: str) -> list[tuple[str, int]]:
    """Read the scenarios in a generator's answer: pairs of text and difficulty.

    Unambiguous mistakes are repaired: a fence or words around the JSON, a list without the object around it, a
    difficulty in quotes. Rows without a text or with an invalid difficulty are left out.

    Raises:
        GenerationError: the answer has no rows. The message tells the generator why.
    """
    for value in candidates_in(text):
        rows = value.get("scenarios") if isinstance(value, dict) else value
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
            valid = [row for row in (_read_row(row, field) for row in rows) if row is not None]
            if valid:
                return valid
            raise GenerationError(
                f"no scenario has both a text `{field}` and a difficulty from {MIN_DIFFICULTY} to {MAX_DIFFICULTY}"
            )
    raise GenerationError("it is not a JSON object with a list `scenarios`, or it was cut short")


def _read_row(row: Any, field: str) -> tuple[str, int] | None:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        return None
    difficulty = row.get("difficulty")
    try:
        if isinstance(difficulty, (str, float)):
            difficulty = int(difficulty) if float(difficulty) == int(float(difficulty)) else None
    except (ValueError, OverflowError):
        return None
    if isinstance(difficulty, bool) or difficulty not in range(MIN_DIFFICULTY, MAX_DIFFICULTY + 1):
        return None
    return clean(text), difficulty


def clean(text: str) -> str:
    """Strip blanks, and replace lone surrogates, which JSON can hold and files cannot."""
    return text.encode("utf-8", "replace").decode().strip()
