"""Jobs for an agent with the tools of a server: what is asked, the calls that do it, and what must come of it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
Call = tuple[str, dict[str, Any]]
"""A tool and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a user asks of the agent. It says nothing of the server's state, except as right or wrong calls need it."""

    task: str
    difficulty: int
    """From 1 to 5. It is equal for jobs of a kind."""
    call: Call
    """The call that does the job, or the last of those that do."""
    answer: Callable[[str], str]
    """Returns the right answer from the result of `call`."""
    mistaken: Callable[[str], str] = lambda result: "done"
    """Returns the answer of a player who reads the wrong line of the result."""
    slips: tuple[Call, ...] = ()
    """Wrong calls, as a beginner makes them."""
    before: tuple[Call, ...] = ()
    """Calls that come before `call`, e.g. to look something up."""

    @property
    def calls(self) -> tuple[Call, ...]:
        return (*self.before, self.call)


def field_job(
    task: str, difficulty: int, call: Call, field: str, other: str, slips: Iterable[Call], **fields: Any
) -> Job:
    """Make a job whose answer is `field` of the first object that the tool returns. Beginners read `other` instead."""
    return Job(
        task=task, difficulty=difficulty, call=call, slips=tuple(slips), answer=lambda result: field_of(result, field),
        mistaken=lambda result: field_of(result, other), **fields,
    )  # fmt: skip


def planned_job(task: str, difficulty: int, calls: Sequence[Call], answer: str) -> Job:
    """Make a job of several calls whose answer follows from the state, not from the result of the last call."""
    return Job(task=task, difficulty=difficulty, before=tuple(calls[:-1]), call=calls[-1], answer=lambda result: answer)


def field_of(result: str, name: str) -> str:
    """Return a field of the first object in a tool's result, as text.

    Example: field_of('{"price": 35.5}', "price") is "35.5", and field_of('{"result": []}', "price") is "nothing".
    """
    try:
        first, _ = json.JSONDecoder().raw_decode(result)
    except ValueError:
        return "failed"
    if first == {"result": []}:
        return "nothing"
    return str(first.get(name, "failed")) if isinstance(first, dict) else "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What an agent did: its calls with their results, and what it said with `complete_task`, `None` if it did not."""

    calls: list[tuple[Call, str]]
    summary: str | None


def read_transcript(messages: Iterable[dict[str, Any]]) -> Transcript:
    """Read the calls in a conversation. Arguments that are not JSON are `None`."""
    messages = list(messages)
    results = {m["tool_call_id"]: str(m.get("content")) for m in messages if m["role"] == "tool"}
    calls: list[tuple[Call, str]] = []
    summary = None
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        name, text = call["function"]["name"], call["function"]["arguments"]
        arguments: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if name == "complete_task":
            summary = str(arguments.get("summary", "")) if isinstance(arguments, dict) else ""
        else:
            calls.append(((name, arguments), results.get(call["id"], "Error: no result")))
    return Transcript(calls=calls, summary=summary)


def says(summary: str | None, answer: str, *, room: int = 30) -> bool:
    """Whether a summary contains the answer as whole words, with at most `room` characters of other text.

    A whole number may be written with or without decimals: "It is 90" has the answer "90.0". Day and time may be apart.
    """
    return summary is not None and len(summary) <= len(answer) + room and mentions(summary, answer)


def mentions(text: str, answer: str) -> bool:
    """Whether a text of any length contains the answer as whole words."""
    parts = answer.split() if _TIME.fullmatch(answer) else [answer]
    return all(re.search(rf"(?<![\w.-]){_form_of(part)}(?!\w|\.\d)", text) for part in parts)


def _form_of(part: str) -> str:
    whole = re.fullmatch(r"(\d+)(?:\.0+)?", part)
    return rf"{whole[1]}(?:\.0+)?" if whole else re.escape(part)


def grade_transcript(job: Job, messages: Iterable[dict[str, Any]]) -> tuple[float, str]:
    """Score a rollout from 0 to 1 by its transcript alone, as a judge sees it, with an explanation."""
    transcript = read_transcript(messages)
    done = [result for call, result in transcript.calls if call == job.call and not result.startswith("Error")]
    errors = sum(result.startswith("Error") for _, result in transcript.calls)
    useful = [call for call, result in transcript.calls if call in job.calls and not result.startswith("Error")]
    others = len(transcript.calls) - len(useful) - errors
    summary = transcript.summary
    is_right = bool(done) and says(summary, job.answer(done[0]))
    score = 0.05 + 0.45 * bool(done) + 0.4 * is_right + 0.1 * (summary is not None)
    score -= 0.1 * errors + 0.15 * others
    name, arguments = job.call
    words = [f"It called {name} as the task asks." if done else f"It never called {name} with {arguments}."]
    if summary is None:
        words.append("It did not answer.")
    else:
        words.append(f"Its answer {summary!r} {'has the result' if is_right else 'is not what the task asks for'}.")
    words += [f"{errors} calls failed."] * bool(errors) + [f"{others} calls did not help."] * bool(others)
    return min(max(round(score, 2), 0.0), 1.0), " ".join(words)
