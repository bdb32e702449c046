"""The prompts from which a generator writes inputs and a task, and the reading of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art.errors import GenerationError
from art.rewards.ruler import DEFAULT_RUBRIC
from art.scenarios.rows import candidates_in, clean, conversation, further_parts, json_format, read_rows, rows_format
from art.scenarios.written import MAX_DIFFICULTY, MIN_DIFFICULTY, TaskText, WrittenScenario

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

INPUTS_FORMAT = rows_format("input")
TASK_FORMAT = json_format(
    "task", {"system_prompt": {"type": "string"}, "standards": {"type": "array", "items": {"type": "string"}}}
)


def ask_for_inputs(
    description: str, instructions: str | None, count: int, known: Sequence[str], complaint: str | None
) -> list[dict[str, Any]]:
    """Write the messages that ask a generator for `count` inputs other than those in `known`.

    `complaint` says what was wrong with its last answer.
    """
    parts = [f"The job: {description}", f"Write exactly {count} inputs."]
    return conversation(_WRITE_INPUTS, [*parts, *further_parts(instructions, known, complaint)])


def ask_for_task(description: str, *, instructions: str | None, complaint: str | None) -> list[dict[str, Any]]:
    """Write the messages that ask a generator for a task's system prompt and standards (what a good answer is)."""
    return conversation(_WRITE_TASK, [f"The job: {description}", *further_parts(instructions, (), complaint)])


def read_inputs(text: str) -> list[WrittenScenario]:
    """Read the inputs in a generator's answer (see `read_rows`).

    Raises:
        GenerationError: the answer has none. The message tells the generator why.
    """
    return [WrittenScenario(input=words, difficulty=difficulty) for words, difficulty in read_rows(text, "input")]


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
