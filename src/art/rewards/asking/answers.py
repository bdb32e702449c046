"""A judge's answer: the shape that is asked for, and what is accepted of what comes.

Scores are matched by id, never by position. What has only one reading is repaired (a number in quotes, the same score
twice, a fence around the JSON, 1.0000001); everything else is named, so that the judge can be asked again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from art.errors import JudgeAnswerError
from art.rewards.judge import Verdict

OVERSHOOT = 0.02
"""A score this far outside of 0 to 1 is set to the bound; a larger one is another scale, which cannot be guessed."""
_MAX_EXPLANATION = 2000
_MAX_STARTS = 1000
"""Brackets at which JSON is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    by_id: dict[str, Verdict]
    num_repairs: int


def response_format(criteria: Sequence[str]) -> dict[str, Any]:
    """The JSON schema, in the form of OpenAI's `response_format`. With criteria, each is scored by itself."""
    number = {"type": "number"}
    scored: dict[str, Any] = {"score": number}
    if criteria:
        scored = {
            "criteria": {
                "type": "object", "properties": {name: number for name in criteria},
                "required": list(criteria), "additionalProperties": False,
            }
        }  # fmt: skip
    item = {"trajectory_id": {"type": "string"}, "explanation": {"type": "string"}, **scored}
    schema = {
        "type": "object", "required": ["scores"], "additionalProperties": False,
        "properties": {
            "scores": {
                "type": "array",
                "items": {
                    "type": "object", "properties": item, "required": list(item), "additionalProperties": False
                },
            }
        },
    }  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": schema}}


def read_scores(text: str, ids: Sequence[str], weights: dict[str, float]) -> Scores:
    """The verdict of every id.

    Args:
        weights: of the criteria by name; empty if there is one score for all.

    Raises:
        JudgeAnswerError: says what is wrong, in words of ours only: the message is sent back to the judge, and its
            answer may quote an agent.
    """
    rows, repaired = _find_rows(text)
    faults: list[str] = []
    found: dict[str, Verdict] = {}
    num_repairs = int(repaired)
    num_unknown = 0
    for row in rows:
        name = str(row.get("trajectory_id", row.get("id", ""))).strip()
        if name not in ids:
            num_unknown += 1
            continue
        try:
            verdict, repairs = _read_row(row, weights)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        num_repairs += repairs
        if name in found:
            if found[name].score != verdict.score:
                faults.append(f"{name}: two different scores")
            num_repairs += 1
        found[name] = verdict
    known_bad = {fault.partition(":")[0] for fault in faults}
    if missing := [name for name in ids if name not in found and name not in known_bad]:
        unknown = f" ({num_unknown} have an id that does not exist)" if num_unknown else ""
        faults.append(f"no score for {', '.join(missing)}{unknown}")
    if faults:
        raise JudgeAnswerError("; ".join(faults))
    return Scores(by_id=found, num_repairs=num_repairs + num_unknown)


def _read_row(row: dict[str, Any], weights: dict[str, float]) -> tuple[Verdict, int]:
    explanation = str(row.get("explanation") or "")[:_MAX_EXPLANATION]
    if not weights:
        score, repaired = _read_number(row.get("score"), "score")
        return Verdict(score=score, explanation=explanation), repaired
    given = row.get("criteria")
    if not isinstance(given, dict):
        raise ValueError("no object `criteria`")
    parts: dict[str, float] = {}
    num_repairs = 0
    for name in weights:
        parts[name], repaired = _read_number(given.get(name), name)
        num_repairs += repaired
    total = sum(weights[name] * parts[name] for name in weights) / sum(weights.values())
    return Verdict(score=total, explanation=explanation, parts=parts), num_repairs


def _read_number(value: Any, name: str) -> tuple[float, int]:
    """A score and whether it had to be repaired."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is not a number")
    if not -OVERSHOOT <= number <= 1 + OVERSHOOT:
        raise ValueError(f"{name} is {number:g}, outside of 0 to 1")
    return min(max(number, 0.0), 1.0), int(isinstance(value, str) or not 0 <= number <= 1)


def _find_rows(text: str) -> tuple[list[dict[str, Any]], bool]:
    """The list of scores, and whether it had to be looked for: the last one counts, since models think aloud first."""
    try:
        candidates, repaired = [json.loads(text)], False
    except (ValueError, RecursionError):
        candidates, repaired = objects_in(text), True
    for value in reversed(candidates):
        rows = value.get("scores") if isinstance(value, dict) else value
        if isinstance(rows, dict):  # {"t-abcd": 0.5} can only mean one thing
            rows, repaired = [{"trajectory_id": key, "score": score} for key, score in rows.items()], True
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
            return [row for row in rows if isinstance(row, dict)], repaired
    raise JudgeAnswerError("it is not a JSON object with a list `scores`, or it was cut short")


def objects_in(text: str) -> list[Any]:
    """The JSON objects and lists of a text, in their order; those inside of others are parts of these."""
    decoder, found, position = json.JSONDecoder(), [], 0
    for match in islice(re.finditer(r"[\[{]", text), _MAX_STARTS):
        if match.start() < position:
            continue
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        found.append(value)
    return found
