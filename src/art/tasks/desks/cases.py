"""Cases: the state that a rollout finds, the job in it, and the state and answer that are right; and their rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from art.tasks.desks.desk_jobs import Job, Transcript, mentions, says

OUTCOMES = {"solved": 1.0, "misreported": 0.4, "unsolved": 0.0, "damaged": -0.25, "no_answer": -0.5}
"""Rewards. `solved`: state and answer are right. `misreported`: the change was made, but the answer is wrong.
`unsolved`: nothing was changed, and the job is not done. `damaged`: something was changed that nobody asked for.
`no_answer`: the rollout ended without an answer by `complete_task`."""
LOOKED = 0.1
"""Further reward for an unsolved rollout in which a tool returned the answer, or the job's last call was made."""
DETOUR, MAX_DETOURS = 0.05, 4
"""Cost of a call that failed or was not needed, and how many of them count."""

_ROOM = 120
"""Longest text around an answer, in characters: a sentence or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job, with a state in which it can be done."""

    job: Job
    start: list[dict[str, Any]]
    """The rows of the state that the rollout finds."""
    end: list[dict[str, Any]]
    """The rows that it must leave, in the same order of their first field."""
    answer: str
    """What the agent must say, worked out from the rows and not by the server."""
    changes: bool
    """Whether the job asks for a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rollout did to a case."""

    outcome: str
    num_detours: int
    looked: bool
    why: str

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the reward by name."""
        return {
            "outcome": OUTCOMES[self.outcome],
            "looked": LOOKED if self.looked and self.outcome == "unsolved" else 0.0,
            "detours": 0.0 if self.outcome == "no_answer" else -DETOUR * min(self.num_detours, MAX_DETOURS),
        }


def judge_case(case: Case, transcript: Transcript, rows: list[dict[str, Any]]) -> Verdict:
    """Judge a rollout by the rows that it left, its calls and its answer."""
    results = [(call, result) for call, result in transcript.calls if not result.startswith("Error")]
    looked = any(call == case.job.call or mentions(result, case.answer) for call, result in results)
    num_failed = len(transcript.calls) - len(results)
    num_detours = max(len(transcript.calls) - len(case.job.calls), num_failed)
    is_right = says(transcript.summary, case.answer, room=_ROOM) and not _lists_numbers(transcript.summary or "", case)
    if transcript.summary is None:
        outcome, why = "no_answer", "it gave no answer"
    elif rows == case.end and is_right and (looked or case.changes):
        outcome, why = "solved", f"the state is right, and so is the answer {case.answer}"
    elif rows == case.end and case.changes:
        outcome, why = (
            "misreported",
            f"the change was made, but the answer is {transcript.summary!r}, not {case.answer}",
        )
    elif rows in (case.start, case.end):
        outcome, why = "unsolved", f"nothing came of it; the answer {transcript.summary!r} had to be {case.answer}"
        if is_right:
            why = f"the answer {case.answer} is right, but nothing was looked up or changed for it"
    else:
        outcome, why = "damaged", "the state has changes that nobody asked for"
    return Verdict(outcome=outcome, num_detours=num_detours, looked=looked, why=why)


def _lists_numbers(summary: str, case: Case) -> bool:
    """Whether a summary has more than one number which is neither the answer nor in the task.

    Otherwise an agent could list all that a tool returned, and the answer would always be there.
    """

    def numbers(text: str) -> set[str]:
        return {number.removesuffix(".0") for number in re.findall(r"(?<![\w-])\d+(?:[.:-]\d+)*", text)}

    return len(numbers(summary) - numbers(case.answer) - numbers(case.job.task)) > 1


def match_form(form: str, text: str, *, spaces: bool = False) -> list[str] | None:
    """Return the words in the places of a form's `{}`, or `None` for a text of another form.

    With `spaces`, a place may hold several words.

    Example: "{} of {}" and "2 of P-1" give ["2", "P-1"].
    """
    word = "(.+)" if spaces else r"(\S+)"
    matched = re.fullmatch(word.join(map(re.escape, form.split("{}"))), text)
    return list(matched.groups()) if matched else None
